"""Who looks at whom, and three ways to compute it.

A position sees itself and what came before it in its own document. Documents lie packed in rows:

    doc_ids      0 0 0 0 0 1 1 1 | 0 0 0 1 1 1 1 pad

`Masked` compares the doc_ids of every pair of positions in a row: it works everywhere, with a cache
and under torch.compile, and spends most of its time on pairs that may not look at each other.
`EndToEnd` leaves out the padding, lays the documents end to end and gives each a causal attention
of its own, which needs no mask. `Flash` does so on a GPU, in one kernel for all documents, padding
included. Same numbers to rounding, as long as a document is one unbroken run of positions.

The model has the same three verbs for each: `pick` lays out its inputs, calling it attends (in
every block), `put_back` brings the outcome into rows again. Letters as in `transformer.py`; N
positions that lie end to end: `EndToEnd` takes those of the documents, `Flash` all B * T.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_DOC_ID = -1  # positions that belong to no document; they see only each other
SHORT = 128  # neighbouring documents of together at most so many positions share one call


def attention_mask(doc_ids: Tensor, key_doc_ids: Tensor) -> Tensor:
    """Who may look at whom: a position sees itself and what came before it in its own document.

    doc_ids (B, T) are the queries' documents, key_doc_ids (B, S) the keys'; the queries are the
    last T of the S positions. Returns bool (B, 1, T, S), True where attention is allowed. Every
    query sees at least itself, so no softmax is ever taken over nothing (which would be NaN).
    """
    T, S = doc_ids.shape[1], key_doc_ids.shape[1]
    key_index = torch.arange(S, device=doc_ids.device)
    causal = key_index[None, :] <= key_index[S - T :, None]  # (T, S)
    same_document = doc_ids[:, :, None] == key_doc_ids[:, None, :]  # (B, T, S)
    return (causal & same_document)[:, None]


class Masked:
    """Attention of whole rows under a mask (B, 1, T, S); without one it is plainly causal."""

    def __init__(self, mask: Tensor | None):
        self.mask = mask

    def pick(self, per_position: Tensor) -> Tensor:
        """(B, T) as it is: padding goes through the model too."""
        return per_position

    def put_back(self, x: Tensor) -> Tensor:
        """(B, T, C) as it is."""
        return x

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        if q.shape[2] == 1:  # a new token: heads that share k and v become rows of one product
            return F.scaled_dot_product_attention(
                q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v, attn_mask=self.mask
            ).reshape(q.shape)
        # Written out rather than enable_gqa=True, which not every fused kernel accepts.
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, D)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.mask is None, dropout_p=dropout)


class EndToEnd:
    """Attention of N positions in one row, document after document.

    A call costs some tens of microseconds whatever its size, so neighbouring short documents share
    one, under a mask that is small. The lengths are needed as numbers: on a GPU reading them would
    hold up everything, on a CPU they are there.
    """

    def __init__(self, doc_ids: Tensor):
        """doc_ids (B, T) with some position that belongs to a document."""
        self.shape = doc_ids.shape
        self.kept = (doc_ids != PAD_DOC_ID).flatten().nonzero()[:, 0]  # (N,) int64
        begins = torch.ones_like(doc_ids)
        begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        number = begins.flatten().cumsum(0)[self.kept]  # of each position's document
        documents, lengths = number.unique_consecutive(return_counts=True)
        self.lengths, self.masks, start = [], [], 0
        for parts in share_calls(lengths.tolist(), SHORT):
            ids = documents[start : start + len(parts)].repeat_interleave(torch.tensor(parts))[None]
            self.lengths.append(sum(parts))
            self.masks.append(attention_mask(ids, ids) if len(parts) > 1 else None)
            start += len(parts)

    def pick(self, per_position: Tensor) -> Tensor:
        """(B, T) -> (1, N): the documents' positions."""
        return per_position.flatten()[self.kept][None]

    def put_back(self, x: Tensor) -> Tensor:
        """(1, N, C) -> (B, T, C), with zeros at the padding."""
        rows = x.new_zeros(self.shape.numel(), x.shape[2]).index_copy(0, self.kept, x[0])
        return rows.view(*self.shape, -1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """q (1, H, N, D), k and v (1, K, N, D) -> (1, H, N, D)."""
        parts = zip(*(tensor.split(self.lengths, dim=2) for tensor in (q, k, v)), self.masks)
        return torch.cat([
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           dropout_p=dropout, enable_gqa=True)
            for q, k, v, mask in parts], dim=2)


class Flash:
    """Attention of whole rows end to end on a GPU, document after document, in one kernel.

    A row's padding counts as one more document: its shape stays, and nothing waits for the host.
    """

    def __init__(self, shape: torch.Size, doc_starts: Tensor):
        """shape: of the rows, (B, T). doc_starts (M + 1,) int32: where in the rows laid end to end
        each document begins, then where the last one ends.
        """
        self.shape, self.doc_starts = shape, doc_starts

    def pick(self, per_position: Tensor) -> Tensor:
        """(B, T) -> (1, B * T)."""
        return per_position.reshape(1, -1)

    def put_back(self, x: Tensor) -> Tensor:
        """(1, B * T, C) -> (B, T, C)."""
        return x.view(*self.shape, -1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """q (1, H, N, D), k and v (1, K, N, D), 16 bits each -> (1, H, N, D); without dropout."""
        from torch.nn.attention.varlen import varlen_attn  # not in every release

        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, D), (N, K, D) twice
        y = varlen_attn(q, k, v, self.doc_starts, self.doc_starts, self.shape[1], self.shape[1],
                        window_size=(-1, 0), enable_gqa=True)  # (N, H, D); (-1, 0): causal
        return y.transpose(0, 1)[None]


@lru_cache
def flash_fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if `Flash` runs here and agrees with a mask, forward and backward.

    Found out by trying: GPUs, releases of torch, number formats and head sizes differ in it.
    """
    ids = torch.tensor([[0] * 25 + [1] + [2] * 54])
    starts = torch.tensor([0, 25, 26, 80], dtype=torch.int32)
    heads, generator = 4 + 2 + 2, torch.Generator().manual_seed(0)  # of q, k and v
    qkv = torch.randn(1, heads, 80, head_dim, generator=generator).to(device, dtype)
    outcomes = []
    try:
        for way, inputs in ((Masked(attention_mask(ids, ids).to(device)), qkv.float()),
                            (Flash(ids.shape, starts.to(device)), qkv)):
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                x = inputs.detach().requires_grad_()
                y = way(x[:, :4], x[:, 4:6], x[:, 6:], 0.0).float()
                outcomes.append((y, torch.autograd.grad(y.square().sum(), x)[0].float()))
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, TypeError, ValueError):
        return False
    return all(torch.allclose(flash, masked, rtol=0.05, atol=0.05)
               for masked, flash in zip(*outcomes))


def share_calls(lengths: list[int], most: int) -> list[list[int]]:
    """Neighbouring lengths, in lists of together at most `most`; a longer one stands alone."""
    shared: list[list[int]] = []
    for length in lengths:
        if shared and sum(shared[-1]) + length <= most:
            shared[-1].append(length)
        else:
            shared.append([length])
    return shared


def way_to_attend(doc_ids: Tensor | None, kv_cache, doc_starts: Tensor | None = None,
                  head_dim: int = 0) -> Masked | EndToEnd | Flash:
    """The fastest of the ways that fit; doc_ids (B, T), or None: each row is one document."""
    if kv_cache is not None:
        return Masked(attention_mask(doc_ids, kv_cache.append_doc_ids(doc_ids)))
    if doc_ids is None:
        return Masked(None)
    if not torch.compiler.is_compiling():
        kind = doc_ids.device.type
        if kind == "cpu" and (doc_ids != PAD_DOC_ID).any():
            return EndToEnd(doc_ids)
        if doc_starts is not None and torch.is_autocast_enabled(kind) and flash_fits(
                doc_ids.device, torch.get_autocast_dtype(kind), head_dim):
            return Flash(doc_ids.shape, doc_starts)
    return Masked(attention_mask(doc_ids, doc_ids))
