"""Numbers that stay finite: which steps changed no weight, and when there were too many in a row.

The engine decides on the device (`engine.outcome`) and skips by itself. Here that decision is read
one step later, when it has long been made, so that the host never waits for the step it has just
queued.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.common.engine import NOT_FINITE

MOST_IN_A_ROW = 10


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class FiniteCheck:
    """Names the documents of steps that were not finite, and ends a run that does not recover.

    describe_step: step (counted from 0) -> the file and lines of its documents.
    """

    def __init__(self, describe_step: Callable[[int], str], warn: Callable[[str], None]):
        self.describe_step, self.warn = describe_step, warn
        self.in_a_row = 0
        self.pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def note(self, step: int, outcome: Tensor) -> None:
        """Notes a step's outcome (see `engine.py`), an int scalar on the device.

        Judges the step before. Raises NotFiniteError.
        """
        self.settle()
        copied = None
        if outcome.device.type == "cuda":
            # Into pinned memory: a copy to any other would wait for the step.
            pinned = torch.empty_like(outcome, device="cpu", pin_memory=True)
            outcome = pinned.copy_(outcome, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.pending = (step, outcome, copied)

    def settle(self) -> None:
        """Judges the step that is still pending. Raises NotFiniteError."""
        if self.pending is None:
            return
        (step, outcome, copied), self.pending = self.pending, None
        if copied is not None:
            copied.synchronize()
        code = int(outcome)
        self.in_a_row = self.in_a_row + 1 if code == NOT_FINITE else 0
        if code != NOT_FINITE:  # float16 looking for its scale is ordinary
            return
        self.warn(f"step {step + 1}: loss or gradient not finite, no weight changed "
                  f"({self.in_a_row} in a row) | {self.describe_step(step)}")
        if self.in_a_row >= MOST_IN_A_ROW:
            raise NotFiniteError(
                f"{MOST_IN_A_ROW} steps in a row had a loss or gradient that is not finite; "
                "stopped, and what was saved before stays. Look at the documents named above; "
                "then lower --learning_rate, lengthen --warmup_steps, or (if --dtype is float16) "
                "start anew with --dtype float32. --from_resume 1 continues from the last save."
            )

    def state_dict(self) -> dict:
        self.settle()
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict) -> None:
        self.in_a_row = state["in_a_row"]
