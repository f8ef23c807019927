"""What all sections of the benchmark share: its settings, its figures and their table."""

import datetime
import os
import platform
import shutil
import statistics
import subprocess
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dataset.tokenizer import Tokenizer
from model.device import describe
from model.files import ROOT
from trainer.common.distributed import Dist


@dataclass(frozen=True)
class Bench:
    """What is measured, and how long."""

    args: dict[int, Namespace]  # max_seq_len -> the stage script's flags at that length
    stage_flags: list[str]  # the same as typed, for a process of its own
    dist: Dist
    dtype: torch.dtype
    tokenizer: Tokenizer
    seconds: float  # of one measurement
    repeats: int
    new_tokens: int
    folder: Path  # for what has to be written; removed at the end

    @property
    def device(self) -> torch.device:
        return self.dist.device


@dataclass(frozen=True)
class Figure:
    """One line of the table. No values: it could not be measured here."""

    section: str
    name: str
    values: tuple[float, ...]
    unit: str = ""  # "%" shows a ratio 0..1 in percent

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, value: float) -> str:
        """A value to three digits or, from a thousand on, to the unit."""
        value *= 100 if self.unit == "%" else 1
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")

    def cells(self) -> tuple[str, str, str]:
        """Name, median and unit, spread."""
        if not self.values:
            return self.name, "n/a", ""
        spread = f"{self.show(min(self.values))} - {self.show(max(self.values))}"
        return (self.name, f"{self.show(self.median)} {self.unit}".strip(),
                spread if len(self.values) > 1 else "")


def table(figures: Iterable[Figure]) -> str:
    """Markdown: one table, the name of a section on its first line."""
    lines = ["| section | measured | median | lowest - highest |", "|---|---|--:|--:|"]
    last = None
    for figure in figures:
        section = figure.section if figure.section != last else ""
        lines.append(f"| {' | '.join((section, *figure.cells()))} |")
        last = figure.section
    return "\n".join(lines)


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what it was given; a clock read earlier would lie."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def machine(device: torch.device) -> list[str]:
    """What the figures depend on, a line each: processor, device, torch, commit, date."""
    return [
        f"processor: {cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}",
        f"device: {describe(device)}",
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        f"commit {commit()}, {datetime.date.today()}",
    ]


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor that gives no name
        return platform.processor() or platform.machine()


def commit() -> str:
    """The commit this was measured at; with "and changes" if the files differ from it."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (name or "unknown") + (" and changes" if changed else "")
