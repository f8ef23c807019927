"""From a plan to the optimizer steps of one process: order, this process's share, workers.

Promise P3 lives here. R rows and a global batch of G rows make epochs of S = ceil(R / G) steps.
Step s belongs to epoch e = s // S and consumes rows (s % S) * G ... of the permutation drawn from
(seed, e). Which process gets which of them changes nothing else.
"""

import contextlib
import hashlib
import signal
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dataset.packing import Piece, Plan, Rows, TokenBudgetCollate, make_piece
from dataset.token_cache import TokenCache

EMPTY_ROW = -1  # fills the share of a process that has one row less than another


def split_documents(num_documents: int, seed: int, has_own_validation: bool
                    ) -> tuple[np.ndarray, np.ndarray]:
    """Document indices for training and for validation, both sorted.

    Held out are min(1 %, 2,000) documents drawn from the seed; none if that makes fewer than ten,
    or if validation has a file of its own.
    """
    count = min(num_documents // 100, 2000)
    if has_own_validation or count < 10:
        count = 0
    held_out = np.zeros(num_documents, bool)
    rng = np.random.default_rng((seed, 1))
    held_out[rng.choice(num_documents, count, replace=False)] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


class PackedRows(Dataset):
    """Row number -> the pieces that lie in it, read from the token cache."""

    def __init__(self, cache: TokenCache, plan: Plan):
        self.cache, self.plan = cache, plan

    def __len__(self) -> int:
        return self.plan.num_rows

    @property
    def fingerprint(self) -> str:
        """A short hash of the file's content and of which tokens lie in which row."""
        digest = hashlib.blake2b(self.cache.about["content_hash"].encode(), digest_size=8)
        for array in (self.plan.documents, self.plan.starts, self.plan.positions,
                      self.plan.row_offsets):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def lines_of(self, rows: np.ndarray) -> str:
        """The file and the line numbers of the documents in these rows, for a message."""
        pieces = [np.arange(*self.plan.row_offsets[row : row + 2]) for row in rows]
        documents = self.plan.documents[np.concatenate(pieces)]
        lines = np.unique(self.cache.line_numbers[documents])
        return f"{self.cache.source}, lines {', '.join(map(str, lines))}"

    def __getitem__(self, row: int) -> list[Piece]:
        if row == EMPTY_ROW:
            return []
        first, last = self.plan.row_offsets[row : row + 2]
        return [self.piece(index) for index in range(first, last)]

    def piece(self, index: int) -> Piece:
        """Piece `index` of the plan."""
        document = self.plan.documents[index]
        whole = slice(self.cache.offsets[document], self.cache.offsets[document + 1])
        loss_mask = None if self.cache.loss_mask is None else self.cache.loss_mask[whole]
        return make_piece(self.cache.tokens[whole], loss_mask, self.cache.text_bytes[document],
                          self.plan.starts[index], self.plan.positions[index])


class StepSampler(Sampler[list[int]]):
    """Yields, for each step from start_step on, the row numbers of this process's share.

    A step's rows are dealt out in turn, so shares differ by at most one row; EMPTY_ROW makes them
    equally long, since every process must run the same number of forwards and backwards, and a
    multiple of `multiple_of` rows, so that a compiled model sees one shape only.
    """

    def __init__(self, num_rows: int, global_batch: int, total_steps: int, seed: int,
                 rank: int = 0, world_size: int = 1, start_step: int = 0,
                 multiple_of: int = 1):
        self.num_rows, self.global_batch, self.total_steps = num_rows, global_batch, total_steps
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.start_step, self.multiple_of = start_step, multiple_of

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.num_rows, self.global_batch)

    def __len__(self) -> int:
        return max(self.total_steps - self.start_step, 0)

    def rows_of_step(self, step: int, order: np.ndarray) -> np.ndarray:
        """All processes' rows of a step, given the order of its epoch."""
        start = step % self.steps_per_epoch * self.global_batch
        return order[start : start + self.global_batch]

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = None, None
        for step in range(self.start_step, self.total_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = epoch_order(self.num_rows, self.seed, epoch)
            rows = self.rows_of_step(step, order)
            share = rows[self.rank :: self.world_size].tolist()
            most = -(-len(rows) // self.world_size)
            yield share + [EMPTY_ROW] * (most + -most % self.multiple_of - len(share))


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    """S = ceil(R / G)."""
    return -(-num_rows // global_batch)


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of row numbers that epoch visits; a function of (rows, seed, epoch) alone."""
    return np.random.default_rng((seed, 2, epoch)).permutation(num_rows)


class StepLoader:
    """Iterates over (step, rows of this process), and measures how long the loop had to wait."""

    def __init__(self, dataset: PackedRows, sampler: StepSampler, num_workers: int,
                 pin_memory: bool = False):
        self.dataset, self.sampler, self.wait_seconds = dataset, sampler, 0.0
        self.loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=TokenBudgetCollate(dataset.plan.max_seq_len),
            num_workers=num_workers,
            pin_memory=pin_memory,
            # A generator of its own: the loader draws from it, and must not disturb dropout's.
            generator=torch.Generator(),
            worker_init_fn=ignore_stop_signals,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def documents_of(self, step: int) -> str:
        """The file and lines of all processes' documents in a step, for a message."""
        order = epoch_order(len(self.dataset), self.sampler.seed,
                            step // self.sampler.steps_per_epoch)
        return self.dataset.lines_of(self.sampler.rows_of_step(step, order))

    def __iter__(self) -> Iterator[tuple[int, Rows]]:
        with stop_signals_held():
            batches = iter(self.loader)
        for step in range(self.sampler.start_step, self.sampler.total_steps):
            begun = time.perf_counter()
            rows = next(batches)
            self.wait_seconds += time.perf_counter() - begun
            yield step, rows


STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
                if hasattr(signal, name)]


def ignore_stop_signals(worker: int) -> None:
    """In a worker: terminals and launchers signal the whole process group, but a worker ends when
    the main process says so, which may first want to finish a step.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def stop_signals_held():
    """Signals wait meanwhile: a worker that is just being born must not answer its parent's."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def batches_in_order(dataset: PackedRows, rank: int = 0, world_size: int = 1, *,
                     rows_per_batch: int) -> Iterator[Rows]:
    """All rows once, first to last, dealt out to the processes: for validation.

    All get equally many batches of equally many rows.
    """
    collate = TokenBudgetCollate(dataset.plan.max_seq_len)
    per_process = -(-len(dataset) // world_size)
    rows = np.arange(per_process) * world_size + rank
    rows[rows >= len(dataset)] = EMPTY_ROW
    for start in range(0, per_process, rows_per_batch):
        yield collate([dataset[row] for row in rows[start : start + rows_per_batch]])
