"""Training: our packed loop beside the classic recipe, in turns, and beside the ceiling.

Everything here is measured in rounds (ceiling, ours, classic, ceiling, ours, ...), so that a busy
neighbour slows all of them down; ratios are taken within a round.
"""

import contextlib
import sys
import time
from argparse import Namespace
from functools import partial
from typing import NamedTuple

import torch

from dataset.loader import StepLoader, StepSampler
from dataset.pretrain import PRETRAIN
from dataset.stage_data import open_data
from model.device import autocast, cpu_has_bfloat16
from model.transformer import MiniMindLM
from scripts.benchmark_parts import breakdown
from scripts.benchmark_parts.ceiling import ceiling
from scripts.benchmark_parts.figures import Bench, Figure, synchronise
from scripts.classic_recipe import ClassicRecipe, Counts, read_texts
from trainer.common.engines import make_engine, place
from trainer.common.finite import FiniteCheck
from trainer.common.memory import MemoryGuard
from trainer.common.optim import make_optimizer
from trainer.common.schedule import learning_rate

OURS = "ours"
to_stderr = partial(print, file=sys.stderr, flush=True)  # the table is all of standard output


class PackedRun:
    """The loop of `trainer/train_pretrain.py`, a step at a time, less logging and saving."""

    def __init__(self, bench: Bench, args: Namespace):
        self.args, self.dist, self.dtype = args, bench.dist, bench.dtype
        torch.manual_seed(args.seed)
        self.model = MiniMindLM(args.config, bool(args.gradient_checkpointing))
        place(self.model, args, self.dist)
        with contextlib.redirect_stdout(sys.stderr):
            self.train_set, _ = open_data(PRETRAIN, bench.tokenizer, args)
        rows = args.batch_size * args.accumulation_steps
        sampler = StepSampler(len(self.train_set), rows, sys.maxsize, args.seed,
                              multiple_of=args.batch_size if args.use_compile else 1)
        self.epoch_steps = sampler.steps_per_epoch
        self.loader = StepLoader(self.train_set, sampler, args.num_workers,
                                 self.dist.device.type == "cuda")
        self.optimizer = make_optimizer(self.model, args, self.dtype)
        self.engine = make_engine(self.model, self.optimizer, args, self.dist, self.dtype)
        self.train_model = self.engine.wrap(
            torch.compile(self.model) if args.use_compile else self.model)
        self.finite = FiniteCheck(self.loader.documents_of, to_stderr)
        self.guard = MemoryGuard(args, self.dist, self.engine, args.batch_size, to_stderr)
        self.steps = iter(self.loader)
        self.model.train()

    def close(self) -> None:
        """Ends the workers, which would otherwise wait for more at the program's end: they do not
        listen to signals, and the interpreter knows no other way to end them.
        """
        self.steps.close()

    @property
    def wait_seconds(self) -> float:
        return self.loader.wait_seconds

    def step(self) -> Counts:
        """One optimizer step."""
        step, rows = next(self.steps)
        lr = learning_rate(step, self.epoch_steps, self.args)
        for attempt in self.guard.attempts():
            with attempt:
                nats, loss = 0.0, None
                for micro_batch, is_last in rows.split(self.guard.token_budget, self.dist.device):
                    with self.engine.sync(is_last):
                        with autocast(self.dist.device, self.dtype):
                            loss = self.train_model(**micro_batch)
                        self.engine.backward(loss / rows.num_supervised)
                    nats += loss.detach()
        self.engine.update(lr, self.args.grad_clip, nats)
        self.finite.note(step, self.engine.outcome)
        self.guard.after(step)
        return Counts(rows.num_supervised, rows.input_ids.numel(), rows.text_bytes)


class Measured(NamedTuple):
    """Some steps of a run, in sum."""

    seconds: float
    steps: int
    tokens: int
    positions: int
    text_bytes: float
    wait_seconds: float
    utilization: float | None  # of the GPU, 0..1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.text_bytes / self.seconds


def measure(run: PackedRun | ClassicRecipe, seconds: float, device: torch.device) -> Measured:
    """Steps for about so many seconds, at least one."""
    tokens = positions = steps = 0
    text_bytes, waited = 0.0, run.wait_seconds
    synchronise(device)
    begun = time.perf_counter()
    while steps == 0 or time.perf_counter() - begun < seconds:
        counts = run.step()
        steps, tokens = steps + 1, tokens + counts.tokens
        positions, text_bytes = positions + counts.positions, text_bytes + counts.text_bytes
    busy = utilization(device)
    synchronise(device)
    return Measured(time.perf_counter() - begun, steps, tokens, positions, text_bytes,
                    run.wait_seconds - waited, busy)


def utilization(device: torch.device) -> float | None:
    """How much of the last moments the GPU was at work; None where nothing can say so."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # needs the package nvidia-ml-py, and a driver
        return None


def mfu(parameters: int, tokens_per_s: float, ceiling_per_s: float) -> float:
    """Model FLOP utilisation, 0..1: six operations for each parameter and token that teaches."""
    return 6 * parameters * tokens_per_s / ceiling_per_s


def classic_dtypes(bench: Bench) -> list[torch.dtype]:
    """float32 on a CPU, and bfloat16 if it has that; elsewhere autocast to the dtype of ours."""
    if bench.device.type != "cpu":
        return [bench.dtype]
    return [torch.float32] + [torch.bfloat16] * cpu_has_bfloat16()


def section(bench: Bench) -> list[Figure]:
    """All lengths, one after the other."""
    return [figure for length in bench.args for figure in at_length(bench, length)]


def at_length(bench: Bench, length: int) -> list[Figure]:
    """Rounds of measurements at one max_seq_len, then where a step's time and memory go."""
    args, device = bench.args[length], bench.device
    title = f"training, max_seq_len {length}"
    texts = read_texts(args.data_path)
    classics = {f"classic {str(dtype).removeprefix('torch.')}": ClassicRecipe(
        args.config, texts, bench.tokenizer, length, device, dtype, args.seed, args.num_workers)
        for dtype in classic_dtypes(bench)}
    with contextlib.closing(PackedRun(bench, args)) as ours:
        runs = {OURS: ours, **classics}
        for run in runs.values():  # compiles, makes the moments, starts the workers
            run.step()
            run.step()
        rounds, ceilings = [], []
        for number in range(bench.repeats):
            to_stderr(f"training at {length}: round {number + 1} of {bench.repeats}")
            ceilings.append(ceiling(args.config, args.batch_size * length, bench.dtype, device,
                                    bench.seconds)["all"])
            rounds.append({name: measure(run, bench.seconds, device) for name, run in runs.items()})
        figures = figures_of(title, rounds, ceilings, args.config.num_parameters, bench.dtype)
        shares = breakdown.parts(ours, device, bench.seconds)
        figures += [Figure(title, f"{OURS}: time in {part}", (share,), "%")
                    for part, share in shares.items()]
        for name, run in runs.items():
            kernels, peak = breakdown.profiled_step(run, device)
            figures += [Figure(title, f"{name}: kernels, {kind}", (share,), "%")
                        for kind, share in kernels.items()]
            figures.append(Figure(title, f"{name}: peak memory of a step", (peak / 2**20,), "MiB"))
    return figures


def figures_of(title: str, rounds: list[dict[str, Measured]], ceilings: list[float],
               parameters: int, dtype: torch.dtype) -> list[Figure]:
    """The lines of the table that the rounds give."""
    def line(name: str, values, unit: str = "") -> Figure:
        return Figure(title, name, tuple(value for value in values if value is not None), unit)

    classics = [name for name in rounds[0] if name != OURS]
    figures = [line(f"text bytes/s, ours / {name}",
                    (done[OURS].bytes_per_s / done[name].bytes_per_s for done in rounds), "x")
               for name in classics]
    figures.append(line(f"ceiling, {str(dtype).removeprefix('torch.')}",
                        (rate / 1e9 for rate in ceilings), "GFLOP/s"))
    for name in (OURS, *classics):
        took = [done[name] for done in rounds]
        figures += [
            line(f"{name}: text bytes/s", (each.bytes_per_s for each in took)),
            line(f"{name}: supervised tokens/s", (each.tokens_per_s for each in took)),
            line(f"{name}: MFU, of the ceiling in {str(dtype).removeprefix('torch.')}",
                 (mfu(parameters, each.tokens_per_s, rate)
                  for each, rate in zip(took, ceilings)), "%"),
            line(f"{name}: fill", (each.tokens / each.positions for each in took), "%"),
            line(f"{name}: waiting for data", (each.wait_seconds / each.seconds for each in took),
                 "%"),
            line(f"{name}: GPU utilisation", (each.utilization for each in took), "%"),
        ]
    return figures
