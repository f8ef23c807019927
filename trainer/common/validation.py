"""Validation: the figures of held-out rows, now and then, without holding up an end."""

from argparse import Namespace
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import Dataset

from model.metrics import evaluate
from model.transformer import MiniMindLM
from trainer.common.distributed import Dist
from trainer.common.logger import Logger
from trainer.common.memory import MemoryGuard
from trainer.common.schedule import is_due
from trainer.common.stop import Stop


class Validation:
    """Evaluates the model every --eval_interval steps and after the last one.

    make_batches(val_set, rank, world_size, rows_per_batch=...) returns an iterable of `Rows`
    (`dataset/packing.py`); with val_set None nothing is evaluated. A validation that a signal cuts
    short reports nothing; the resumed run begins with it.
    """

    def __init__(self, args: Namespace, dist: Dist, dtype: torch.dtype, stop: Stop, logger: Logger,
                 model: MiniMindLM, guard: MemoryGuard, val_set: Dataset | None,
                 make_batches: Callable[..., Iterable]):
        self.args, self.dist, self.dtype, self.stop, self.logger = args, dist, dtype, stop, logger
        self.model, self.guard = model, guard
        self.val_set, self.make_batches = val_set, make_batches

    def catch_up(self, start_step: int) -> None:
        """Does what was cut short before a run was resumed after start_step steps."""
        if self.logger.validation_was_cut_short:
            self.run(start_step - 1)

    def after(self, step: int) -> None:
        """Evaluates if it is time to, after `step` (counted from 0)."""
        if is_due(step, self.args.eval_interval, self.logger.total_steps):
            self.run(step)

    def run(self, step: int) -> None:
        """Evaluates and reports, if there are held-out rows."""
        if self.val_set is None:
            return
        batches = self.stop.until_asked(self.make_batches(
            self.val_set, self.dist.rank, self.dist.world_size, rows_per_batch=self.guard.rows))
        metrics = evaluate(self.model, batches, self.guard.token_budget, self.dist.device,
                           self.dtype, self.dist.sum)
        self.logger.validated(step, metrics, was_cut_short=self.stop.cut_short)
