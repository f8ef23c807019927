"""A decoder-only Transformer, written out by hand, in reading order.

    input_ids (B, T)
        |
    token embedding                      (B, T, C)
        |
        +--> RMSNorm -> Attention -+     one Block, n_layers times: each half reads a normalised
        |<-------------------------+     copy of the stream and adds its result to it ("pre-norm")
        +--> RMSNorm -> SwiGLU ----+
        |<-------------------------+
        |
    RMSNorm -> product with the embedding matrix, transposed ("tied output")
        |
    logits (B, T, V), or the summed cross entropy if targets are given

Parameter names are those of MiniMind2 and of Hugging Face Llama, so weights go both ways. Letters:
B batch, T sequence, S sequence that attention sees, C dim, H query heads, K key/value heads, D head
dim, V vocabulary, F feed-forward. Not here: the KV cache and sampling (`generate.py`), weight files
(`weights.py`), who looks at whom (`attention.py`), the loss of the output layer (`loss.py`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import way_to_attend
from model.LMConfig import LMConfig
from model.loss import output_loss


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), computed in float32.

    Squares of activations overflow float16 beyond 255, hence the float32 inside; the result has
    the input's dtype.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x32 * inverse_rms * self.weight.float()).to(x.dtype)


def rotary_table(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864).

    position_ids (B, T) int64 -> cos, sin (B, 1, T, D) float32. Channel pair j turns by
    position * theta^(-2j/D) radians; the D/2 angles are repeated for the two halves of a head.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim  # (D/2)
    angles = position_ids[:, None, :, None].float() * theta**-exponents  # (B, 1, T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, T, D)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (j, j + D/2) of x (B, heads, T, D) by the table's angles.

    Pairing the two halves, not neighbours, is Llama's convention in Hugging Face files; weights
    trained with one are useless under the other.
    """
    first, second = x.chunk(2, dim=-1)  # 2 x (B, heads, T, D/2)
    rotated = torch.cat((-second, first), dim=-1)  # (B, heads, T, D)
    return (x * cos + rotated * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention where H query heads share K key/value heads (GQA, arXiv:2305.13245)."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.q_proj = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend, kv_cache) -> Tensor:
        """x (B, T, C) -> (B, T, C). attend: `attention.py`'s way to compute it."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)  # (B,K,T,D)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)  # (B,K,T,D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)  # (B, K, S, D): everything seen so far
        y = attend(q, k, v, self.dropout if self.training else 0.0)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, C)
        return F.dropout(self.o_proj(y), self.dropout, self.training)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.dropout = config.dropout
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, T, F)
        return F.dropout(self.down_proj(hidden), self.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend, kv_cache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, kv_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks and final norm: everything but the output layer.

    A module of its own only because the files we share call these tensors `model.*`.
    """

    def __init__(self, config: LMConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)


class MiniMindLM(nn.Module):
    """The language model. `config.dropout` acts only in training mode.

    depth: how many blocks are used, the first ones; may be changed at any time. A block that has
    not been trained changes the stream by some percent only, so a model may grow while it learns.

    gradient_checkpointing: keep only what enters each block, and compute the rest anew in the
    backward pass (arXiv:1604.06174): a quarter more compute for a fraction of the activations.
    """

    def __init__(self, config: LMConfig, gradient_checkpointing: bool = False):
        super().__init__()
        self.config, self.gradient_checkpointing = config, gradient_checkpointing
        self.depth = config.n_layers
        self.model = Decoder(config)
        self.initialise()

    def initialise(self):
        """Draws all matrices from N(0, 0.02^2); those that write to the residual stream smaller.

        With a tied output the embedding sets the scale of the first logits: a normalised state has
        length sqrt(C), so logits start at 0.02 * sqrt(512) = 0.45 standard deviations around 0, and
        the first loss at ln V + 0.45^2 / 2 = 8.87 rather than in the hundreds that the default
        N(0, 1) gives. Dividing o_proj and down_proj by sqrt(2 * n_layers) keeps the residual
        stream's variance independent of depth (GPT-2, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.n_layers if writes_to_stream else 1
                nn.init.normal_(parameter, mean=0.0, std=0.02 / depth**0.5)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
        targets: Tensor | None = None,
        kv_cache=None,
        doc_starts: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with targets the cross entropy in nats summed over them (a scalar).

        input_ids, position_ids, doc_ids, targets: (B, T) int64. Positions default to 0, 1, 2, ...
        (going on where the cache ends); without doc_ids each row is one document; targets are
        already shifted, and IGNORED_TARGET (`loss.py`) marks those that do not count. doc_starts
        (M + 1,) int32 says nothing new, but lets a GPU take a faster way (`attention.Flash`).
        """
        B, T = input_ids.shape
        seen = 0 if kv_cache is None else kv_cache.length
        if position_ids is None:
            position_ids = torch.arange(seen, seen + T, device=input_ids.device).expand(B, T)
        if kv_cache is not None and doc_ids is None:
            doc_ids = torch.zeros_like(input_ids)
        if self.training and self.config.dropout:  # the faster way drops nothing
            doc_starts = None
        # Rows as they are, or their documents end to end: from here on B is 1 then, and T is N.
        attend = way_to_attend(doc_ids, kv_cache, doc_starts, self.config.head_dim)
        input_ids, position_ids = attend.pick(input_ids), attend.pick(position_ids)

        cos, sin = rotary_table(position_ids, self.config.head_dim, self.config.rope_theta)
        embedding = self.model.embed_tokens
        x = F.dropout(embedding(input_ids), self.config.dropout, self.training)  # (B, T, C)
        for index, block in enumerate(self.model.layers[: self.depth]):
            layer_cache = None if kv_cache is None else kv_cache.layers[index]
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, layer_cache, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend, layer_cache)
        x = self.model.norm(x)

        if targets is None:
            return F.linear(attend.put_back(x), embedding.weight)  # (B, T, V)
        return output_loss(x.flatten(0, 1), embedding.weight, attend.pick(targets).flatten())

    def parameters_in_use(self) -> list[nn.Parameter]:
        """All parameters but those of blocks beyond `depth`, in the order of their definition."""
        unused = set(self.model.layers[self.depth :].parameters())
        return [parameter for parameter in self.parameters() if parameter not in unused]

    def num_parameters(self) -> int:
        """Number of parameters; the tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
