"""Documents -> rows (the plan), and rows -> tensors (the token-budget `collate_fn`).

A row has `max_seq_len` positions. Padding each document to a row of its own wastes a third to a
half of the compute; instead a row is filled with whole documents:

    row 0   | document 7 ........................ | document 3 ...... | doc 12 |p|
    row 1   | document 5, first max_seq_len positions ........................... |
    row 2   | document 5, the rest ....... | document 9 ............... | doc 1  |

A document of n tokens takes n - 1 positions: inputs are its tokens but the last, targets its tokens
but the first. `doc_ids` tell attention where documents end, and `position_ids` restart at 0 in
each, so a document's logits are those it has alone. The plan depends on nothing but the documents'
lengths, max_seq_len, the seed and --long_docs; it says nothing about batches, processes or epochs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dataset.tokenizer import PAD_ID

IGNORED_TARGET = -100  # what cross_entropy ignores
PAD_DOC_ID = -1  # padding belongs to no document


@dataclass(frozen=True)
class Plan:
    """Which piece of which document lies in which row.

    Piece p is positions[p] positions of documents[p] beginning at its token starts[p]; row r holds
    the pieces row_offsets[r] .. row_offsets[r + 1] - 1, in this order. All int64.
    """

    documents: np.ndarray  # (pieces,)
    starts: np.ndarray  # (pieces,)
    positions: np.ndarray  # (pieces,)
    row_offsets: np.ndarray  # (rows + 1,)
    max_seq_len: int

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def fill(self) -> float:
        """Share of all positions that hold a document, 0..1."""
        return float(self.positions.sum()) / max(self.num_rows * self.max_seq_len, 1)


def cut_into_pieces(documents: np.ndarray, lengths: np.ndarray, max_seq_len: int, long_docs: str
                    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most max_seq_len positions: (documents, starts, positions), int64 each.

    documents are indices, lengths their token counts. A document of n tokens has n - 1 positions;
    "split" cuts it into consecutive pieces, each beginning with the last token of the one before
    (as input), so every token but the first is a target exactly once. "drop" leaves it out.
    """
    positions = lengths - 1
    keep = positions > 0
    if long_docs == "drop":
        keep &= positions <= max_seq_len
    documents, positions = documents[keep], positions[keep]
    pieces = -(-positions // max_seq_len)  # of each document
    owner = np.repeat(np.arange(len(documents)), pieces)
    number = np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]  # 0, 1, ... in a document
    starts = number * max_seq_len
    return documents[owner], starts, np.minimum(positions[owner] - starts, max_seq_len)


def best_fit_rows(positions: np.ndarray, max_seq_len: int, rng: np.random.Generator
                  ) -> tuple[np.ndarray, int]:
    """Assigns each piece to a row by best-fit decreasing; returns (row of each piece, rows).

    From the longest piece to the shortest, each goes into the fullest row that still has room for
    it, or into a new one. Pieces of one length are placed together: rows lie in buckets by their
    free space, and as the tightest bucket that fits is emptied first, whole buckets move at once:
    a million documents cost a few moves for each length there is, not a search for each document.
    Pieces of equal length are taken in random order.
    """
    shuffled = rng.permutation(len(positions))
    by_length = shuffled[np.argsort(-positions[shuffled], kind="stable")]
    row_of_piece = np.empty(len(positions), np.int64)
    buckets = [np.empty(0, np.int64)] * (max_seq_len + 1)  # rows with exactly that much free space
    bucket_sizes = np.zeros(max_seq_len + 1, np.int64)
    num_rows, done = 0, 0
    counts = np.bincount(positions, minlength=max_seq_len + 1)
    for length in np.flatnonzero(counts)[::-1]:
        left = int(counts[length])
        while left:
            fitting = np.flatnonzero(bucket_sizes[length:])
            space = int(length + fitting[0]) if fitting.size else max_seq_len
            per_row = space // int(length)  # so many pieces go into each row of that bucket
            wanted = -(-left // per_row)
            if fitting.size:
                rows, buckets[space] = buckets[space][:wanted], buckets[space][wanted:]
                bucket_sizes[space] -= len(rows)
            else:
                rows = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            taken = min(left, len(rows) * per_row)
            row_of_piece[by_length[done : done + taken]] = np.repeat(rows, per_row)[:taken]
            done, left = done + taken, left - taken
            in_last = taken - (len(rows) - 1) * per_row  # the last row may not have got them all
            for moved, pieces in ((rows[:-1], per_row), (rows[-1:], in_last)):
                free = space - pieces * int(length)
                buckets[free] = np.concatenate((buckets[free], moved))
                bucket_sizes[free] += len(moved)
    return row_of_piece, num_rows


def make_plan(documents: np.ndarray, lengths: np.ndarray, max_seq_len: int, seed: int,
              long_docs: str = "split") -> Plan:
    """Packs documents (indices int64, with their token counts) into rows of max_seq_len positions.

    Every document's pieces are in the plan exactly once (promise P2); the same arguments always
    give the same plan (P3).
    """
    rng = np.random.default_rng(seed)
    documents, starts, positions = cut_into_pieces(documents, lengths, max_seq_len, long_docs)
    row_of_piece, num_rows = best_fit_rows(positions, max_seq_len, rng)
    order = np.argsort(row_of_piece, kind="stable")
    row_offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row_of_piece, minlength=num_rows), out=row_offsets[1:])
    return Plan(documents[order], starts[order], positions[order], row_offsets, max_seq_len)


class Piece(NamedTuple):
    """One document, or a piece of one, as it lies in a row: n positions."""

    ids: np.ndarray  # (n + 1,): position i reads ids[i] and predicts ids[i + 1]
    loss_mask: np.ndarray | None  # (n + 1,): 1 where that token counts as a target; None: all do
    text_bytes: float  # UTF-8 bytes of the text that its counting targets spell


def make_piece(ids: np.ndarray, loss_mask: np.ndarray | None, text_bytes: float, start: int,
               positions: int) -> Piece:
    """Positions start ... of a whole document. Its bytes are shared out by counting targets."""
    part = slice(start, start + positions + 1)
    if loss_mask is None:
        return Piece(ids[part], None, text_bytes * positions / (len(ids) - 1))
    share = int(loss_mask[part][1:].sum()) / int(loss_mask[1:].sum())
    return Piece(ids[part], loss_mask[part], text_bytes * share)


class Rows(NamedTuple):
    """Rows as tensors: what a model's forward takes, and what they hold.

    input_ids, targets, position_ids, doc_ids: int64 (N, max_seq_len). Padding has targets
    IGNORED_TARGET and doc_ids PAD_DOC_ID. doc_ids None: each row is one document.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    doc_ids: Tensor | None
    num_supervised: int
    text_bytes: float

    def split(self, token_budget: int, device: torch.device):
        """Yields (micro_batch, is_last): dicts of tensors on the device, in order.

        A micro-batch holds as many whole rows as fit into token_budget positions, at least one.
        """
        count, max_seq_len = self.input_ids.shape
        rows_at_once = max(token_budget // max_seq_len, 1)
        names = ("input_ids", "targets", "position_ids", "doc_ids")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        on_gpu = device.type == "cuda"  # then the loader has pinned them: copies wait for nothing
        for start in range(0, count, rows_at_once):
            part = slice(start, start + rows_at_once)
            micro_batch = {name: tensor[part].to(device, non_blocking=on_gpu)
                           for name, tensor in tensors.items()}
            if on_gpu and self.doc_ids is not None:  # counted here, where they are on the host
                starts = document_starts(self.doc_ids[part])
                micro_batch["doc_starts"] = starts.to(device, non_blocking=True)
            yield micro_batch, start + rows_at_once >= count


def document_starts(doc_ids: Tensor) -> Tensor:
    """Where in the rows laid end to end each document begins, then where the last one ends.

    doc_ids (B, T) -> (M + 1,) int32; a row's padding counts as one more document.
    """
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=doc_ids.numel()).int()


class TokenBudgetCollate:
    """The `collate_fn`: lays lists of pieces out as `Rows`. An empty list is an empty row."""

    def __init__(self, max_seq_len: int):
        self.max_seq_len = max_seq_len

    def __call__(self, rows: list[list[Piece]]) -> Rows:
        shape = (len(rows), self.max_seq_len)
        input_ids = np.full(shape, PAD_ID, np.int64)
        targets = np.full(shape, IGNORED_TARGET, np.int64)
        position_ids = np.zeros(shape, np.int64)
        doc_ids = np.full(shape, PAD_DOC_ID, np.int64)
        text_bytes = 0.0
        for row, pieces in enumerate(rows):
            end = 0
            for number, piece in enumerate(pieces):
                start, end = end, end + len(piece.ids) - 1
                input_ids[row, start:end] = piece.ids[:-1]
                targets[row, start:end] = piece.ids[1:]
                if piece.loss_mask is not None:
                    targets[row, start:end][piece.loss_mask[1:] == 0] = IGNORED_TARGET
                position_ids[row, start:end] = np.arange(end - start)
                doc_ids[row, start:end] = number
                text_bytes += piece.text_bytes
        num_supervised = int((targets != IGNORED_TARGET).sum())
        tensors = map(torch.from_numpy, (input_ids, targets, position_ids, doc_ids))
        return Rows(*tensors, num_supervised, float(text_bytes))
