"""A token cache that was being built when its process died, or by several processes at once.

The subprocesses import neither torch nor pytest, so that they start quickly.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_checks import TEXTS, check_content, folders

from dataset import token_cache
from dataset.pretrain import PRETRAIN
from dataset.token_cache import open_token_cache

ROOT = Path(__file__).resolve().parents[1]


def test_appears_only_when_whole(corpus, cache_dir, tokenizer, monkeypatch):
    """While it is being built there is nothing that a reader could take for a cache."""
    monkeypatch.setattr(token_cache, "CHUNK_BYTES", 500)
    seen = []

    def encode(tokenizer, texts):
        seen.extend(path.suffix for path in folders(cache_dir))
        return PRETRAIN.encode(tokenizer, texts)

    stage = dataclasses.replace(PRETRAIN, encode=encode)
    open_token_cache(corpus, stage, tokenizer, cache_dir=cache_dir)
    assert len(seen) > 2 and set(seen) == {".tmp"}
    assert [path.suffix for path in folders(cache_dir)] == [""]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=repr)
def test_failed_build_leaves_nothing(error, corpus, cache_dir, tokenizer):
    """A build that ends in an exception leaves neither a cache nor half of one."""
    def encode(tokenizer, texts):
        raise error

    with pytest.raises(type(error)):
        open_token_cache(corpus, dataclasses.replace(PRETRAIN, encode=encode), tokenizer,
                         cache_dir=cache_dir)
    assert folders(cache_dir) == []
    check_content(open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir), TEXTS,
                  tokenizer)


def test_leftover_of_a_killed_build_is_not_taken_for_whole(corpus, cache_dir, tokenizer, builds):
    """A .tmp folder, however complete it looks, is thrown away and the cache built anew."""
    whole = open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir).folder
    leftover = whole.with_suffix(".tmp")
    whole.rename(leftover)
    (leftover / "tokens.bin").write_bytes(b"half")
    (leftover / "rubbish").mkdir()
    cache = open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir)
    check_content(cache, TEXTS, tokenizer)
    assert len(builds) == 2 and folders(cache_dir) == [whole]
    assert not (whole / "rubbish").exists()


# Builds the cache of argv[1] in argv[2]. In the folder argv[3] it notes that it is about to begin,
# and each chunk; before the third chunk is written it waits for a file named "go".
BUILDER = """
import dataclasses, os, sys, time
from pathlib import Path
from dataset import token_cache
from dataset.pretrain import PRETRAIN
from dataset.tokenizer import Tokenizer

corpus, cache_dir, notes = map(Path, sys.argv[1:])
token_cache.CHUNK_BYTES = 1000
tokenizer, num_chunks = Tokenizer(), 0

def note(name, line):
    with open(notes / name, "a") as file:
        file.write(line + "\\n")

def encode(tokenizer, texts):
    global num_chunks
    num_chunks += 1
    note("chunks", texts[0][:20])
    while num_chunks == 3 and not (notes / "go").exists():
        time.sleep(0.02)
    return PRETRAIN.encode(tokenizer, texts)

note("begun", str(os.getpid()))
stage = dataclasses.replace(PRETRAIN, encode=encode)
cache = token_cache.open_token_cache(corpus, stage, tokenizer, cache_dir=cache_dir)
print("documents", len(cache.lengths))
"""


def start_builder(corpus, cache_dir, notes):
    return subprocess.Popen([sys.executable, "-c", BUILDER, corpus, cache_dir, notes], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text("utf-8").splitlines()) < count:
        assert time.monotonic() < deadline, "the subprocess never got that far"
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_build_is_not_taken_for_whole(corpus, cache_dir, tokenizer, tmp_path):
    """kill -9 in the middle of a build: its lock is free, its half is not used, the next builds."""
    process = start_builder(corpus, cache_dir, tmp_path)
    wait_for_lines(tmp_path / "chunks", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in folders(cache_dir)] == [".tmp"]  # killed half-way, indeed
    check_content(open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir), TEXTS,
                  tokenizer)
    assert [path.suffix for path in folders(cache_dir)] == [""]


def test_processes_at_once_build_once(corpus, cache_dir, tokenizer, tmp_path):
    """Of several processes that open the same file one tokenises and the others wait (A69)."""
    processes = [start_builder(corpus, cache_dir, tmp_path)]
    wait_for_lines(tmp_path / "chunks", 3)
    processes += [start_builder(corpus, cache_dir, tmp_path) for _ in range(2)]
    wait_for_lines(tmp_path / "begun", 3)
    time.sleep(0.3)  # were there no lock, they would note chunks of their own now
    assert len((tmp_path / "chunks").read_text("utf-8").splitlines()) == 3
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert all(f"documents {len(TEXTS)}" in out for out, _ in outputs)
    noted = (tmp_path / "chunks").read_text("utf-8").splitlines()
    assert len(noted) == len(set(noted)) > 3
    check_content(open_token_cache(corpus, PRETRAIN, tokenizer, cache_dir=cache_dir), TEXTS,
                  tokenizer)
