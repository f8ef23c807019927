"""A stage's training and validation rows, and the lines that say what became of the data."""

import time
from argparse import Namespace
from typing import Any

import numpy as np

from dataset.document import Stage
from dataset.jsonl import DataError
from dataset.loader import PackedRows, split_documents
from dataset.packing import make_plan
from dataset.pretrain import PRETRAIN
from dataset.sft import SFT
from dataset.token_cache import TokenCache, open_token_cache
from dataset.tokenizer import Tokenizer


def parse_any(record: dict) -> tuple[Stage, Any]:
    """A record of either kind: its stage and its example. Raises ValueError like the stages do."""
    stage = SFT if "conversations" in record or "messages" in record else PRETRAIN
    return stage, stage.parse(record)


def open_data(stage: Stage, tokenizer: Tokenizer, options: Namespace
              ) -> tuple[PackedRows, PackedRows | None]:
    """Packed training rows, and validation rows or None. Raises DataError.

    Of the options, the flags of these names count: data_path, val_data_path (or None), cache_dir,
    bad_lines, long_docs, max_seq_len, seed.
    """
    cache = open_token_cache(options.data_path, stage, tokenizer, options.bad_lines,
                             options.cache_dir)
    has_own_validation = options.val_data_path is not None
    train, held_out = split_documents(len(cache.lengths), options.seed, has_own_validation)
    train_set = pack(cache, train, stage, options, "training")
    if has_own_validation:
        train_folder = cache.folder
        cache = open_token_cache(options.val_data_path, stage, tokenizer, options.bad_lines,
                                 options.cache_dir)
        held_out = np.arange(len(cache.lengths))
        if cache.folder == train_folder:
            print("validation: the same content as training, so it measures memory")
    if held_out.size == 0:
        print(f"validation: none ({len(train):,} documents are too few to hold out 1 % of)")
        return train_set, None
    return train_set, pack(cache, held_out, stage, options, "validation")


def pack(cache: TokenCache, documents: np.ndarray, stage: Stage, options: Namespace,
         purpose: str) -> PackedRows:
    """Plans the rows of some documents, and prints what was packed, split, cut and dropped."""
    whole = cache.lengths[documents]
    kept = stage.cut(cache, documents, options.max_seq_len)
    begun = time.perf_counter()
    plan = make_plan(documents, kept, options.max_seq_len, options.seed, options.long_docs)
    seconds = time.perf_counter() - begun
    if plan.num_rows == 0:
        raise DataError(f"{cache.source}: nothing is left for {purpose}, every document is too "
                        f"long for a row. Raise --max_seq_len {options.max_seq_len}.")
    pieces = np.bincount(plan.documents, minlength=len(cache.lengths))[documents]
    counts = {"split": (pieces > 1).sum(), "cut": ((kept < whole) & (pieces > 0)).sum(),
              "dropped": (pieces == 0).sum()}
    notes = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
    print(f"{purpose}: {cache.source.name}, {len(documents):,} documents{notes}, in "
          f"{plan.num_rows:,} rows of {plan.max_seq_len} ({100 * plan.fill:.1f} % filled, planned "
          f"in {seconds:.2f} s)")
    return PackedRows(cache, plan)
