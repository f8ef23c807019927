"""Opening a stage's data: what is trained on, what is held out, what the printed lines say."""

import dataclasses
from argparse import Namespace

import pytest

from dataset.document import Document
from dataset.jsonl import DataError
from dataset.pretrain import PRETRAIN
from dataset.stage_data import open_data

MAX_SEQ_LEN = 32


def fast_encode(tokenizer, texts):
    """One token a character, without a tokenizer."""
    return [Document([1, *(3 + ord(character) % 50 for character in text), 2], None, len(text))
            for text in texts]


STAGE = dataclasses.replace(PRETRAIN, encode=fast_encode)


def options(path, **changes) -> Namespace:
    """Where and how to read; the token cache lies beside the file, in the test's own folder."""
    flags = {"data_path": path, "val_data_path": None, "cache_dir": path.parent / "cache",
             "max_seq_len": MAX_SEQ_LEN, "seed": 42, "bad_lines": "stop", "long_docs": "split"}
    return Namespace(**{**flags, **changes})


def test_open_data_says_what_became_of_it(write_jsonl, tokenizer, capsys):
    """Printed are documents, rows, how many were split or dropped, and a missing validation."""
    path = write_jsonl("a.jsonl", [{"text": "x" * length} for length in (5, 31, 32, 100)])
    train, validation = open_data(STAGE, tokenizer, options(path))
    printed = capsys.readouterr().out
    assert validation is None and "validation: none (4 documents are too few" in printed
    assert f"training: a.jsonl, 4 documents, 2 split, in {len(train)} rows of 32" in printed
    open_data(STAGE, tokenizer, options(path, long_docs="drop"))
    assert "4 documents, 2 dropped, in " in capsys.readouterr().out


def test_open_data_holds_out_or_opens_the_validation_file(write_jsonl, tokenizer):
    """Training and validation share no document, unless the user names a file of his own."""
    path = write_jsonl("a.jsonl", [{"text": "x" * (1 + n % 20)} for n in range(1000)])
    train, validation = open_data(STAGE, tokenizer, options(path))
    trained, validated = set(train.plan.documents), set(validation.plan.documents)
    assert len(validated) == 10 and not trained & validated
    assert trained | validated == set(range(1000))
    own = write_jsonl("own.jsonl", [{"text": "y" * 5}, {"text": "z" * 9}])
    train, validation = open_data(STAGE, tokenizer, options(path, val_data_path=own))
    assert set(train.plan.documents) == set(range(1000))
    assert set(validation.plan.documents) == {0, 1} and validation.cache.source == own


def test_nothing_left_is_an_error(write_jsonl, tokenizer):
    """If every document is too long for a row, the run does not start (P6)."""
    path = write_jsonl("a.jsonl", [{"text": "x" * 100}])
    with pytest.raises(DataError, match=r"nothing is left for training.*--max_seq_len 32"):
        open_data(STAGE, tokenizer, options(path, long_docs="drop"))
