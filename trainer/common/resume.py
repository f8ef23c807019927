"""Whether a saved run and a command line are the same run: what must match, and what may differ.

A run is its data in its order, its model, and its arithmetic. Another of those would be another
curve under the same name, so it is refused. What only moves or speeds up the same run, or steers
its rest (the learning rate, the length), may change and is printed.
"""

import argparse
from pathlib import Path

from trainer.common.optim import splits_matrices
from trainer.common.state_file import StateError

# What the run is. Its data files are compared by content, see `compare_data`.
MUST_MATCH = ("dim", "n_layers", "n_heads", "n_kv_heads", "dropout", "max_seq_len", "long_docs",
              "bad_lines", "seed", "dtype", "optimizer", "start_layers")
# How this launch finds its way; no part of the run.
NOT_COMPARED = ("from_resume", "from_weight", "local_rank", "data_path", "val_data_path", "out_dir",
                "save_weight", "cache_dir", "config", "show_sample", "max_minutes",
                "memory_fraction", "memory_limit_gb")


def as_saved(args: argparse.Namespace) -> dict:
    """Arguments as numbers and strings."""
    return {name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items() if name != "config"}


def comparable(args: argparse.Namespace) -> dict:
    """The arguments that all processes of a run have to have in common."""
    return {name: value for name, value in as_saved(args).items() if name not in NOT_COMPARED}


def compare_arguments(args: argparse.Namespace, saved: dict, source: Path) -> None:
    """Prints what changed, and raises StateError with both values for what must not change.

    `auto`, and no --learning_rate, mean what the run has.
    """
    saved = {"optimizer": "adamw", "start_layers": 0, **saved}  # what older states had
    for name in ("dtype", "optimizer"):
        if getattr(args, name) == "auto":
            setattr(args, name, saved[name])
    if args.learning_rate is None:
        args.learning_rate = saved["learning_rate"]
    if args.optimizer == "muon" and splits_matrices(args):
        raise StateError(f"{source} is of a run with --optimizer muon, which needs whole matrices: "
                         "go on without --deepspeed and --shard full. A run that shall move "
                         "between engines begins with --optimizer adamw.")
    given = as_saved(args)
    refused = [f"--{name} {given[name]}: was {saved[name]}" for name in MUST_MATCH
               if given[name] != saved[name]]
    if refused:
        raise StateError(f"{source} is of another run: {'; '.join(refused)}. Give the flags it had "
                         "to go on with it, or another --save_weight to begin another run.")
    # A flag that is new since the save counts as changed only if it is not a plain default.
    changed = [f"--{name} {saved[name]} -> {value}" for name, value in given.items()
               if name in saved and name not in (*MUST_MATCH, *NOT_COMPARED)
               and value != saved[name]]
    if changed:
        print(f"changed since the save: {', '.join(changed)}")
    if {"epochs", "max_steps"} & {name.split()[0][2:] for name in changed}:
        print("the run's length changed, and with it the learning rate's curve from here on")


def compare_data(now: dict, saved: dict, source: Path) -> None:
    """Raises StateError if a fingerprint (of data or tokenizer) is not the saved one."""
    problems = [f"{name} is {now[name]}, was {saved[name]}" for name in now
                if now[name] != saved[name]]
    if problems:
        raise StateError(f"{source} is of a run on something else: {'; '.join(problems)}. Give the "
                         "files it had, or another --save_weight to begin another run.")
