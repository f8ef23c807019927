"""Saving a run, and going on with it.

A save holds the loop only while the state is copied to host memory; it is written by a thread. A
save that fails (a full disk, say) leaves the old files whole, and the next one tries again.
"""

import argparse
import sys
import threading
from dataclasses import replace

import torch

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
from trainer.common.resume import as_saved, comparable, compare_arguments, compare_data
from trainer.common.run_files import RunFiles
from trainer.common.schedule import is_due
from trainer.common.state_file import (
    StateError,
    random_states,
    read_newest_state,
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


ROWS_IF_AUTO = 8  # --batch_size 0: a step has as many rows as with 8, however they are cut


class Checkpoint:
    """The saves of one run, and the state it goes on from, if --from_resume 1 found one.

    start_step: optimizer steps already done, 0 in a new run; global_batch: rows in a step over all
    processes, in a new run what the flags say.
    Raises StateError if the state is damaged or of another run.
    """

    def __init__(self, args: argparse.Namespace, dist: Dist, stage_name: str, tokenizer_hash: str):
        self.args, self.dist = args, dist
        self.stage_name, self.tokenizer_hash = stage_name, tokenizer_hash
        self.files = RunFiles(args.out_dir, f"{args.save_weight}_{args.dim}")
        if dist.restarted:
            args.from_resume = 1
        self.saved = dist.from_main(self.open)
        self.resumed = self.saved is not None  # this launch goes on with an earlier one's run
        per_process = (args.batch_size or ROWS_IF_AUTO) * args.accumulation_steps
        self.global_batch = per_process * dist.world_size
        self.start_step = 0
        if self.resumed:
            self.continue_from(self.saved)
        elif args.from_resume:
            print(f"--from_resume 1: there is no {self.files.state}; beginning anew")
        self.parts: dict[str, object] = {}
        self.writer: threading.Thread | None = None
        self.problem = ""  # why the last save failed
        self.overdue = False

    def open(self) -> dict | None:
        """On the main process: takes the name, and reads the state that is to be resumed."""
        self.files.lock()
        self.files.clean()
        return read_newest_state(self.files.state) if self.args.from_resume else None

    @property
    def rows_per_process(self) -> int:
        """The most rows that a step gives to one process."""
        return -(-self.global_batch // self.dist.world_size)

    def continue_from(self, saved: dict) -> None:
        """Takes over what the run was; prints or refuses what is different now."""
        compare_arguments(self.args, saved["arguments"], self.files.state)
        wanted, self.global_batch = self.global_batch, saved["global_batch"]
        if self.dist.world_size != saved["world_size"]:
            print(f"processes: {saved['world_size']} -> {self.dist.world_size}")
        if wanted != self.global_batch:
            print(f"a step keeps its {self.global_batch} rows, though the flags say {wanted}")
        self.start_step = saved["step"]
        print(f"resuming after step {self.start_step} from {self.files.state}")

    def compare_data(self, train_set, val_set) -> None:
        """Raises StateError if the state is of a run on other data or another tokenizer.

        The sets are `PackedRows` (`dataset/loader.py`); val_set may be None.
        """
        self.facts = {"the training data": train_set.fingerprint,
                      "the validation data": val_set.fingerprint if val_set else "none",
                      "the tokenizer": self.tokenizer_hash}
        self.dist.agree("data", str(self.facts))
        self.dist.agree("flags", str(comparable(self.args)))
        if self.resumed:
            compare_data(self.facts, self.saved["facts"], self.files.state)

    def is_finished(self, total_steps: int) -> bool:
        """True, and says so, if the resumed run has no step left, nor a validation to make up for.
        """
        if not self.resumed:
            return False
        planned = self.saved["total_steps"]
        if self.args.start_layers and total_steps != planned:
            raise StateError(f"{self.files.state} is of a run of {planned} steps, now "
                             f"{total_steps}: with --start_layers a run keeps its length, or "
                             "blocks would drop out again. Another run may begin from its weights, "
                             "with --from_weight.")
        if self.start_step < total_steps:
            return False
        if self.saved["log"]["validation_was_cut_short"]:
            return False
        print(f"the run is finished: {self.start_step} of {total_steps} steps are done, and the "
              f"weights are in {self.files.weights}."
              + ("" if self.args.start_layers else " More --epochs (or --max_steps) continue it."))
        return True

    def begin(self, total_steps: int, engine: Engine, **others) -> None:
        """Call once all is made: puts the saved state into place, or makes way for a new run.

        The parts (all have `state_dict` and `load_state_dict`) are what later saves consist of.
        """
        self.total_steps, self.engine = total_steps, engine
        self.parts = others
        self.dist.from_main(self.make_room)
        if self.resumed:
            for name, part in {"engine": engine, **others}.items():
                part.load_state_dict(self.saved[name])
            random = self.saved["random"][self.dist.rank :][:1]
            self.saved = None  # frees its memory
        if self.resumed and random:
            set_random_states(random[0], self.dist.device)
        else:  # processes drop different units
            torch.manual_seed(self.args.seed + self.start_step + self.dist.rank)

    def make_room(self) -> None:
        """On the main process: checks the disk, and moves an earlier run out of a new one's way."""
        self.files.check_space(self.engine.num_parameters, self.resumed)
        if not self.resumed:
            self.files.make_way(self.engine.model.config)

    def after(self, step: int, stopping: bool) -> None:
        """Saves if it is time to, after `step` (counted from 0); the last save is waited for.

        A save that is due while the one before is still being written follows as soon as it can.
        """
        last = stopping or step + 1 == self.total_steps
        self.overdue |= last or is_due(step, self.args.save_interval, self.total_steps)
        if last:
            self.wait()
        if self.overdue and self.dist.max(self.is_writing) == [False]:
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
        state = to_host({
            "step": step, "total_steps": self.total_steps, "global_batch": self.global_batch,
            "world_size": self.dist.world_size,
            "arguments": {**as_saved(self.args), "dtype": self.engine.dtype}, "facts": self.facts,
            "random": random, "depth": self.engine.model.depth,
            **{name: part.state_dict() for name, part in self.parts.items()},
        })
        state["engine"] = self.engine.state_dict()  # copies on the host already
        if self.dist.is_main:
            self.writer = threading.Thread(target=self.write, args=(state,))
            try:
                self.writer.start()
            except RuntimeError:  # no memory for a thread: written here and now
                self.writer = None
                self.write(state)

    def write(self, state: dict) -> None:
        """Runs in a thread: writes state and weights, or says why it could not."""
        try:
            self.files.check_space(self.engine.num_parameters, resumed=True)
            # The weights first: were they the second, a run killed between the two last writes
            # would be finished with older weights, and resuming it would write none.
            problem = self.write_weights(state)
            self.files.flush_metrics()
            write_state(self.files.state, state)
            if problem:
                raise problem
            self.problem = ""
        except Exception as error:  # whatever a disk does, training goes on
            self.problem = f"not saved after step {state['step']}: {error}"
            say(f"{self.problem}\nthe last good save stays; the next save tries again", sys.stderr)

    def write_weights(self, state: dict) -> WeightsError | None:
        """Writes the float16 weights; returns what is wrong with them if that cannot be.

        Of a model that is still growing, the blocks that have been trained.
        """
        config = replace(self.engine.model.config, n_layers=state["depth"])
        unused = tuple(f"model.layers.{block}." for block in
                       range(config.n_layers, self.engine.model.config.n_layers))
        tensors = {name: tensor for name, tensor in state["engine"]["model"].items()
                   if not name.startswith(unused)}
        try:
            save_weights(self.files.weights, config, tensors, {
                "stage": self.stage_name, "step": state["step"],
                "validation": state["log"]["validation"],
                "tokenizer_hash": self.tokenizer_hash, "command": sys.argv,
            })
        except WeightsError as error:  # beyond float16, say: the float32 state is good all the same
            return error

    @property
    def result(self) -> str:
        """What became of the last save, in a few words."""
        return self.problem or f"saved {self.files.weights}"

    def finish(self) -> None:
        """Call after the last step. Raises StateError if the last save failed."""
        if self.start_step >= self.total_steps:  # only a validation was made up for
            self.save(self.start_step)
        self.wait()
        self.dist.from_main(self.raise_problem)

    def raise_problem(self) -> None:
        if self.problem:
            raise StateError(f"{self.problem}. Make room, then run the same command with "
                             "--from_resume 1: it goes on from the last good save.")
