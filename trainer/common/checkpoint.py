"""Saving a run, and going on with it.

A save holds the loop only while the state is copied to host memory; it is written by a thread. A
save that fails (a full disk, say) leaves the old files whole, and the next one tries again.
"""

import argparse
import sys
import threading

from model.transformer import MiniMindLM
from model.weights import (
    WeightsError,
    fill_model,
    find_weights,
    read_config,
    read_state,
    save_weights,
)
from trainer.common.console import say
from trainer.common.distributed import Dist
from trainer.common.engine import Engine
from trainer.common.resume import as_saved, compare_arguments, compare_data
from trainer.common.run_files import RunFiles
from trainer.common.schedule import is_due
from trainer.common.state_file import (
    StateError,
    random_states,
    read_newest_state,
    replace_damaged,
    set_random_states,
    to_host,
    write_state,
)


def start_weights(model: MiniMindLM, args: argparse.Namespace, tokenizer_hash: str) -> None:
    """Fills the model with --from_weight, unless that is `none`.

    Raises WeightsError if they do not fit. Tensors alone do not tell all: another number of heads,
    or another tokenizer, can have the same shapes, so the `.json` is compared where there is one.
    """
    if args.from_weight == "none":
        return
    path = find_weights(args.from_weight, args.out_dir, args.dim)
    state = read_state(path)
    if path.with_suffix(".json").is_file():
        config, about = read_config(path, state)
        wanted = {**model.config.to_dict(), "dropout": config.dropout}
        problems = [f"{name} is {value}, expected {wanted[name]}"
                    for name, value in config.to_dict().items() if value != wanted[name]]
        if about.get("tokenizer_hash", tokenizer_hash) != tokenizer_hash:
            problems.append("made with another model/tokenizer.json")
        if problems:
            raise WeightsError(f"{path.with_suffix('.json')}: {'; '.join(problems)}. Give the "
                               "flags that the weights were trained with.")
    fill_model(model, state, str(path))
    print(f"starting from {path}")


class Checkpoint:
    """The saves of one run, and the state it goes on from, if --from_resume 1 found one.

    start_step: optimizer steps already done; global_batch: rows in a step over all processes;
    micro_batch_rows: rows in a micro-batch. In a new run they are 0 and what the flags say.
    Raises StateError if the state is damaged or of another run.
    """

    def __init__(self, args: argparse.Namespace, dist: Dist, stage_name: str, tokenizer_hash: str):
        self.args, self.dist = args, dist
        self.stage_name, self.tokenizer_hash = stage_name, tokenizer_hash
        self.files = RunFiles(args.out_dir, f"{args.save_weight}_{args.dim}")
        if dist.is_main:
            self.files.lock()
            self.files.clean()
        self.saved = read_newest_state(self.files.state) if args.from_resume else None
        self.micro_batch_rows = args.batch_size
        self.global_batch = args.batch_size * args.accumulation_steps * dist.world_size
        self.start_step = 0
        if self.saved is not None:
            self.continue_from(self.saved)
        elif args.from_resume:
            print(f"--from_resume 1: there is no {self.files.state}; beginning anew")
        self.parts: dict[str, object] = {}
        self.writer: threading.Thread | None = None
        self.problem = ""  # why the last save failed
        self.overdue = False

    @property
    def resumed(self) -> bool:
        """True if this launch goes on with an earlier one's run."""
        return self.saved is not None

    def continue_from(self, saved: dict) -> None:
        """Takes over what the run was; prints or refuses what is different now."""
        compare_arguments(self.args, saved["arguments"], self.files.state)
        wanted, self.global_batch = self.global_batch, saved["global_batch"]
        if self.args.batch_size == saved["arguments"]["batch_size"]:
            self.micro_batch_rows = saved["micro_batch_rows"]
        if wanted != self.global_batch:
            print(f"a step keeps its {self.global_batch} rows, though the flags say {wanted}; they "
                  f"go in micro-batches of up to {self.micro_batch_rows} rows")
        self.start_step = saved["step"]
        print(f"resuming after step {self.start_step} from {self.files.state}")

    def compare_data(self, train_set, val_set) -> None:
        """Raises StateError if the state is of a run on other data or another tokenizer.

        The sets are `PackedRows` (`dataset/loader.py`); val_set may be None.
        """
        self.facts = {"the training data": train_set.fingerprint,
                      "the validation data": val_set.fingerprint if val_set else "none",
                      "the tokenizer": self.tokenizer_hash}
        if self.resumed:
            compare_data(self.facts, self.saved["facts"], self.files.state)

    def is_finished(self, total_steps: int) -> bool:
        """True, and says so, if the resumed run has no step left."""
        if not self.resumed or self.start_step < total_steps:
            return False
        print(f"the run is finished: {self.start_step} of {total_steps} steps are done, and the "
              f"weights are in {self.files.weights}. More --epochs (or --max_steps) continue it.")
        return True

    def begin(self, total_steps: int, engine: Engine, **others) -> None:
        """Call once all is made: puts the saved state into place, or makes way for a new run.

        The parts (all have `state_dict` and `load_state_dict`) are what later saves consist of.
        """
        self.total_steps, self.engine = total_steps, engine
        self.parts = {"engine": engine, **others}
        if self.dist.is_main:
            self.files.check_space(engine.model, self.resumed)
            if self.resumed:
                replace_damaged(self.files.state, self.start_step)
            else:
                self.files.make_way(engine.model.config)
        if self.resumed:
            for name, part in self.parts.items():
                part.load_state_dict(self.saved[name])
            states = self.saved["random"]
            if self.dist.rank < len(states):
                set_random_states(states[self.dist.rank], self.dist.device)
            self.saved = {}  # frees its memory

    def after(self, step: int, stopping: bool) -> None:
        """Saves if it is time to, after `step` (counted from 0); the last save is waited for.

        A save that is due while the one before is still being written follows as soon as it can.
        """
        last = stopping or step + 1 == self.total_steps
        self.overdue |= last or is_due(step, self.args.save_interval, self.total_steps)
        if last:
            self.wait()
        if self.overdue and not self.dist.max(self.is_writing):
            self.save(step + 1)
            self.overdue = False
        if last:
            self.wait()

    @property
    def is_writing(self) -> bool:
        return self.writer is not None and self.writer.is_alive()

    def wait(self) -> None:
        """Waits until the save that is being written is written."""
        if self.writer is not None:
            self.writer.join()

    def save(self, step: int) -> None:
        """Copies the state after `step` steps to host memory, and begins to write it."""
        random = self.dist.gather(random_states(self.dist.device))
        state = {
            "step": step, "total_steps": self.total_steps, "global_batch": self.global_batch,
            "micro_batch_rows": self.micro_batch_rows, "world_size": self.dist.world_size,
            "arguments": {**as_saved(self.args), "dtype": self.engine.dtype}, "facts": self.facts,
            "random": random, **{name: part.state_dict() for name, part in self.parts.items()},
        }
        if self.dist.is_main:
            self.writer = threading.Thread(target=self.write, args=(to_host(state),))
            self.writer.start()

    def write(self, state: dict) -> None:
        """Runs in a thread: writes weights and state, or says why it could not.

        The state comes last: where it says that the run is finished, the weights are there.
        """
        try:
            self.files.check_space(self.engine.model, resumed=True)
            save_weights(self.files.weights, self.engine.model.config, state["engine"]["model"], {
                "stage": self.stage_name, "step": state["step"],
                "validation": state["log"]["validation"],
                "tokenizer_hash": self.tokenizer_hash, "command": sys.argv,
            })
            write_state(self.files.state, state)
            self.problem = ""
        except Exception as error:  # whatever a disk does, training goes on
            self.problem = f"not saved after step {state['step']}: {error}"
            say(f"{self.problem}\nthe last good save stays; the next save tries again", sys.stderr)

    @property
    def result(self) -> str:
        """What became of the last save, in a few words."""
        return self.problem or f"saved {self.files.weights}"

    def finish(self) -> None:
        """Call after the last step. Raises StateError if the last save failed."""
        self.wait()
        if self.problem:
            raise StateError(f"{self.problem}. Make room, then run the same command with "
                             "--from_resume 1: it goes on from the last good save.")
