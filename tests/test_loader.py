"""The loader: order is a function, shares are fair, workers change nothing.

Promises P2 and P3, cases A41, A69 and A72.
"""

import functools
import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.loader import (
    EMPTY_ROW,
    PackedRows,
    StepLoader,
    StepSampler,
    batches_in_order,
    epoch_order,
    split_documents,
    steps_per_epoch,
)
from dataset.packing import IGNORED_TARGET, PAD_DOC_ID, make_plan
from dataset.pretrain import PRETRAIN
from dataset.token_cache import open_token_cache

MAX_SEQ_LEN = 32


class NumberedTokens:
    """Stands for a token cache in which every token is another number, so each can be followed."""

    source = Path("numbers.jsonl")

    def __init__(self, with_mask: bool, seed: int = 0, documents: int = 120):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(2, 100, documents)
        self.offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        self.tokens = np.arange(self.offsets[-1])
        self.text_bytes = self.lengths * 3
        self.loss_mask = None
        if with_mask:
            self.loss_mask = rng.integers(0, 2, len(self.tokens)).astype(np.uint8)
            self.loss_mask[self.offsets[1:] - 1] = 1  # the end mark of the last answer


def packed(with_mask=False, long_docs="split", **options) -> PackedRows:
    cache = NumberedTokens(with_mask, **options)
    documents = np.arange(len(cache.lengths))
    return PackedRows(cache, make_plan(documents, cache.lengths, MAX_SEQ_LEN, 42, long_docs))


@pytest.mark.parametrize("with_mask", [False, True])
def test_every_supervised_token_is_a_target_once_an_epoch(with_mask):
    """Over an epoch each token of each document is a target once, after the token before it (P2).

    Followed by number through plan, cache, sampler, collate and split.
    """
    dataset = packed(with_mask)
    total = steps_per_epoch(len(dataset), 7)
    targets, num_supervised, text_bytes = [], 0, 0.0
    for _, rows in StepLoader(dataset, StepSampler(len(dataset), 7, total, 1), 0):
        num_supervised += rows.num_supervised
        text_bytes += rows.text_bytes
        for micro_batch, _ in rows.split(3 * MAX_SEQ_LEN, torch.device("cpu")):
            inside = micro_batch["targets"] != IGNORED_TARGET
            targets += micro_batch["targets"][inside].tolist()
            assert torch.equal(micro_batch["input_ids"][inside] + 1, micro_batch["targets"][inside])
            assert (micro_batch["doc_ids"][inside] != PAD_DOC_ID).all()
    cache = dataset.cache
    expected = [int(token) for begin, end in zip(cache.offsets, cache.offsets[1:])
                for token in range(begin + 1, end) if not with_mask or cache.loss_mask[token]]
    assert sorted(targets) == expected and num_supervised == len(expected)
    first_counts = 0 if not with_mask else cache.loss_mask[cache.offsets[:-1]].sum()
    if not first_counts:  # bytes belong to the counting tokens, however a document is cut
        assert text_bytes == pytest.approx(cache.text_bytes.sum())


def test_dropped_documents_bring_no_bytes():
    """Bytes are those of the text that counts: a dropped document adds none."""
    dataset = packed(long_docs="drop")
    total = sum(rows.text_bytes for rows in batches_in_order(dataset, rows_per_batch=4))
    fitting = dataset.cache.lengths <= MAX_SEQ_LEN + 1
    assert 0 < fitting.sum() < len(fitting)
    assert total == pytest.approx(dataset.cache.text_bytes[fitting].sum())


def test_pieces_of_a_document_share_its_bytes():
    """A piece has the part of the text's bytes that its targets are of the document's."""
    dataset = packed()
    cache, plan = dataset.cache, dataset.plan
    for index, document in enumerate(plan.documents):
        share = plan.positions[index] / (cache.lengths[document] - 1)
        assert dataset.piece(index).text_bytes == pytest.approx(cache.text_bytes[document] * share)


def test_an_empty_row_holds_nothing():
    """The row that fills up a share has no target, no document, and brings no bytes (A72)."""
    dataset = packed()
    assert dataset[EMPTY_ROW] == []
    [(_, rows)] = StepLoader(dataset, StepSampler(3, 3, 1, 0, rank=1, world_size=2), 0)
    assert rows.input_ids.shape == (2, MAX_SEQ_LEN)
    assert (rows.targets[1] == IGNORED_TARGET).all() and (rows.doc_ids[1] == PAD_DOC_ID).all()
    assert rows.num_supervised == int((rows.targets[0] != IGNORED_TARGET).sum()) > 0


def rows_of(step: int, num_rows: int, global_batch: int, seed: int) -> list[int]:
    """DESIGN P3 as it is written: the rows of a step, for all processes together."""
    epoch, in_epoch = divmod(step, -(-num_rows // global_batch))
    end = min((in_epoch + 1) * global_batch, num_rows)
    order = epoch_order(num_rows, seed, epoch)
    return [int(order[position]) for position in range(in_epoch * global_batch, end)]


SHAPES = [(100, 8), (100, 10), (7, 16), (5, 5), (1, 4), (33, 32), (12, 1)]  # (rows, global batch)


@pytest.mark.parametrize(("num_rows", "global_batch"), SHAPES)
def test_order_is_the_function_of_the_design(num_rows, global_batch):
    """Steps consume the rows that DESIGN P3 says, over three epochs and with a short last step."""
    per_epoch = steps_per_epoch(num_rows, global_batch)
    sampler = StepSampler(num_rows, global_batch, 3 * per_epoch, seed=9)
    steps = list(sampler)
    assert len(steps) == len(sampler) == 3 * per_epoch
    assert steps == [rows_of(step, num_rows, global_batch, 9) for step in range(3 * per_epoch)]
    for epoch in range(3):
        visited = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain(*visited)) == list(range(num_rows))
    if num_rows > 20:
        assert len({tuple(steps[epoch * per_epoch]) for epoch in range(3)}) == 3
        assert steps[0] != next(iter(StepSampler(num_rows, global_batch, 1, seed=10)))


def test_epoch_order_depends_on_nothing_else():
    """No random state, Python's, numpy's or torch's, changes the order (P3)."""
    orders = []
    for state in range(3):
        random.seed(state)
        np.random.seed(state)
        torch.manual_seed(state)
        orders.append(epoch_order(50, 4, 2).tolist())
    assert orders[0] == orders[1] == orders[2] != epoch_order(50, 4, 3).tolist()
    assert orders[0] != epoch_order(50, 5, 2).tolist() and orders[0] != list(range(50))


@pytest.mark.parametrize(("num_rows", "global_batch"), SHAPES)
@pytest.mark.parametrize("rank, world_size", [(0, 1), (1, 2)])
def test_any_start_gives_the_tail_of_the_same_sequence(num_rows, global_batch, rank, world_size):
    """Resuming at any step yields what would have come: no row twice, none left out (P3, P4)."""
    total = 2 * steps_per_epoch(num_rows, global_batch) + 1
    make = functools.partial(StepSampler, num_rows, global_batch, total, 3, rank, world_size)
    whole = list(make())
    for start in range(total + 1):
        assert list(make(start_step=start)) == whole[start:]
        assert len(make(start_step=start)) == total - start


def test_a_late_start_is_a_jump():
    """Resuming far into a run costs nothing: it does not count its way there (P3)."""
    start = 10**12 + 1
    sampler = StepSampler(10, 4, start + 1, seed=3, start_step=start)
    assert list(sampler) == [rows_of(start, 10, 4, 3)]


@pytest.mark.parametrize(("num_rows", "global_batch"), SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shares_are_disjoint_whole_and_even(num_rows, global_batch, world_size):
    """Any number of processes: the step's rows, once each, spread to within one (A41, A72).

    With the empty rows every process has equally many, so it runs as many forwards as the others.
    """
    total = 2 * steps_per_epoch(num_rows, global_batch)
    shares = [list(StepSampler(num_rows, global_batch, total, 5, rank, world_size))
              for rank in range(world_size)]
    for step in range(total):
        mine = [share[step] for share in shares]
        assert len({len(rows) for rows in mine}) == 1
        real = [[row for row in rows if row != EMPTY_ROW] for rows in mine]
        assert sorted(itertools.chain(*real)) == sorted(rows_of(step, num_rows, global_batch, 5))
        sizes = [len(rows) for rows in real]
        assert max(sizes) - min(sizes) <= 1 and len(mine[0]) == max(sizes)


def batches(dataset, num_workers, rank=0, world_size=1, start_step=0):
    total = steps_per_epoch(len(dataset), 6) + 2
    sampler = StepSampler(len(dataset), 6, total, 11, rank, world_size, start_step)
    return list(StepLoader(dataset, sampler, num_workers))


def same(one, other) -> bool:
    """Whether two lists of (step, Rows) are equal to the bit."""
    return len(one) == len(other) and all(
        step == other_step and rows[4:] == other_rows[4:]
        and all(map(torch.equal, rows[:4], other_rows[:4]))
        for (step, rows), (other_step, other_rows) in zip(one, other)
    )


def test_workers_change_nothing_and_leave_random_states_alone():
    """0 and 2 workers give identical batches, and drawing them moves no global random state.

    Dropout's masks must not depend on how data is loaded (P4).
    """
    dataset = packed(with_mask=True)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    alone, with_workers = batches(dataset, 0), batches(dataset, 2)
    assert same(alone, with_workers) and not same(alone, alone[1:])
    assert [step for step, _ in alone] == list(range(len(alone)))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_resumed_loader_continues_with_the_next_step():
    """A loader started at step 4 yields steps 4, 5, ... with the rows they always had (P3)."""
    dataset = packed()
    for rank, world_size in ((0, 1), (1, 3)):
        whole = batches(dataset, 0, rank, world_size)
        assert same(batches(dataset, 0, rank, world_size, start_step=4), whole[4:])


def test_waiting_is_measured():
    """The loader knows how long the loop waited for data."""
    dataset = packed()
    loader = StepLoader(dataset, StepSampler(len(dataset), 6, 3, 0), 0)
    assert loader.wait_seconds == 0 and len(loader) == 3
    list(loader)
    assert 0 < loader.wait_seconds < 60


def test_validation_visits_all_rows_in_order():
    """Validation reads every row once, first to last, with a shorter last batch."""
    dataset = packed()
    made = list(batches_in_order(dataset, rows_per_batch=5))
    assert [len(rows.input_ids) for rows in made[:-1]] == [5] * (len(made) - 1)
    joined = torch.cat([rows.input_ids for rows in made])
    assert len(joined) == len(dataset)
    first_tokens = [int(dataset[row][0].ids[0]) for row in range(len(dataset))]
    assert joined[:, 0].tolist() == first_tokens


@pytest.mark.parametrize(("documents", "count"), [
    (0, 0), (1, 0), (999, 0), (1000, 10), (5099, 50), (200_000, 2000), (1_400_000, 2000),
])
def test_held_out_slice(documents, count):
    """min(1 %, 2,000) documents are held out, none if too few, and none is in both parts."""
    train, held_out = split_documents(documents, 42, has_own_validation=False)
    assert len(held_out) == count and len(train) == documents - count
    together = np.concatenate((train, held_out))
    assert (np.sort(together) == np.arange(documents)).all()
    assert (np.diff(train) > 0).all() and (np.diff(held_out) > 0).all()
    again = split_documents(documents, 42, has_own_validation=False)
    assert (again[1] == held_out).all()
    if count:
        other = split_documents(documents, 43, has_own_validation=False)[1]
        assert (other != held_out).any() and held_out[-1] > documents // 2 > held_out[0]


def test_nothing_is_held_out_beside_a_validation_file():
    """With a validation file of one's own the whole training file trains."""
    train, held_out = split_documents(5000, 42, has_own_validation=True)
    assert len(train) == 5000 and len(held_out) == 0


def test_rows_travel_to_workers_that_do_not_fork(write_jsonl, tokenizer, tmp_path):
    """A worker that is started anew (macOS, Windows) reads the same rows from the disk."""
    path = write_jsonl("a.jsonl", [{"text": f"text {n} " * n} for n in range(1, 30)])
    cache = open_token_cache(path, PRETRAIN, tokenizer, cache_dir=tmp_path / "cache")
    plan = make_plan(np.arange(len(cache.lengths)), cache.lengths, MAX_SEQ_LEN, 1)
    dataset = PackedRows(cache, plan)
    other = pickle.loads(pickle.dumps(dataset))
    assert same(batches(dataset, 0), batches(other, 0))
