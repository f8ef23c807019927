"""The files of one run in --out_dir: their names, who may write them, what an earlier run left.

    pretrain_512.pth  .json         the weights, float16, for use
    pretrain_512_resume.pth         everything the run needs to go on, float32
    pretrain_512_resume.prev.pth    the same, one save earlier
    pretrain_512_metrics.jsonl      the curve
"""

import json
import os
import shutil
from pathlib import Path

from model.LMConfig import LMConfig
from trainer.common.state_file import StateError, peek, previous_path


class RunFiles:
    """Paths of a run called `name`, e.g. `pretrain_512`."""

    def __init__(self, out_dir: Path, name: str):
        self.out_dir, self.name = out_dir, name
        self.weights = out_dir / f"{name}.pth"
        self.description = out_dir / f"{name}.json"
        self.state = out_dir / f"{name}_resume.pth"
        self.metrics = out_dir / f"{name}_metrics.jsonl"
        self.lock_file = None

    def lock(self) -> None:
        """Takes the name for this process until it ends, however it ends. Raises StateError."""
        try:
            import fcntl
        except ImportError:  # Windows: not guarded
            return
        self.lock_file = open(self.out_dir / f".{self.name}.lock", "a")
        try:
            # Not flock(): loader workers would inherit it, and outlive a killed run by seconds.
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(f"{self.out_dir}: another process is writing a run named {self.name}. "
                             "Wait for it, or give another --save_weight or --out_dir.") from None
        except OSError:  # a file system without locks
            pass

    def clean(self) -> None:
        """Deletes what a killed process had not finished writing."""
        for path in (self.weights, self.description, self.state, previous_path(self.state),
                     self.metrics):
            path.with_name(path.name + ".tmp").unlink(missing_ok=True)

    def flush_metrics(self) -> None:
        """Sees to it that what was logged is on the disk."""
        if self.metrics.exists():
            with open(self.metrics, "rb+") as file:
                os.fsync(file.fileno())

    def check_space(self, num_parameters: int, resumed: bool) -> None:
        """Raises StateError if the disk cannot hold what a run saves: weights twice (the old and
        the new), and the state three times (float32 weights and two moments; also the previous).
        """
        weights, state = 2 * num_parameters, 12 * num_parameters
        needed = weights + state if resumed else 2 * weights + 3 * state
        free = shutil.disk_usage(self.out_dir).free
        if free < needed:
            raise StateError(f"--out_dir {self.out_dir}: {free / 2**20:,.0f} MiB free, expected at "
                             f"least {needed / 2**20:,.0f} MiB for the weights and the states to "
                             "resume from. Free some, or give another --out_dir.")

    def make_way(self, config: LMConfig) -> None:
        """Before a new run: moves an unfinished run, or one of another shape, aside, and says so.

        Of a finished run of this shape the state goes now, the weights at the first save.
        """
        has_state = self.state.exists() or previous_path(self.state).exists()
        if (has_state and not self.is_finished()) or not self.same_shape(config):
            self.move_aside(weights_too=True)
            return
        self.move_aside(weights_too=False)
        for path in (self.state, previous_path(self.state)):
            path.unlink(missing_ok=True)
        if self.weights.exists():
            print(f"{self.weights} of a finished run will be replaced at the first save; "
                  "--save_weight chooses another name")

    def is_finished(self) -> bool:
        """True if the state here says that its run reached its last step."""
        state = peek(self.state)
        return state is not None and state["step"] >= state["total_steps"]

    def same_shape(self, config: LMConfig) -> bool:
        """False if there are weights here that are not known to be of this shape."""
        if not self.weights.exists():
            return True
        try:
            other = LMConfig.from_dict(json.loads(self.description.read_text("utf-8"))["config"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return {**other.to_dict(), "dropout": 0} == {**config.to_dict(), "dropout": 0}

    def move_aside(self, weights_too: bool) -> None:
        """Renames what is here to the first free `.old1`, `.old2`, ...; prints it in one line."""
        number = 1
        while any(self.out_dir.glob(f"{self.name}*.old{number}.*")):
            number += 1

        def aside(path: Path) -> Path:
            return path.with_suffix(f".old{number}{path.suffix}")

        targets = {self.metrics: aside(self.metrics)}
        if weights_too:  # the state last: until it is gone, it can still be resumed
            targets |= {self.weights: aside(self.weights),
                        self.description: aside(self.description),
                        previous_path(self.state): previous_path(aside(self.state)),
                        self.state: aside(self.state)}
        moved = [path for path in targets if path.exists()]
        for path in moved:
            os.replace(path, targets[path])
        if weights_too and moved:
            print("an earlier run of this name was not finished, or had another shape; moved aside "
                  f"in {self.out_dir}: "
                  + ", ".join(f"{path.name} -> {targets[path].name}" for path in moved))
