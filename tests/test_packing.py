"""Packing against a one-document-at-a-time reference: nothing lost, nothing twice, rows full.

Promises P2 and P3, cases A25, A26 and A72.
"""

import json
import lzma
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset import packing
from dataset.packing import IGNORED_TARGET, PAD_DOC_ID, Piece, TokenBudgetCollate, make_plan
from dataset.pretrain import PRETRAIN
from model import attention, loss

RNG = np.random.default_rng(0)
LENGTHS = {  # token counts, of documents in the order of a file
    "uniform": RNG.integers(2, 700, 200),
    "short": RNG.integers(2, 20, 300),
    "long": RNG.integers(400, 3000, 30),
    "text-like": np.exp(RNG.normal(5, 1, 200)).astype(int) + 2,
    "all equal": np.full(100, 65),
    "one token of room": np.array([64, 65, 66, 128, 129, 130, 2, 3]),
    "one": np.array([50]),
}
MAX_SEQ_LENS = (1, 7, 64, 512)

EVERY_PLAN = [pytest.param(lengths, max_seq_len, id=f"{name}-{max_seq_len}")
              for name, lengths in LENGTHS.items() for max_seq_len in MAX_SEQ_LENS]


def plan_of(lengths, max_seq_len, seed=42, long_docs="split"):
    return make_plan(np.arange(len(lengths)), lengths, max_seq_len, seed, long_docs)


def best_fit_decreasing(positions, max_seq_len: int) -> int:
    """Rows that best-fit decreasing needs, piece by piece: a naive search over all rows each."""
    free: list[int] = []
    for size in sorted(map(int, positions), reverse=True):
        fitting = [row for row, room in enumerate(free) if room >= size]
        if not fitting:
            fitting = [len(free)]
            free.append(max_seq_len)
        tightest = min(fitting, key=lambda row: free[row])
        free[tightest] -= size
    return len(free)


@pytest.mark.parametrize(("lengths", "max_seq_len"), EVERY_PLAN)
def test_every_token_is_a_target_once_and_no_row_overflows(lengths, max_seq_len):
    """Split: each token but a document's first is a target exactly once, in rows not too long (P2).

    Targets are counted one by one, in plain Python.
    """
    plan = plan_of(lengths, max_seq_len)
    times = [[0] * int(length) for length in lengths]
    assert plan.row_offsets[0] == 0 and plan.row_offsets[-1] == len(plan.documents)
    for row in range(plan.num_rows):
        used = 0
        for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
            used += int(plan.positions[piece])
            for position in range(plan.positions[piece]):
                times[plan.documents[piece]][plan.starts[piece] + position + 1] += 1
        assert 0 < used <= max_seq_len
    assert times == [[0] + [1] * (length - 1) for length in lengths.tolist()]


@pytest.mark.parametrize(("lengths", "max_seq_len"), EVERY_PLAN)
def test_piece_starts_with_the_last_token_of_the_one_before(lengths, max_seq_len):
    """Pieces of a long document follow each other, full but the last (P2)."""
    plan = plan_of(lengths, max_seq_len)
    for document, length in enumerate(lengths.tolist()):
        mine = np.flatnonzero(plan.documents == document)
        mine = mine[np.argsort(plan.starts[mine])]
        starts, positions = plan.starts[mine].tolist(), plan.positions[mine].tolist()
        assert starts[0] == 0 and len(starts) == -(-(length - 1) // max_seq_len)
        for index in range(1, len(starts)):
            last_token_before = starts[index - 1] + positions[index - 1]
            assert starts[index] == last_token_before
        assert positions[:-1] == [max_seq_len] * (len(positions) - 1)


@pytest.mark.parametrize(("lengths", "max_seq_len"), EVERY_PLAN)
def test_drop_leaves_out_exactly_the_documents_that_do_not_fit(lengths, max_seq_len):
    """Drop: a document of up to max_seq_len + 1 tokens is packed whole, a longer one not at all."""
    plan = plan_of(lengths, max_seq_len, long_docs="drop")
    assert sorted(plan.documents) == np.flatnonzero(lengths <= max_seq_len + 1).tolist()
    assert (plan.starts == 0).all()
    assert (plan.positions == lengths[plan.documents] - 1).all()


@pytest.mark.parametrize("long_docs", ["split", "drop"])
@pytest.mark.parametrize("max_seq_len", [100, 512])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_as_few_rows_as_naive_best_fit_decreasing(lengths, max_seq_len, long_docs):
    """Placing whole lengths at once needs exactly the rows of a search for every single piece."""
    plan = plan_of(lengths, max_seq_len, long_docs=long_docs)
    assert plan.num_rows == best_fit_decreasing(plan.positions, max_seq_len)


def test_as_few_rows_as_naive_best_fit_decreasing_on_many_small_cases():
    """The same on a thousand little cases, where ties and leftovers of every kind occur."""
    rng = np.random.default_rng(3)
    for _ in range(1000):
        max_seq_len = int(rng.integers(1, 30))
        lengths = rng.integers(2, rng.integers(3, 40), rng.integers(1, 40))
        plan = plan_of(lengths, max_seq_len)
        assert plan.num_rows == best_fit_decreasing(plan.positions, max_seq_len)


def test_empty_and_one_token_documents_take_no_place():
    """A document without a target is in no row, and a plan of none has no rows."""
    plan = plan_of(np.array([0, 1, 2, 5]), 8)
    assert sorted(plan.documents) == [2, 3] and plan.num_rows == 1
    for lengths in (np.array([], np.int64), np.array([0, 1])):
        empty = plan_of(lengths, 8)
        assert empty.num_rows == 0 and empty.fill == 0


def test_only_the_given_documents_are_packed():
    """Held-out documents stay out: the plan speaks of the indices it was given."""
    documents = np.arange(5, 200, 7)
    plan = make_plan(documents, LENGTHS["uniform"][documents], 512, 0)
    assert set(plan.documents) == set(documents)
    whole = np.bincount(plan.documents, plan.positions, 200)[documents]
    assert (whole == LENGTHS["uniform"][documents] - 1).all()


def contents(plan) -> list[list[tuple[int, int]]]:
    pairs = list(zip(plan.documents.tolist(), plan.starts.tolist()))
    return [pairs[first:last] for first, last in zip(plan.row_offsets, plan.row_offsets[1:])]


def test_plan_is_a_function_of_its_arguments():
    """The same arguments give the same plan in any random state, another seed another (P3)."""
    lengths = LENGTHS["uniform"]
    np.random.seed(1)
    first = plan_of(lengths, 512, seed=1)
    np.random.seed(2)
    torch.manual_seed(2)
    assert contents(first) == contents(plan_of(lengths.copy(), 512, seed=1))
    assert contents(first) != contents(plan_of(lengths, 512, seed=2))
    assert first.num_rows == plan_of(lengths, 512, seed=2).num_rows


def test_rows_mix_documents_of_the_whole_file():
    """Documents of equal length are taken in random order, so a row does not hold neighbours."""
    plan = plan_of(np.full(1000, 65), 512)
    in_one_row = [set(documents) for documents, _ in (zip(*row) for row in contents(plan))]
    spans = [max(documents) - min(documents) for documents in in_one_row]
    assert np.mean(spans) > 500  # eight of a thousand, drawn at random, span 777 on average


@pytest.fixture(scope="module")
def corpus_lengths(tokenizer):
    """Token counts of the corpus' first documents; they come in random order in the file."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data" / "pretrain.jsonl.xz"
    if not path.is_file():
        pytest.skip(f"{path} is not there (developers' data)")
    texts, deadline = [], time.monotonic() + 5
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            if len(texts) == 1500 or time.monotonic() > deadline:
                break
    return np.array([len(document.ids) for document in PRETRAIN.encode(tokenizer, texts)])


@pytest.mark.parametrize("max_seq_len", [512, 340])
def test_rows_of_the_corpus_are_full(corpus_lengths, max_seq_len):
    """At least 98 % of positions are used on a part of the real corpus (A26).

    The figures of the whole corpus are in docs/experiments.md.
    """
    if len(corpus_lengths) < 300:
        pytest.skip("too few documents read in time")
    assert plan_of(corpus_lengths, max_seq_len).fill >= 0.98


@pytest.mark.parametrize("max_seq_len", [512, 340])
@pytest.mark.parametrize("long_docs", ["split", "drop"])
def test_rows_of_synthetic_documents_are_full(max_seq_len, long_docs):
    """At least 98 % of positions are used on log-normal lengths, whatever becomes of long ones."""
    lengths = np.exp(np.random.default_rng(5).normal(5, 0.9, 20_000)).astype(int) + 2
    plan = plan_of(lengths, max_seq_len, long_docs=long_docs)
    assert plan.fill >= 0.98
    assert plan.fill == pytest.approx(plan.positions.sum() / (plan.num_rows * max_seq_len))


def test_padding_each_document_would_waste_much():
    """The comparison that packing is for: rows of one document each are far from full (A26)."""
    positions = plan_of(LENGTHS["text-like"], 512).positions
    assert positions.mean() / 512 < 0.6 < plan_of(LENGTHS["text-like"], 512).fill


def test_many_documents_are_planned_in_seconds():
    """1.4 million documents, the size of pretrain_hq.jsonl, are planned in under 10 seconds."""
    lengths = np.exp(np.random.default_rng(6).normal(5.4, 0.6, 1_400_000)).astype(int) + 2
    begun = time.perf_counter()
    plan = plan_of(lengths, 512)
    assert time.perf_counter() - begun < 10
    assert plan.positions.sum() == (lengths - 1).sum() and plan.fill > 0.9


def random_rows(rng, max_seq_len: int, with_mask: bool) -> list[list[Piece]]:
    """Rows of pieces as a data set yields them: full ones, short ones, an empty one."""
    rows = []
    for limit in (max_seq_len, max_seq_len // 2, 0, max_seq_len, 1):
        pieces, room = [], limit
        while room:
            size = int(rng.integers(1, room + 1))
            ids = rng.integers(0, 6400, size + 1).astype(np.uint16)
            mask = rng.integers(0, 2, size + 1).astype(np.uint8) if with_mask else None
            pieces.append(Piece(ids, mask, float(rng.random())))
            room -= size
        rows.append(pieces)
    return rows


def lay_out(pieces: list[Piece], max_seq_len: int) -> dict[str, list[int]]:
    """The reference: one row, one document at a time, one token at a time."""
    row = {"input_ids": [], "targets": [], "position_ids": [], "doc_ids": []}
    for number, piece in enumerate(pieces):
        ids = piece.ids.tolist()
        for position in range(len(ids) - 1):
            counts = piece.loss_mask is None or piece.loss_mask[position + 1]
            row["input_ids"].append(ids[position])
            row["targets"].append(ids[position + 1] if counts else IGNORED_TARGET)
            row["position_ids"].append(position)
            row["doc_ids"].append(number)
    padding = {"input_ids": 0, "targets": IGNORED_TARGET, "position_ids": 0, "doc_ids": PAD_DOC_ID}
    for name, column in row.items():
        column += [padding[name]] * (max_seq_len - len(column))
    return row


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("max_seq_len", [1, 2, 40])
def test_collate_against_one_document_at_a_time(max_seq_len, with_mask):
    """Inputs, targets, positions, documents, padding, loss mask and counts are as defined (P2)."""
    rows = random_rows(np.random.default_rng(max_seq_len), max_seq_len, with_mask)
    made = TokenBudgetCollate(max_seq_len)(rows)
    expected = [lay_out(pieces, max_seq_len) for pieces in rows]
    for name in ("input_ids", "targets", "position_ids", "doc_ids"):
        tensor = getattr(made, name)
        assert tensor.dtype == torch.int64 and tensor.shape == (len(rows), max_seq_len)
        assert tensor.tolist() == [row[name] for row in expected]
    supervised = sum(target != IGNORED_TARGET for row in expected for target in row["targets"])
    assert made.num_supervised == supervised
    assert made.text_bytes == pytest.approx(
        sum(piece.text_bytes for pieces in rows for piece in pieces))


def test_end_of_text_as_a_token_is_no_padding():
    """Token 0 in a document is read and predicted like any other; only padding is ignored."""
    made = TokenBudgetCollate(4)([[Piece(np.array([1, 0, 0, 2], np.uint16), None, 2.0)]])
    assert made.targets.tolist() == [[0, 0, 2, IGNORED_TARGET]] and made.num_supervised == 3
    assert made.doc_ids.tolist() == [[0, 0, 0, PAD_DOC_ID]]


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 100])
def test_micro_batches_never_exceed_the_token_budget(count, batch_size):
    """split covers the rows once and in order, within the budget; the last one is marked (A72)."""
    max_seq_len = 16
    budget = batch_size * max_seq_len + 5  # not a multiple: what is over must not become a row
    pieces = [[Piece(np.arange(1, 10) + row, None, 1.0)] for row in range(count)]
    rows = TokenBudgetCollate(max_seq_len)(pieces)
    micro_batches = list(rows.split(budget, torch.device("cpu")))
    assert len(micro_batches) == -(-count // batch_size)
    assert [last for _, last in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
    for micro_batch, _ in micro_batches:
        assert set(micro_batch) == {"input_ids", "targets", "position_ids", "doc_ids"}
        assert 0 < micro_batch["input_ids"].numel() <= budget
    for name in ("input_ids", "targets", "position_ids", "doc_ids"):
        joined = torch.cat([micro_batch[name] for micro_batch, _ in micro_batches])
        assert torch.equal(joined, getattr(rows, name))


def test_a_row_is_never_split():
    """A budget below one row still yields whole rows, one at a time, rather than none."""
    rows = TokenBudgetCollate(16)([[], [], []])
    shapes = [tuple(made["input_ids"].shape) for made, _ in rows.split(3, torch.device("cpu"))]
    assert shapes == [(1, 16)] * 3


def test_model_and_data_agree_on_the_marks_of_padding():
    """The two folders may not import each other, so each states these numbers: they are equal."""
    assert packing.IGNORED_TARGET == loss.IGNORED_TARGET == -100
    assert packing.PAD_DOC_ID == attention.PAD_DOC_ID
