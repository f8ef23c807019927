"""A stage's training and validation rows, and the lines that say what became of the data."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataset.document import Stage
from dataset.jsonl import DataError
from dataset.loader import PackedRows, split_documents
from dataset.packing import make_plan
from dataset.token_cache import TokenCache, open_token_cache
from dataset.tokenizer import Tokenizer


@dataclass(frozen=True)
class DataOptions:
    """How a stage wants its data: the flags of the same names."""

    data_path: Path
    val_data_path: Path | None
    cache_dir: Path
    max_seq_len: int
    seed: int
    bad_lines: str
    long_docs: str


def open_data(stage: Stage, tokenizer: Tokenizer, options: DataOptions
              ) -> tuple[PackedRows, PackedRows | None]:
    """Packed training rows, and validation rows or None. Raises DataError."""
    cache = open_token_cache(options.data_path, stage, tokenizer, options.bad_lines,
                             options.cache_dir)
    has_own_validation = options.val_data_path is not None
    train, held_out = split_documents(len(cache.lengths), options.seed, has_own_validation)
    train_set = pack(cache, train, stage, options, "training")
    if has_own_validation:
        cache = open_token_cache(options.val_data_path, stage, tokenizer, options.bad_lines,
                                 options.cache_dir)
        held_out = np.arange(len(cache.lengths))
    if held_out.size == 0:
        print(f"validation: none ({len(train):,} documents are too few to hold out 1 % of)")
        return train_set, None
    return train_set, pack(cache, held_out, stage, options, "validation")


def pack(cache: TokenCache, documents: np.ndarray, stage: Stage, options: DataOptions,
         purpose: str) -> PackedRows:
    """Plans the rows of some documents, and prints what was packed, split, cut and dropped."""
    whole = cache.lengths[documents]
    kept = stage.cut(cache, options.max_seq_len)[documents]
    plan = make_plan(documents, kept, options.max_seq_len, options.seed, options.long_docs)
    if plan.num_rows == 0:
        raise DataError(f"{cache.source}: nothing is left for {purpose}, every document is too "
                        f"long for a row. Raise --max_seq_len {options.max_seq_len}.")
    pieces = np.bincount(plan.documents, minlength=len(cache.lengths))[documents]
    counts = {"split": (pieces > 1).sum(), "cut": ((kept < whole) & (pieces > 0)).sum(),
              "dropped": (pieces == 0).sum()}
    notes = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
    print(f"{purpose}: {cache.source.name}, {len(documents):,} documents{notes}, in "
          f"{plan.num_rows:,} rows of {plan.max_seq_len} ({100 * plan.fill:.1f} % filled)")
    return PackedRows(cache, plan)
