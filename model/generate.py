"""Text generation: the KV cache, sampling, and batched generation that streams.

Nothing here knows text: token ids go in, token ids come out (`dataset/tokenizer.py` decodes them
piece by piece).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import PAD_DOC_ID
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM


class LayerCache:
    """Keys and values of one layer: room for `capacity` positions, filled from the left."""

    def __init__(self, config: LMConfig, batch: int, capacity: int, like: Tensor):
        shape = (batch, config.n_kv_heads, capacity, config.head_dim)
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)  # (B, K, capacity, D)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, K, T, D) and returns all that is stored, (B, K, S, D)."""
        if self.length == 0:  # under autocast the projections' dtype is known only now
            self.k, self.v = self.k.to(k.dtype), self.v.to(v.dtype)
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class KVCache:
    """What earlier positions left behind, so that a new token costs one position, not all."""

    def __init__(self, model: MiniMindLM, batch: int, capacity: int):
        like = model.model.embed_tokens.weight
        self.layers = [LayerCache(model.config, batch, capacity, like)
                       for _ in range(model.config.n_layers)]
        self.doc_ids = torch.empty(batch, 0, dtype=torch.int64, device=like.device)

    @property
    def length(self) -> int:
        """Positions stored so far, S."""
        return self.doc_ids.shape[1]

    def append_doc_ids(self, doc_ids: Tensor) -> Tensor:
        """Notes the documents (B, T) of T new positions; returns those of all S, (B, S)."""
        self.doc_ids = torch.cat((self.doc_ids, doc_ids), dim=1)
        return self.doc_ids


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Raises ValueError naming every value out of range."""

    temperature: float = 0.85  # divides the logits; 0 takes the most likely token
    top_p: float = 0.85  # smallest set of tokens that holds this much probability; 1 = all
    top_k: int = 0  # the k most likely tokens; 0, or more than V, = all
    repetition_penalty: float = 1.0  # above 1 makes tokens that occurred already less likely

    def __post_init__(self):
        problems = []
        if not self.temperature >= 0:
            problems.append(f"temperature {self.temperature}: expected at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p {self.top_p}: expected above 0 and at most 1 (1 is off)")
        if self.top_k < 0:
            problems.append(f"top_k {self.top_k}: expected at least 0 (0 is off)")
        if not 0 < self.repetition_penalty < float("inf"):
            problems.append(f"repetition_penalty {self.repetition_penalty}: expected above 0 and "
                            "finite (1 is off)")
        if problems:
            raise ValueError("; ".join(problems))


def next_token(logits: Tensor, seen: Tensor, how: Sampling, generator: torch.Generator | None
               ) -> Tensor:
    """Draws one token a row: logits (B, V), seen (B, V) bool = occurred already -> (B,) int64.

    Repetition penalty: arXiv:1909.05858, section 4.1; top-p ("nucleus") sampling: arXiv:1904.09751.
    """
    logits = logits.float()
    if how.repetition_penalty != 1:
        weaker = torch.where(logits > 0, logits / how.repetition_penalty,
                             logits * how.repetition_penalty)
        logits = torch.where(seen, weaker, logits)
    if how.temperature == 0:
        return logits.argmax(dim=-1)
    # Relative to the largest, so that no temperature, however small, divides into infinity.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / how.temperature
    logits, token_ids = logits.sort(dim=-1, descending=True)  # (B, V)
    if how.top_k:
        logits[:, how.top_k :] = -torch.inf
    probs = logits.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of everything more likely
    probs[before >= how.top_p] = 0  # the first token has nothing before it and always stays
    drawn = torch.multinomial(probs, num_samples=1, generator=generator)  # (B, 1)
    return token_ids.gather(1, drawn)[:, 0]


@torch.inference_mode()
def generate(
    model: MiniMindLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    seed: int | None = None,
) -> Iterator[list[int | None]]:
    """Continues all prompts together, and yields after each step one new token id a prompt.

    None stands for a prompt that is finished: after one of stop_ids (which is not yielded), after
    max_new_tokens, or at the model's max_position_embeddings. Prompts of different lengths are
    padded on the left with positions of no document, so each gives what it gives alone.
    Raises ValueError for an empty prompt or one that leaves no position free.
    """
    device = model.model.embed_tokens.weight.device
    longest = max(len(prompt) for prompt in prompts)
    room = model.config.max_position_embeddings - longest
    if min(len(prompt) for prompt in prompts) == 0 or room < 1:
        raise ValueError(
            f"prompts of {min(map(len, prompts))} to {longest} tokens: expected at least 1 and "
            f"fewer than max_position_embeddings = {model.config.max_position_embeddings}"
        )
    generator = None
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)

    padding = [longest - len(prompt) for prompt in prompts]
    input_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts)],
                             device=device)  # (B, T)
    pads = torch.tensor(padding, device=device)[:, None]  # (B, 1)
    position_ids = torch.arange(longest, device=device)[None] - pads  # (B, T), below 0 on padding
    doc_ids = torch.where(position_ids < 0, PAD_DOC_ID, 0)
    position_ids = position_ids.clamp(min=0)
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True

    cache = KVCache(model, len(prompts), longest + min(max_new_tokens, room))
    finished = [False] * len(prompts)
    for _ in range(min(max_new_tokens, room)):
        logits = model(input_ids, position_ids, doc_ids, kv_cache=cache)[:, -1]  # (B, V)
        tokens = next_token(logits, seen, sampling, generator)  # (B,)
        seen.scatter_(1, tokens[:, None], True)
        new = tokens.tolist()
        finished = [done or token in stop_ids for done, token in zip(finished, new)]
        if all(finished):
            return
        yield [None if done else token for done, token in zip(finished, new)]
        input_ids = tokens[:, None]  # (B, 1)
        position_ids = position_ids[:, -1:] + 1
        doc_ids = torch.zeros_like(input_ids)  # new tokens belong to the prompt's document


def generate_all(model: MiniMindLM, prompts: list[list[int]], max_new_tokens: int,
                 sampling: Sampling, stop_ids: tuple[int, ...], seed: int | None = None
                 ) -> list[list[int]]:
    """`generate`, gathered: the new token ids of each prompt."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, max_new_tokens, sampling, stop_ids, seed):
        for output, token in zip(outputs, step):
            if token is not None:
                output.append(token)
    return outputs
