"""What the tests of resuming share: runs in this process that die where they are told to."""

import json
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, texts

from dataset.jsonl import DataError
from trainer import train_full_sft, train_pretrain
from trainer.common import checkpoint, errors
from trainer.common.checkpoint import Checkpoint
from trainer.common.engine import Engine
from trainer.common.finite import FiniteCheck
from trainer.common.logger import Logger
from trainer.common.stop import Stop

STAGES = {"pretrain": train_pretrain, "full_sft": train_full_sft}
# Two epochs of 7 steps; saves after 4, 8, 12, 14, rows after 3, 6, ..., validation after 5, 10, 14.
FLAGS = ("--dropout", 0.1, "--batch_size", 2, "--accumulation_steps", 2, "--epochs", 2,
         "--save_interval", 4, "--log_interval", 3, "--eval_interval", 5, "--learning_rate", 1e-2)
AGAIN = ("--from_resume", 1)
FIELDS = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "skipped_steps", "val_loss",
          "val_ppl", "val_bpb")
# What the loop calls at that point, and which call of the step it is.
INSTANTS = {
    "in a micro-batch": (Engine, "backward", 2), "after the update": (FiniteCheck, "note", 1),
    "before the save": (Stop, "now", 1), "after the last save": (Logger, "finish", 1),
}


class Death(BaseException):
    """The end of a process; none of its code is to catch it."""


def join_writers() -> None:
    """Waits for saves that are being written."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


class Runs:
    """Launches of the stage scripts in this process, all in one output folder."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.tmp_path, self.monkeypatch = tmp_path, monkeypatch
        self.out = tmp_path / "out"

    def path(self, suffix: str, name: str = "run") -> Path:
        """out/run_32{suffix}"""
        return self.out / f"{name}_32{suffix}"

    def start(self, *flags, script=train_pretrain, name="run", at_step=lambda step: None) -> int:
        """Runs a script as a command; returns its exit status. at_step is called before a step."""
        argv = ["train", *TINY_RUN, "--out_dir", self.out, "--save_weight", name, "--cache_dir",
                self.tmp_path / "cache", "--from_weight", "none", *flags]
        for seed in (random.seed, np.random.seed):  # another process has other random states
            seed("--from_resume" in flags and self.path("_resume.pth", name).exists())
        learning_rate = script.learning_rate

        def new_step(step, *args):
            at_step(step)
            random.random(), np.random.normal()  # whoever draws in the loop is resumed, too
            return learning_rate(step, *args)

        with self.monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", [str(part) for part in argv])
            patch.setattr(script, "learning_rate", new_step)
            errors.run(script.main, DataError)
        return ended.value.code or 0

    def killed(self, instant: str, dying_step: int, *flags, lost_save: int = 0,
               half_save: int = 0, **options) -> None:
        """A run that ends at an instant of a step (counted from 0); the save after `lost_save`
        steps is still being written then, others are done. The save after `half_save`
        steps dies between its two files.
        """
        write, now = Checkpoint.write, {"step": -1, "calls": 0}

        def first_only(name, calls):
            function = getattr(checkpoint, name)
            return lambda *args: calls.append(name) or len(calls) > 1 or function(*args)

        def written(self, state):
            if state["step"] == lost_save:
                self.files.state.with_suffix(".pth.tmp").write_bytes(b"half")
                return
            with pytest.MonkeyPatch.context() as patch:
                if state["step"] == half_save:
                    written_files = []
                    for name in ("save_weights", "write_state"):
                        patch.setattr(checkpoint, name, first_only(name, written_files))
                write(self, state)

        def new_step(step):
            join_writers()  # a save that is due is made, not put off
            now.update(step=step, calls=0)
            if instant == "before a step" and step == dying_step:
                raise Death

        def deadly(function, deadly_call):
            def call(*args, **options):
                now["calls"] += now["step"] == dying_step
                if now["calls"] == deadly_call:
                    raise Death
                return function(*args, **options)
            return call

        with self.monkeypatch.context() as patch, pytest.raises(Death):
            patch.setattr(Checkpoint, "write", written)
            if instant in INSTANTS:
                owner, name, call = INSTANTS[instant]
                patch.setattr(owner, name, deadly(getattr(owner, name), call))
            try:
                self.start(*flags, at_step=new_step, **options)
            finally:
                join_writers()

    def rows(self, name: str = "run") -> list[dict]:
        """The rows of the log."""
        lines = self.path("_metrics.jsonl", name).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def curve(self, name: str = "run") -> list[dict]:
        """What P4 promises of the log's rows."""
        return [{field: row[field] for field in FIELDS if field in row} for row in self.rows(name)]

    def state(self, name: str = "run") -> dict:
        return torch.load(self.path("_resume.pth", name), weights_only=True)

    def result(self, name: str = "run") -> dict:
        """All that must not depend on where a run was killed: values by dotted name."""
        state = self.state(name)
        del state["arguments"]
        for clock in ("seconds", "window_seconds", "tracker_id"):
            del state["log"][clock]
        weights = torch.load(self.path(".pth", name), weights_only=True)
        about = json.loads(self.path(".json", name).read_text())
        del about["command"]
        return dict(leaves({"state": state, "weights": weights, "about": about,
                            "curve": self.curve(name)}))


def leaves(value, name=""):
    """(dotted name, value) of everything in nested dicts and lists; tensors as dtype and bytes."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield name, (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    else:
        yield name, value


def assert_same(result: dict, expected: dict) -> None:
    """Equal to the bit; names what is not."""
    different = [name for name in {**result, **expected}
                 if result.get(name, "missing") != expected.get(name, "missing")]
    assert not different, different


def data_flags(folder: Path, stage: str = "pretrain") -> tuple:
    """The flags of a training file of 28 rows (SFT: 27) and a small validation file."""
    flags = []
    for flag, count in ("--data_path", 36 if stage == "pretrain" else 27), ("--val_data_path", 9):
        records = texts(count, seed=len(flags))
        if stage == "full_sft":  # a question each, and the text as its answer
            records = [{"conversations": [{"role": "user", "content": f"{number}?"},
                                          {"role": "assistant", "content": record["text"]}]}
                       for number, record in enumerate(records)]
        path = folder / f"{stage}{count}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        flags += [flag, path]
    return tuple(flags)
