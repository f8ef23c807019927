"""The token cache: built once, never stale, never taken for whole when it is not.

Cases A33 and A69. The subprocesses import neither torch nor pytest, so that they start quickly.
"""

import dataclasses
import errno
import os
import pickle
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from cache_checks import TEXTS, check_content, folders

from dataset import token_cache
from dataset.document import Document
from dataset.jsonl import DataError, JsonlReader
from dataset.pretrain import PRETRAIN
from dataset.sft import SFT
from dataset.token_cache import chunks, open_token_cache
from dataset.tokenizer import SHIPPED, Tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("chunk_bytes", [1, 500, 4 << 20])
def test_holds_every_document_in_order(chunk_bytes, corpus, cache_dir, tokenizer, monkeypatch):
    """The cache is the file's documents, tokenised one after the other, whatever the chunking."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", chunk_bytes)
    cache = open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    check_content(cache, TEXTS, tokenizer)
    assert cache.line_numbers.tolist() == list(range(1, len(TEXTS) + 1))
    assert cache.loss_mask is None


def test_line_numbers_are_those_of_the_file(write_jsonl, cache_dir, tokenizer):
    """Blank and faulty lines do not shift the line number that a document remembers."""
    path = write_jsonl("a.jsonl", b'\n{"text": "a"}\n[]\n\n{"text": "b"}\n')
    cache = open_token_cache(path, PRETRAIN, tokenizer, "skip", cache_dir)
    assert cache.line_numbers.tolist() == [2, 5]
    check_content(cache, ["a", "b"], tokenizer)


def test_holds_the_loss_mask_of_conversations(write_jsonl, cache_dir, tokenizer, monkeypatch):
    """A stage with a loss mask gets it back token by token, whatever the chunking."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 300)
    records = [{"conversations": [{"role": "user", "content": text[:20]},
                                  {"role": "assistant", "content": text}]} for text in TEXTS]
    path = write_jsonl("chat.jsonl", records)
    cache = open_token_cache(path, SFT, tokenizer, cache_dir=cache_dir)
    assert len(cache.loss_mask) == len(cache.tokens)
    for index, record in enumerate(records):
        [expected] = SFT.encode(tokenizer, [record["conversations"]])
        whole = slice(cache.offsets[index], cache.offsets[index + 1])
        assert cache.tokens[whole].tolist() == expected.ids
        assert cache.loss_mask[whole].tolist() == expected.loss_mask


def test_is_reused(corpus, cache_dir, tokenizer, builds):
    """A second opening, and one of a copy under another name, builds nothing."""
    open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    copy = corpus.with_name("renamed.jsonl")
    copy.write_bytes(corpus.read_bytes())
    for path in (corpus, copy):
        cache = open_token_cache(path, PRETRAIN, tokenizer, cache_dir=cache_dir)
        check_content(cache, TEXTS, tokenizer)
        assert cache.source == path
    assert builds == [corpus] and len(folders(cache_dir)) == 1


def test_changed_content_makes_a_new_cache(corpus, cache_dir, tokenizer, builds):
    """A cache is never stale, even if the file's size and time stay the same."""
    open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    stat = corpus.stat()
    corpus.write_bytes(corpus.read_bytes().replace(b"text number 7", b"TEXT NUMBER 7"))
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert corpus.stat().st_size == stat.st_size
    cache = open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    changed = [text.replace("text number 7", "TEXT NUMBER 7") for text in TEXTS]
    check_content(cache, changed, tokenizer)
    assert len(builds) == 2


def test_tokenizer_and_stage_have_caches_of_their_own(cache_dir, tokenizer, builds, tmp_path,
                                                      write_jsonl):
    """Neither another vocabulary nor another stage ever reads this one's tokens."""
    path = write_jsonl("both.jsonl", [{"text": "hello", "conversations": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}])
    other_path = tmp_path / "other.json"
    other_path.write_bytes(SHIPPED.read_bytes() + b"\n")
    other = Tokenizer(other_path)
    for _ in range(2):
        opened = {open_token_cache(path, *key, cache_dir=cache_dir).folder
                  for key in ((PRETRAIN, tokenizer), (PRETRAIN, other), (SFT, tokenizer))}
        assert len(opened) == 3
    assert len(builds) == 3


@pytest.fixture
def faulty(write_jsonl):
    return write_jsonl("faulty.jsonl", b'{"text": "a"}\n{"txt": "b"}\n{"text": "c"}\n')


def test_stop_refuses_and_leaves_no_cache(faulty, cache_dir, tokenizer):
    """A faulty file is refused every time, not only while there is no cache."""
    for _ in range(2):
        with pytest.raises(DataError, match=r"faulty\.jsonl:2: "):
            open_token_cache(faulty, PRETRAIN, tokenizer, "stop", cache_dir)
        assert folders(cache_dir) == []


def test_skip_then_stop_still_refuses(faulty, cache_dir, tokenizer, builds, capsys):
    """A cache built with "skip" is no way round "stop", and says each time what it left out."""
    for _ in range(2):
        cache = open_token_cache(faulty, PRETRAIN, tokenizer, "skip", cache_dir)
        check_content(cache, ["a", "c"], tokenizer)
        printed = capsys.readouterr().out
        assert f"{faulty}:2: no \"text\"" in printed and "1 faulty line(s) left out" in printed
    with pytest.raises(DataError, match=r"faulty\.jsonl:2: "):
        open_token_cache(faulty, PRETRAIN, tokenizer, "stop", cache_dir)
    open_token_cache(faulty, PRETRAIN, tokenizer, "skip", cache_dir)
    assert len(builds) == 1


@pytest.mark.parametrize("raw", [b"", b"\n\n"])
def test_empty_file_is_refused(raw, write_jsonl, cache_dir, tokenizer):
    """An empty file is an error here too, under both policies, and leaves nothing."""
    for bad_lines in ("stop", "skip"):
        with pytest.raises(DataError, match="no data at all"):
            open_token_cache(write_jsonl("empty.jsonl", raw), PRETRAIN, tokenizer, bad_lines,
                             cache_dir)
    assert folders(cache_dir) == []


def test_missing_data_file_is_a_data_error(tmp_path, cache_dir, tokenizer):
    """A missing file is named, and no cache folder is made for it."""
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        open_token_cache(tmp_path / "absent.jsonl", PRETRAIN, tokenizer, cache_dir=cache_dir)


def test_unwritable_cache_folder_is_a_data_error(corpus, tmp_path, tokenizer):
    """Where the cache cannot be written, the message names the folder (P6)."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file.cache: the token cache cannot be written"):
        open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=tmp_path / "file" / "cache")
    if hasattr(os, "geteuid") and os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(DataError, match="cannot be written"):
            open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=tmp_path / "locked" / "cache")


def test_full_disk_is_a_data_error(corpus, cache_dir, tokenizer):
    """A disk that fills up while tokenising is named, and the half is removed to free it."""
    def encode(tokenizer, texts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DataError, match="No space left"):
        open_token_cache(corpus, dataclasses.replace(PRETRAIN, encode=encode), tokenizer,
                         cache_dir=cache_dir)
    assert folders(cache_dir) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_file_name_that_is_not_utf8(tmp_path, cache_dir, tokenizer):
    """A data file may have any name that the system allows."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xd6\xd0\xce\xc4.jsonl"))  # GBK
    path.write_bytes(b'{"text": "a"}\n')
    check_content(open_token_cache(path, PRETRAIN, tokenizer, cache_dir=cache_dir), ["a"],
                  tokenizer)


def test_lives_on_the_disk_and_travels_as_a_path(corpus, cache_dir, tokenizer):
    """Tokens are mapped, not loaded, and a worker gets a path instead of their content (A33)."""
    cache = open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    assert isinstance(cache.tokens, np.memmap) and cache.tokens.dtype == np.uint16
    assert not cache.tokens.flags.writeable
    pickled = pickle.dumps(cache)
    assert len(pickled) < 1000 < cache.tokens.nbytes
    check_content(pickle.loads(pickled), TEXTS, tokenizer)


def test_large_vocabulary_gets_wider_tokens(corpus, cache_dir):
    """Ids beyond 65,535 are kept, not cut to 16 bits."""
    class LargeTokenizer:
        vocab_size, hash = (1 << 16) + 1, "large"

    def encode(tokenizer, texts):
        return [Document([1, 1 << 16, 2], None, len(text)) for text in texts]

    stage = dataclasses.replace(PRETRAIN, encode=encode)
    cache = open_token_cache(corpus, stage, LargeTokenizer(), cache_dir=cache_dir)
    assert cache.tokens[:6].tolist() == [1, 1 << 16, 2] * 2


def test_chunks_bound_the_memory_of_building(corpus, monkeypatch):
    """Text is tokenised in chunks of about CHUNK_BYTES, so memory does not grow with the file."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 700)
    longest = max(len(line) for line in corpus.read_bytes().splitlines(keepends=True))
    made = list(chunks(JsonlReader(corpus, PRETRAIN.parse)))
    assert [text for chunk in made for _, text in chunk] == TEXTS
    assert len(made) > 5
    for chunk in made:
        assert sum(len(text.encode()) for _, text in chunk) < 700 + longest


def test_building_takes_the_memory_of_a_chunk(write_jsonl, cache_dir, tokenizer, monkeypatch):
    """A33: a file eight times as large takes no more memory to tokenise."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 64 << 10)

    def encode(tokenizer, texts):
        return [Document([1, 5, 2], None, len(text)) for text in texts]

    stage, peaks = dataclasses.replace(PRETRAIN, encode=encode), []
    for count in (100, 800):
        path = write_jsonl(f"{count}.jsonl", [{"text": "x" * 10_000}] * count)
        tracemalloc.start()
        open_token_cache(path, stage, tokenizer, cache_dir=cache_dir)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (512 << 10)
