"""All ways to attend give the same numbers: logits, loss and every gradient."""

import pytest
import torch

from dataset.packing import Rows, document_starts
from model import attention, transformer
from model.attention import (
    PAD_DOC_ID,
    EndToEnd,
    Flash,
    Masked,
    attention_mask,
    flash_fits,
    share_calls,
)
from model.LMConfig import LMConfig
from model.loss import IGNORED_TARGET
from model.transformer import MiniMindLM

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 50,
         "hidden_dim": 48}


def packed(*rows: list[int]) -> dict:
    """Rows of documents of these lengths; what is left of the longest row is padding."""
    torch.manual_seed(0)
    T = max(map(sum, rows))
    doc_ids = torch.full((len(rows), T), PAD_DOC_ID)
    position_ids = torch.zeros(len(rows), T, dtype=torch.int64)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            doc_ids[row, start : start + length] = number
            position_ids[row, start : start + length] = torch.arange(length)
            start += length
    targets = torch.randint(50, (len(rows), T)).where(doc_ids != PAD_DOC_ID, IGNORED_TARGET)
    return {"input_ids": torch.randint(50, (len(rows), T)), "position_ids": position_ids,
            "doc_ids": doc_ids, "targets": targets}


def outcome(batch: dict, monkeypatch, way, **options) -> tuple:
    """Logits where documents are, the loss, and all gradients."""
    monkeypatch.setattr(transformer, "way_to_attend", lambda doc_ids, *_: way(doc_ids))
    torch.manual_seed(1)
    model = MiniMindLM(LMConfig(**SHAPE), **options)
    for parameter in model.parameters():  # larger than at the start: attention is not uniform
        parameter.data.mul_(3)
    loss = model(**batch)
    loss.backward()
    logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", "doc_ids")})
    assert logits.shape == (*batch["doc_ids"].shape, 50)
    logits = logits[batch["doc_ids"] != PAD_DOC_ID]
    return logits, loss, *(parameter.grad for parameter in model.parameters())


def masked(doc_ids):
    return Masked(attention_mask(doc_ids, doc_ids))


def varlen(q, k, v, starts, key_starts, longest, longest_key, *, window_size, enable_gqa):
    """What torch's kernel computes, on any device: q (N, H, D), k and v (N, K, D)."""
    assert starts is key_starts and starts.dtype == torch.int32 and starts[-1] == len(q)
    assert window_size == (-1, 0) and enable_gqa
    lengths = starts.diff().tolist()
    assert max(lengths) <= longest == longest_key
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)))
    return torch.cat([attention.F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0] for q, k, v in parts],
        dim=1).transpose(0, 1)


def flash(doc_ids):
    return Flash(doc_ids.shape, document_starts(doc_ids))


ROWS = pytest.mark.parametrize("rows", [
    ([5],), ([1, 1, 1],), ([3, 4, 2], [9]), ([2, 9], [1, 1, 1, 1, 1, 1, 1, 1], []),
    ([150, 3, 4], [90, 40, 27], [128, 1]),
])


@ROWS
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_documents_end_to_end_equal_rows_under_a_mask(rows, options, monkeypatch):
    """P1, P2: whichever way is taken, the same step is done."""
    batch = packed(*rows)
    for ours, theirs in zip(outcome(batch, monkeypatch, EndToEnd, **options),
                            outcome(batch, monkeypatch, masked, **options)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@ROWS
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_rows_end_to_end_in_one_kernel_equal_rows_under_a_mask(rows, options, monkeypatch):
    """The GPU's way, with the kernel that a CPU has not replaced by one that computes the same."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    batch = packed(*rows)
    for ours, theirs in zip(outcome(batch, monkeypatch, flash, **options),
                            outcome(batch, monkeypatch, masked, **options)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_where_documents_start():
    """Each row begins one, whatever ended before it; padding is one more."""
    starts = document_starts(packed([3, 2], [4], [])["doc_ids"])
    assert starts.tolist() == [0, 3, 5, 9, 10, 15] and starts.dtype == torch.int32
    assert document_starts(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [0, 3, 6]


def test_micro_batches_for_a_gpu_say_where_documents_start(monkeypatch):
    """Each micro-batch counts from its own first row; other devices are spared."""
    batch = packed([3, 2], [4], [5])
    names = ("input_ids", "targets", "position_ids", "doc_ids")
    rows = Rows(*(batch[name] for name in names), 1, 1)
    assert not any("doc_starts" in part for part, _ in rows.split(10, torch.device("cpu")))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    parts = [part["doc_starts"].tolist() for part, _ in rows.split(10, torch.device("cuda"))]
    assert parts == [[0, 3, 5, 9, 10], [0, 5]]


def test_the_kernel_is_tried_before_it_is_used(monkeypatch):
    """Absent (a CPU has none), refusing, or computing something else: then it does not fit."""
    cpu, name = torch.device("cpu"), "torch.nn.attention.varlen.varlen_attn"
    flash_fits.cache_clear()
    assert not flash_fits(cpu, torch.float16, 8)
    tried_in = []

    def noting(q, *args, **options):
        tried_in.append(q.dtype)
        return varlen(q, *args, **options)

    def wrong(*args, **options):
        return varlen(*args, **options) * 1.2

    for kernel, fits in ((noting, True), (wrong, False)):
        for dtype in (torch.float16, torch.bfloat16):
            flash_fits.cache_clear()
            monkeypatch.setattr(name, kernel)
            before = torch.get_rng_state()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as in a forward pass
                assert flash_fits(cpu, dtype, 64) == fits
            assert torch.get_rng_state().equal(before)
    assert tried_in == [torch.float16, torch.bfloat16]
    flash_fits.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype):
    """The way that is taken there equals the mask, and nothing waits for the host."""
    device, shape = torch.device("cuda"), {**SHAPE, "dim": 64}
    batch = packed([150, 3, 4], [90, 40, 27], [128, 1])
    micro_batch = {name: tensor.to(device) for name, tensor in batch.items()}
    starts = document_starts(batch["doc_ids"]).to(device)
    if torch.cuda.get_device_capability() >= (8, 0):  # older cards have no such kernel
        with torch.autocast("cuda", dtype):
            way = attention.way_to_attend(micro_batch["doc_ids"], None, starts, head_dim=16)
        assert isinstance(way, Flash)
    torch.manual_seed(1)
    model = MiniMindLM(LMConfig(**shape)).to(device)
    outcomes = []
    for more in ({"doc_starts": starts}, {"doc_starts": starts}, {}):  # the first one tries
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if outcomes else "default")
        try:
            with torch.autocast("cuda", dtype):
                loss = model(**micro_batch, **more)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        outcomes.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(outcomes[1], outcomes[2]):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_the_faster_way_is_taken_where_it_fits():
    """Without a cache, without compile and with documents: end to end. Else under a mask."""
    doc_ids = packed([3, 2], [4])["doc_ids"]
    assert isinstance(attention.way_to_attend(doc_ids, None), EndToEnd)
    assert attention.way_to_attend(None, None).mask is None
    nothing = torch.full((2, 3), PAD_DOC_ID)
    assert attention.way_to_attend(nothing, None).mask.shape == (2, 1, 3, 3)


def test_padding_costs_nothing():
    """Only positions of documents go through the model."""
    way = EndToEnd(packed([3, 2], [4], [])["doc_ids"])
    assert way.kept.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert way.pick(torch.arange(15).view(3, 5)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]


def test_equal_numbers_in_two_rows_are_two_documents():
    """A row that ends with document 0 and one that begins with it: two documents, by any number."""
    way = EndToEnd(torch.tensor([[7, 7, 7], [7, 7, 7]]))
    ids = way.masks[0][0, 0]
    assert way.lengths == [6] and ids[:3, :3].equal(torch.ones(3, 3).tril().bool())
    assert not ids[3:, :3].any()


def test_short_documents_share_a_call():
    """Neighbours share while they fit together; a long one stands alone, and needs no mask."""
    assert share_calls([60, 60, 60, 200, 8, 120, 1], 128) == [[60, 60], [60], [200], [8, 120], [1]]
    way = EndToEnd(packed([60, 60, 60, 200])["doc_ids"])
    assert way.lengths == [120, 60, 200]
    assert [mask is None for mask in way.masks] == [False, True, True]


@pytest.mark.parametrize("strided", [False, True])
def test_a_new_token_attends_like_any_other(strided, monkeypatch):
    """The shortcut for one query equals the last query of many; kernels may lay their result out
    as they like (those of CUDA do).
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    doc_ids = torch.tensor([[0] * 7, [PAD_DOC_ID] * 3 + [0] * 4])
    mask = attention_mask(doc_ids, doc_ids)
    whole = Masked(mask)(q, k, v, 0.0)
    if strided:
        plain = attention.F.scaled_dot_product_attention
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda *args, **options:
                            plain(*args, **options).transpose(1, 2).contiguous().transpose(1, 2))
    alone = Masked(mask[:, :, -1:])(q[:, :, -1:], k, v, 0.0)
    torch.testing.assert_close(alone, whole[:, :, -1:], rtol=0, atol=1e-6)


def test_under_autocast_both_ways_agree(monkeypatch):
    """bfloat16: to its rounding."""
    batch = packed([5, 3], [9])
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (outcome(batch, monkeypatch, way) for way in (EndToEnd, masked))
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-2, atol=0)
