"""Train in the memory there is: as many rows in a micro-batch as fit, and fewer when they do not.

Only the cut into micro-batches changes: a step keeps its rows, its gradient (the sum over all of
them, divided by their targets) and its place in the order. What counts as full is a threshold below
the limit (--memory_fraction), because the last bytes cost more than they bring: on a GPU a crash,
on a laptop a machine that swaps.

    before training   a probe: forward and backward on full rows, halved until they fit
    after a step      a peak above the threshold halves the micro-batch; a long quiet spell doubles
                      it again, if the measured bytes per row say that it fits
    out of memory     the step is taken again from its first micro-batch, with half the rows
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch

from model.device import autocast
from model.memory import predicted_bytes
from model.transformer import MiniMindLM
from trainer.common.distributed import Dist
from trainer.common.engine import Engine
from trainer.common.memory_gauge import make_gauge
from trainer.common.state_file import random_states, set_random_states

FEWEST_STEPS = 20  # between two changes, unless memory ran out
QUIET_STEPS = 100  # without a change before a larger micro-batch is tried


class OutOfMemory(RuntimeError):
    """Not even one row fits, or memory ran out where a step cannot be taken again."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for CUDA's error, and for the RuntimeError that the CPU's allocator raises."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory",
                                      "CUBLAS_STATUS_ALLOC_FAILED", "bad_alloc")))


def gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


class MemoryGuard:
    """Says how many rows a micro-batch has (`rows`, and `token_budget` in positions).

    It never has more than --batch_size says, or, if that is 0, than a step gives to a process.
    say prints a line.
    """

    def __init__(self, args: argparse.Namespace, dist: Dist, engine: Engine, rows_per_process: int,
                 say: Callable[[str], None]):
        self.args, self.dist, self.engine, self.say = args, dist, engine, say
        self.rows = self.asked = args.batch_size or rows_per_process
        self.last_change = 0  # the step of it
        self.changed = False  # since the last step was looked at
        self.most = [0.0, 0.0]  # since the last change: the highest peak, and bytes for each row
        self.gauge = make_gauge(dist.device, args.memory_limit_gb, dist.local_world_size)
        self.threshold = args.memory_fraction * self.gauge.limit
        self.can_repeat = engine.can_repeat

    @property
    def token_budget(self) -> int:
        """Positions in a micro-batch."""
        return self.rows * self.args.max_seq_len

    def state_dict(self) -> dict:
        return {"rows": self.rows, "last_change": self.last_change, "asked": self.asked}

    def load_state_dict(self, state: dict) -> None:
        """Goes on with the same cut, unless another --batch_size asks for another."""
        if state["asked"] == self.asked:
            self.rows, self.last_change = state["rows"], state["last_change"]

    def probe(self, model: MiniMindLM, dtype: torch.dtype) -> None:
        """Halves the micro-batch until it fits, on every process. Raises OutOfMemory.

        Weights and random states are untouched. Nothing is tried where half of the threshold is
        more than `predicted_bytes`, as it mostly is on a CPU, whose probe would take seconds.
        """
        while self.can_repeat:
            predicted = predicted_bytes(model.config, self.rows, self.args.max_seq_len, dtype,
                                        model.gradient_checkpointing)["all"]
            [doubtful] = self.dist.max(2 * predicted > self.threshold)
            if not doubtful:
                return
            ran_out, peak = self.dist.max(*self.measure(model, dtype))
            if not ran_out and (peak <= self.threshold or self.rows == 1):
                return
            seen = "memory ran out" if ran_out else f"{gib(peak)} of {gib(self.gauge.limit)}"
            self.halve(f"before the first step: {seen}")

    def measure(self, model: MiniMindLM, dtype: torch.dtype) -> tuple[bool, float]:
        """Whether a micro-batch of now `rows` full rows runs out, and the peak of a step with it.
        """
        before, depth = random_states(self.dist.device), model.depth
        model.depth = model.config.n_layers  # what a growing model will come to
        shape = (self.rows, self.args.max_seq_len)
        self.gauge.start()
        try:
            ids = torch.randint(model.config.vocab_size, shape, device=self.dist.device)
            starts = torch.arange(0, ids.numel() + 1, shape[1], device=ids.device)  # one a row
            with autocast(self.dist.device, dtype):
                loss = model(ids, doc_ids=torch.zeros_like(ids), targets=ids,
                             doc_starts=starts.int())
            loss.backward()
            ran_out = False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        # A step has gradients of earlier micro-batches, and its update may make the moments.
        peak = self.gauge.peak() + 4 * self.engine.num_parameters + self.engine.bytes_to_come()
        self.engine.drop_gradients()
        model.depth = depth
        set_random_states(before, self.dist.device)
        return ran_out, float(peak)

    def attempts(self) -> Iterator[contextlib.AbstractContextManager]:
        """Contexts to run the micro-batches of a step in: one, or more if memory runs out."""
        self.random = random_states(self.dist.device)
        self.gauge.start()
        self.done = False
        while not self.done:
            yield self.attempt()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        ran_out = False
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        if ran_out and not self.can_repeat:
            raise OutOfMemory(f"rank {self.dist.rank} ran out of memory, and with --shard full or "
                              f"--deepspeed a step cannot be taken again. {self.advice}")
        if ran_out:
            self.engine.abandon()
        [someone_ran_out] = self.dist.max(ran_out)
        self.done = not someone_ran_out
        if self.done:
            return
        self.engine.drop_gradients()
        set_random_states(self.random, self.dist.device)
        self.halve("out of memory" if ran_out else "another process is out of memory")

    @property
    def advice(self) -> str:
        return (f"A smaller --batch_size (a step keeps its rows), --max_seq_len "
                f"(now {self.args.max_seq_len}) or --gradient_checkpointing 1 need less.")

    def halve(self, reason: str) -> None:
        """Takes half the rows from here on, and says so. Raises OutOfMemory at one row."""
        if self.rows == 1:
            raise OutOfMemory(f"{reason}, and a micro-batch of one row is the smallest there is. "
                              "--max_seq_len with a smaller number, --gradient_checkpointing 1 or "
                              "a smaller --dim need less.")
        self.say(f"memory: {reason} at {self.rows} rows in a micro-batch; now {self.rows // 2}, in "
                 "more micro-batches: a step keeps its rows")
        self.rows //= 2
        self.changed = True
        self.gauge.free()

    def after(self, step: int) -> None:
        """Looks at the peak of `step` (counted from 0), and changes the micro-batch if need be."""
        peak = self.gauge.peak()
        peak, per_row = self.dist.max(peak, (peak - self.gauge.base) / self.rows)
        # The highest of many steps: the last one of an epoch may be short.
        self.most = [max(self.most[0], peak), max(self.most[1], per_row)]
        if self.changed:  # memory ran out: the peak is that of the attempt that failed
            self.note_change(step)
        if not self.can_repeat or (0 < self.last_change and step < self.last_change + FEWEST_STEPS):
            return
        if peak > self.threshold and self.rows > 1:
            self.halve(f"step {step + 1}: {gib(peak)} of {gib(self.gauge.limit)}, above "
                       f"{self.args.memory_fraction:.0%},")
            self.note_change(step)
        elif (self.rows < self.asked and step - self.last_change >= QUIET_STEPS
              and not self.engine.grows  # deeper steps are to come, which need more
              and self.most[0] + self.rows * self.most[1] <= self.threshold):
            self.say(f"memory: step {step + 1}: {gib(peak)} of {gib(self.gauge.limit)} at "
                     f"{self.rows} rows in a micro-batch, {gib(per_row)} a row: now "
                     f"{min(2 * self.rows, self.asked)}")
            self.rows = min(2 * self.rows, self.asked)
            self.note_change(step)

    def note_change(self, step: int) -> None:
        """The micro-batch is another one from the step after `step` on."""
        self.last_change, self.changed, self.most = step + 1, False, [0.0, 0.0]
