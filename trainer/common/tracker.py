"""Experiment trackers: SwanLab, Weights & Biases, or none, behind the same two calls.

Both work without a network in their offline modes: SWANLAB_MODE=offline, WANDB_MODE=offline.
"""

import argparse
import importlib
import secrets
import sys
from pathlib import Path

from trainer.common.resume import as_saved


class NoTracker:
    """The tracker of a run without one: does nothing."""

    run_id = ""

    def log(self, row: dict) -> None:
        pass

    def finish(self) -> None:
        pass


class Tracker:
    """SwanLab or Weights & Biases, whose calls are alike. A failure is printed once and ends it."""

    def __init__(self, args: argparse.Namespace, run_name: str, run_id: str):
        """run_id: of the run to go on with, or empty for a new one."""
        self.name, self.module = args.tracker, None
        self.run_id = run_id or secrets.token_hex(11)[:21]  # 21 characters: what SwanLab takes
        config = as_saved(args)
        folder = str(args.out_dir)
        try:
            self.module = importlib.import_module(args.tracker)
            if args.tracker == "wandb":
                self.module.init(project=args.wandb_project, name=run_name, config=config,
                                 dir=folder, id=self.run_id, resume="allow")
            else:
                self.module.init(project=args.wandb_project, experiment_name=run_name,
                                 config=config, logdir=str(Path(folder) / "swanlog"),
                                 id=self.run_id, resume="allow")
        except Exception as error:  # whatever a tracker does, it must not stop the training
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Says why the tracker is left out from here on."""
        print(f"{self.name} failed and is left out from here on: {error!r}", file=sys.stderr)
        self.module = None

    def log(self, row: dict) -> None:
        """Sends the numbers of one logged row, under its step."""
        if self.module is None:
            return
        numbers = {key: value for key, value in row.items()
                   if key != "step" and value is not None}
        try:
            self.module.log(numbers, step=row["step"])
        except Exception as error:
            self.give_up(error)

    def finish(self) -> None:
        """Flushes and closes the run."""
        if self.module is None:
            return
        try:
            self.module.finish()
        except Exception as error:
            self.give_up(error)
