"""Printing that cannot end a run.

Ctrl-C ends a whole pipeline: in `train ... | tee log` the reader is gone before the run has saved.
A closed terminal is the same. Whatever is printed from then on is lost; the run is not.
"""

import contextlib
import os
import sys
from typing import TextIO


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line to standard output, or to the given stream."""
    stream = stream or sys.stdout
    with survive_lost_reader(stream):
        print(line, file=stream, flush=True)


@contextlib.contextmanager
def survive_lost_reader(stream: TextIO):
    """If a write to the stream fails inside, everything it still gets goes nowhere."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
