"""Pretraining examples: `{"text": "..."}`, every token of which is a target."""

import numpy as np

from dataset.document import Document, Stage
from dataset.jsonl import clean_surrogates, list_keys
from dataset.tokenizer import BOS_ID, EOS_ID, Tokenizer


def parse(record: dict) -> str:
    """The text of a record. Raises ValueError saying what is wrong with it."""
    if "text" not in record:
        raise ValueError(f'no "text" (its keys: {list_keys(record)})')
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f'"text" is {type(text).__name__}, expected a string')
    if not text.strip():
        raise ValueError('"text" is empty')
    return clean_surrogates(text)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Document]:
    """`<|im_start|>` + the text's tokens + `<|im_end|>`, exactly once each."""
    return [
        Document([BOS_ID, *ids, EOS_ID], None, len(text.encode("utf-8")))
        for text, ids in zip(texts, tokenizer.encode_batch(texts))
    ]


def cut(cache, documents: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Every document whole: `packing.py` splits the long ones (or drops them, --long_docs)."""
    return cache.lengths[documents]


PRETRAIN = Stage("pretrain", parse, encode, cut)
