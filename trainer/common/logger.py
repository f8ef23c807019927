"""What a run tells about itself: console lines and metrics.jsonl."""

import argparse
import contextlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from model.attention import Masked, way_to_attend
from model.device import DTYPES, autocast, describe
from model.files import write_atomically
from model.metrics import loss_metrics
from trainer.common.console import say, survive_lost_reader
from trainer.common.distributed import Dist
from trainer.common.engine import Engine
from trainer.common.run_files import RunFiles
from trainer.common.schedule import depth, is_due
from trainer.common.tracker import NoTracker, Tracker


def memory_gib(device: torch.device) -> float:
    """Memory of this process in GiB: of tensors at the peak of the last step (CUDA), of everything
    at its peak so far (CPU), at present (MPS).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, else in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `1h12m`, `3m05s`, `12s`."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def attention_in_use(engine: Engine, args: argparse.Namespace) -> str:
    """Which of the ways in `model/attention.py` a micro-batch of this run will take."""
    device, config = engine.dist.device, engine.model.config
    if args.use_compile:
        return Masked.__name__
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)  # a document of two tokens
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    with autocast(device, DTYPES[engine.dtype]):
        return type(way_to_attend(ids, None, None if config.dropout else starts,
                                  config.head_dim)).__name__


def first_line(engine: Engine, args: argparse.Namespace, global_batch: int, total_steps: int
               ) -> str:
    """What is about to run, in one line (and a second one if it runs on a CPU by default)."""
    dist = engine.dist
    line = (f"{engine.num_parameters:,} parameters | up to {global_batch * args.max_seq_len:,} "
            f"tokens per step | {total_steps:,} steps | world_size {dist.world_size} | "
            f"{describe(dist.device)} | {engine.dtype} | seed {args.seed} | attention "
            f"{attention_in_use(engine, args)}")
    if args.warmup_steps > total_steps // 10:
        line += f"\nwarm-up: {total_steps // 10} steps, a tenth of the run (--warmup_steps " \
                f"{args.warmup_steps})"
    if dist.device.type == "cpu" and args.device == "auto":
        line += ("\nno GPU found: training on the CPU, tens of times slower; if this machine has "
                 "a GPU, install a build of torch for it (README, section \"Which torch\")")
    return line


# A logger's part of a saved state; --from_resume 1 goes on with them.
SAVED = ("tokens", "text_bytes", "seconds", "validation", "validation_was_cut_short",
         "window_nats", "window_counted", "window_tokens", "window_bytes", "window_seconds",
         "tracker_id")


class Logger:
    """Adds up a window of steps and reports it every log_interval steps.

    The loss of a row is the mean per supervised token since the last row, not the loss of the
    last micro-batch. Tensors are read back from the device only when a row is due.
    """

    def __init__(self, args: argparse.Namespace, dist: Dist, total_steps: int,
                 steps_per_epoch: int):
        self.args, self.dist = args, dist
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.tokens, self.text_bytes = 0, 0.0  # supervised, of the whole run
        self.seconds = 0.0  # of training, in earlier launches of this run
        self.validation: dict[str, float] = {}  # the last one's figures, with their step
        self.validation_was_cut_short = False
        self.tracker_id = ""
        self.reset_window()

    def reset_window(self) -> None:
        """Empties the sums; the next window begins now."""
        self.window_started, self.window_seconds = time.perf_counter(), 0.0
        self.window_nats: Tensor | float = 0.0
        self.window_counted: Tensor | int = 0  # tokens of the steps that are in it
        self.window_tokens, self.window_bytes = 0, 0.0

    def state_dict(self) -> dict:
        """The counters, and the window that is open: a resumed log has no seam."""
        now = time.perf_counter()
        state = {name: getattr(self, name) for name in SAVED}
        return {**state, "seconds": self.seconds + now - self.started,
                "window_seconds": self.window_seconds + now - self.window_started}

    def load_state_dict(self, state: dict) -> None:
        for name in SAVED:
            setattr(self, name, state[name])
        for name in ("window_nats", "window_counted"):
            if isinstance(value := getattr(self, name), Tensor):
                setattr(self, name, value.to(self.dist.device))

    def open(self, files: RunFiles, start_step: int) -> None:
        """Begins to log; in a resumed run behind the rows of the first start_step steps."""
        self.file, self.unwritten, self.tracker = None, b"", NoTracker()
        if self.dist.is_main:
            if start_step:
                cut_metrics(files.metrics, start_step, self.validation_was_cut_short)
            self.file = open(files.metrics, "ab", buffering=0)
            if self.args.use_wandb:
                self.tracker = Tracker(self.args, files.name, self.tracker_id)
                self.tracker_id = self.tracker.run_id
        # disable=None: no bar where standard error is no terminal; the lines carry an ETA too.
        self.bar = tqdm(total=self.total_steps, initial=start_step, unit="step",
                        disable=None if self.dist.is_main else True, dynamic_ncols=True)
        self.start_step = start_step
        self.started = self.window_started = time.perf_counter()

    def step(self, step: int, nats: Tensor, tokens: int, text_bytes: float, lr: float,
             grad_norm: Tensor, skipped_steps: Tensor) -> None:
        """Notes a finished step (counted from 0): its summed loss, supervised tokens, text bytes.

        All are sums over all processes. grad_norm is before clipping; skipped_steps counts those
        without an update since the start.
        """
        # A step that was not finite changed nothing, and says nothing about the others' loss.
        finite = nats.isfinite()
        self.window_nats = self.window_nats + nats.where(finite, 0)
        self.window_counted = self.window_counted + finite * tokens
        self.window_tokens += tokens
        self.window_bytes += text_bytes
        self.tokens += tokens
        self.text_bytes += text_bytes
        self.bar.update()
        if not is_due(step, self.args.log_interval, self.total_steps):
            return
        done = step + 1
        nats = float(self.window_nats) if self.window_counted > 0 else math.nan
        metrics = loss_metrics(nats, int(self.window_counted), self.window_bytes)
        now = time.perf_counter()
        seconds = self.window_seconds + now - self.window_started
        row = {
            "step": done, "epoch": step // self.steps_per_epoch, "loss": metrics["loss"],
            "ppl": metrics["ppl"], "lr": lr, "grad_norm": float(grad_norm), "tokens": self.tokens,
            "tokens_per_s": self.window_tokens / seconds,
            "text_bytes_per_s": self.window_bytes / seconds,
            "mem_gib": memory_gib(self.dist.device), "skipped_steps": int(skipped_steps),
            "time": time.time(),
        }
        blocks = ""
        if self.args.start_layers:
            row["depth"] = depth(step, self.total_steps, self.args)
            blocks = f"{row['depth']} blocks | "
        self.write(row)
        eta = (self.total_steps - done) * (now - self.started) / (done - self.start_step)
        self.print(
            f"step {done}/{self.total_steps} | loss {row['loss']:.3f} | lr {lr:.1e} | "
            f"grad_norm {row['grad_norm']:.2f} | {row['tokens_per_s']:,.0f} tok/s | "
            f"{blocks}mem {row['mem_gib']:.1f} GiB | eta {duration(eta)}"
            + (f" | {row['skipped_steps']} steps skipped: gradient not finite"
               if row["skipped_steps"] else "")
        )
        self.reset_window()

    @contextlib.contextmanager
    def paused(self):
        """What runs inside counts in no speed and no ETA: validation, saving."""
        begun = time.perf_counter()
        yield
        self.window_started += time.perf_counter() - begun
        self.started += time.perf_counter() - begun

    def validated(self, step: int, metrics: dict[str, float], was_cut_short: bool) -> None:
        """Reports the figures of a validation after `step` (counted from 0), if it is whole."""
        self.validation_was_cut_short = was_cut_short
        if was_cut_short:
            return
        self.validation = {"step": step + 1, **metrics}
        self.write({"step": step + 1,
                    **{f"val_{key}": metrics[key] for key in ("loss", "ppl", "bpb")}})
        self.print(f"step {step + 1}/{self.total_steps} | val_loss {metrics['loss']:.3f} | "
                   f"val_ppl {metrics['ppl']:.2f} | val_bpb {metrics['bpb']:.3f}")

    def write(self, row: dict) -> None:
        """Appends a row to metrics.jsonl and sends it to the tracker; JSON has no infinity: null.
        """
        row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        if self.file is not None:
            self.append((json.dumps(row) + "\n").encode())
        self.tracker.log(row)

    def append(self, line: bytes) -> None:
        """Adds to metrics.jsonl; what a full disk does not take is kept for the next row."""
        had_room, self.unwritten = not self.unwritten, self.unwritten + line
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if had_room:
                say(f"{self.file.name}: {error}; trying again with the next row", sys.stderr)

    def print(self, line: str) -> None:
        """Prints a line above the progress bar, on the main process."""
        if self.dist.is_main:
            with survive_lost_reader(sys.stdout):
                self.bar.write(line)
                sys.stdout.flush()

    def finish(self, line: str, wait_seconds: float) -> None:
        """Prints a last line with the run's totals, and closes everything."""
        now = time.perf_counter()
        seconds = self.seconds + now - self.started
        self.print(f"{line} | {duration(seconds)} of training, {self.tokens:,} tokens, "
                   f"{self.tokens / seconds:,.0f} tok/s, {self.text_bytes / seconds:,.0f} text "
                   f"bytes/s, {100 * wait_seconds / (now - self.started):.2f} % waiting for data")
        self.bar.close()
        if self.file is not None:
            self.append(b"")
            self.file.close()
        self.tracker.finish()


def cut_metrics(path: Path, steps: int, validation_too: bool = False) -> None:
    """Drops what was logged after so many steps, and a last line that was torn.

    validation_too: also the validation after exactly so many steps, which is to be made again.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
            again = validation_too and row["step"] == steps and "val_loss" in row
            if line.endswith(b"\n") and row["step"] <= steps and not again:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_atomically(path, lambda file: file.writelines(kept))
