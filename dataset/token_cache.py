"""JSONL -> memory-mapped token files, once.

    dataset/.cache/<key>/tokens.bin        all documents' ids, one after the other (uint16)
                         loss_mask.bin     one byte a token; empty if every token is a target
                         offsets.npy       where each document begins in tokens.bin, int64
                         text_bytes.npy    UTF-8 bytes of each document's counting text, int64
                         line_numbers.npy  the line of the JSONL file it came from, int64
                         about.json        the key's parts, and what the reader had to say

The key is a hash of the file's content, the tokenizer and the stage, so a cache is never stale and
a renamed file finds its own. One process builds it, in a folder of another name that is renamed
when whole; others wait at a file lock.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.document import Stage
from dataset.jsonl import DataError, JsonlReader
from dataset.tokenizer import Tokenizer

CACHE_DIR = Path(__file__).resolve().parent / ".cache"
FORMAT_VERSION = 1
CHUNK_BYTES = 4 << 20  # JSONL bytes tokenised at a time; bounds the memory of building


class TokenCache:
    """An opened cache: arrays that live on the disk until they are touched.

    tokens: uint16 or uint32 (N,); loss_mask: uint8 (N,) or None; offsets: int64 (documents + 1,);
    lengths, text_bytes, line_numbers: int64 (documents,).
    """

    def __init__(self, folder: Path, source: Path):
        self.folder, self.source = folder, source
        self.about = json.loads((folder / "about.json").read_text("utf-8"))
        self.tokens = np.memmap(folder / "tokens.bin", self.about["dtype"], mode="r")
        self.loss_mask = None
        if self.about["has_mask"]:
            self.loss_mask = np.memmap(folder / "loss_mask.bin", np.uint8, mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.text_bytes = np.load(folder / "text_bytes.npy")
        self.line_numbers = np.load(folder / "line_numbers.npy")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def __getstate__(self):
        """Workers that do not fork open the files anew instead of receiving their content."""
        return self.folder, self.source

    def __setstate__(self, state):
        self.__init__(*state)


@contextlib.contextmanager
def file_lock(path: Path, message: str):
    """Holds an exclusive lock on path; prints the message if another process holds it first."""
    with open(path, "a+b") as file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(message, file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        else:
            import msvcrt

            waiting = False
            while True:
                try:
                    file.seek(0)
                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                except OSError:
                    if not waiting:
                        print(message, file=sys.stderr, flush=True)
                    waiting = True
                    time.sleep(1)
        yield


def content_hash(path: Path) -> str:
    """A hash of a file's bytes. Raises DataError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=12)
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def open_token_cache(path: Path, stage: Stage, tokenizer: Tokenizer, bad_lines: str = "stop",
                     cache_dir: Path = CACHE_DIR) -> TokenCache:
    """Opens the cache of a JSONL file, building it first if need be.

    Raises DataError for a file that cannot be read, holds faults (bad_lines "stop") or no example.
    """
    content = content_hash(path)
    key_parts = f"{FORMAT_VERSION} {content} {tokenizer.hash} {stage.name}"
    folder = cache_dir / hashlib.blake2b(key_parts.encode(), digest_size=12).hexdigest()
    try:
        if not is_whole(folder):
            cache_dir.mkdir(parents=True, exist_ok=True)
            waiting = f"{path}: another process is tokenising it, waiting ..."
            with file_lock(folder.with_suffix(".lock"), waiting):
                if not is_whole(folder):
                    build(path, folder, stage, tokenizer, bad_lines, content)
    except OSError as error:
        raise DataError(f"{cache_dir}: the token cache cannot be written there ({error})") from None
    cache = TokenCache(folder, path)
    if cache.about["num_bad"]:
        if bad_lines == "stop":  # it was built with "skip": read once more, which lists the faults
            for _ in JsonlReader(path, stage.parse, bad_lines):
                pass
        print(f"{cache.about['summary']}\n{cache.about['num_bad']} faulty line(s) left out")
    return cache


def is_whole(folder: Path) -> bool:
    """True if the cache is there and its files have the lengths they were written with."""
    try:
        about = json.loads((folder / "about.json").read_text("utf-8"))
        return all((folder / name).stat().st_size == size for name, size in about["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(path: Path, folder: Path, stage: Stage, tokenizer: Tokenizer, bad_lines: str,
          content: str) -> None:
    """Tokenises the whole file into `folder`, which appears only when it is complete."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed process left behind
    temporary.mkdir()
    try:
        about = write_arrays(path, temporary, stage, tokenizer, bad_lines)
        about |= {"content_hash": content, "tokenizer_hash": tokenizer.hash, "stage": stage.name,
                  "file": path.name}
        about["sizes"] = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / "about.json").write_text(json.dumps(about, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def chunks(reader: JsonlReader):
    """Yields lists of (line number, example) that took about CHUNK_BYTES of the file."""
    chunk, start = [], 0
    for numbered_example in reader:
        chunk.append(numbered_example)
        if reader.bytes_read - start >= CHUNK_BYTES:
            yield chunk
            chunk, start = [], reader.bytes_read
    if chunk:
        yield chunk


def write_arrays(path: Path, folder: Path, stage: Stage, tokenizer: Tokenizer, bad_lines: str
                 ) -> dict:
    """Reads and tokenises the file chunk by chunk; returns the facts for about.json."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    offsets, text_bytes, line_numbers = array("q", [0]), array("q"), array("q")
    has_mask = False
    reader = JsonlReader(path, stage.parse, bad_lines)
    progress = tqdm(total=path.stat().st_size, unit="B", unit_scale=True, disable=None,
                    desc=f"tokenising {path.name}")
    with progress, open(folder / "tokens.bin", "wb") as tokens, \
            open(folder / "loss_mask.bin", "wb") as loss_mask:
        for chunk in chunks(reader):
            documents = stage.encode(tokenizer, [example for _, example in chunk])
            for (line_number, _), document in zip(chunk, documents):
                np.asarray(document.ids, dtype).tofile(tokens)
                if document.loss_mask is not None:
                    has_mask = True
                    np.asarray(document.loss_mask, np.uint8).tofile(loss_mask)
                offsets.append(offsets[-1] + len(document.ids))
                text_bytes.append(document.text_bytes)
                line_numbers.append(line_number)
            progress.update(reader.bytes_read - progress.n)
    for name, values in (("offsets", offsets), ("text_bytes", text_bytes),
                         ("line_numbers", line_numbers)):
        np.save(folder / f"{name}.npy", np.frombuffer(values, np.int64))
    return {"dtype": np.dtype(dtype).name, "has_mask": has_mask, "num_bad": reader.num_bad,
            "summary": reader.summary() if reader.num_bad else ""}
