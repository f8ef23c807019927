"""Reads JSONL line by line, in constant memory, and names every fault as `file:line`.

What counts as a fault inside an object is the stage's business (`pretrain.py`, `sft.py`); bytes,
encoding and JSON are this file's. `dataset/README.md` lists it all.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHOWN_FAULTS = 20  # listed in full; the rest are counted
PREVIEW_CHARACTERS = 80


class DataError(ValueError):
    """A data file cannot be used as it is. The message is for the user and says what to do."""


def clean_surrogates(text: str) -> str:
    """Replaces each half of a broken UTF-16 pair (JSON can spell one as \\ud83d) by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def preview(raw: bytes) -> str:
    """The first 80 characters of a line, unprintable ones escaped, for an error message."""
    text = raw.rstrip(b"\r\n")[: 4 * PREVIEW_CHARACTERS].decode("utf-8", "backslashreplace")
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:PREVIEW_CHARACTERS]
    )
    return shown[:PREVIEW_CHARACTERS]


def shorten(value: Any, characters: int = 40) -> str:
    """repr of something that came out of a file, of bounded length."""
    text = repr(value)
    return text if len(text) <= characters else text[:characters] + "..."


def list_keys(record: dict) -> str:
    """The first keys of a record, for a message about one that is not there."""
    return ", ".join(shorten(key) for key in list(record)[:5]) or "none"


def decode_line(raw: bytes) -> str:
    """One line's text. Raises ValueError that names the likely encoding if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1})"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
        raise ValueError(what + "; the file looks like UTF-16: convert it to UTF-8")
    try:
        raw.decode("gbk")
    except UnicodeDecodeError:
        raise ValueError(what) from None
    raise ValueError(what + "; it decodes as GBK: convert with `iconv -f GBK -t UTF-8`")


def parse_line(raw: bytes, parse: Callable[[dict], Any]) -> Any:
    """The example that one line holds. Raises ValueError saying what is wrong with it."""
    text = decode_line(raw)
    try:
        # strict=False lets raw control characters, such as NUL or a tab, stand inside strings.
        record = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON ({error.msg} at column {error.colno})") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"broken JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object {{...}}")
    return parse(record)


class JsonlReader:
    """Iterates over (line number, example) of a file, and counts what it could not use.

    bad_lines "stop": the first fault ends the flow of examples, the rest of the file is still
    checked, and DataError lists the faults. "skip": faults are counted in `num_bad`, and the first
    ones kept in `faults`. A file without a single good example is an error in both.
    """

    def __init__(self, path: Path, parse: Callable[[dict], Any], bad_lines: str = "stop"):
        self.path, self.parse, self.bad_lines = Path(path), parse, bad_lines
        self.num_examples = self.num_bad = self.bytes_read = 0
        self.faults: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            file = open(self.path, "rb")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None
        with file:
            for number, raw in enumerate(file, 1):
                self.bytes_read += len(raw)
                # A byte order mark: at the start, or in the middle where files were joined.
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                if not raw.strip():
                    continue
                try:
                    example = parse_line(raw, self.parse)
                except ValueError as error:
                    self.num_bad += 1
                    if len(self.faults) < SHOWN_FAULTS:
                        self.faults.append(f"{self.path}:{number}: {error}: {preview(raw)}")
                    continue
                self.num_examples += 1
                if self.num_bad == 0 or self.bad_lines == "skip":
                    yield number, example
        if self.num_bad and self.bad_lines == "stop":
            raise DataError(
                f"{self.summary()}\nMend the file, or give --bad_lines skip to leave them out."
            )
        if self.num_examples == 0:
            content = f"only faulty lines\n{self.summary()}" if self.num_bad else "no data at all"
            raise DataError(f"{self.path}: the file holds {content}; expected one JSON object a "
                            "line (dataset/README.md describes the formats)")

    def summary(self) -> str:
        """The faults met so far: the first ones in full, then how many more."""
        more = self.num_bad - len(self.faults)
        lines = [f"{self.path}: {self.num_bad} faulty line(s), {self.num_examples} good"]
        lines += [f"  {fault}" for fault in self.faults]
        if more:
            lines.append(f"  ... and {more} more")
        return "\n".join(lines)
