"""Kills a training run with `kill -9` again and again, and checks that nothing is lost.

    python scripts/stress_resume.py --kills 200        # some minutes on one core

A small run (dropout on, two epochs, validation) is started, killed at a random instant, started
again with --from_resume 1, and so on to its end; then the next run begins. Half of the kills come
at any instant, from start-up on; the others while a save is being written, which is made slow here.
After some kills the newest state is damaged as well. What DESIGN promises (P4, P5) is checked:

    after every kill   a state can be read, checksums compared, and so can the weights; it is never
                       older than one before, and the steps to repeat are at most save_interval,
                       plus those run while the newest was being written (twice that if damaged)
    after every start  what the killed process left half-written is gone
    after every run    weights, moments, random state and every row of the log are those of a run
                       that was never interrupted, bit for bit

The last lines are the tally; exit status 1 if anything was not as promised. Not here: signals that
can be caught, full disks, forged files; those are in tests/.
"""

import argparse
import contextlib
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.killable_run import KILLED, SLOW_SAVE, Aim, Launch, launch  # isort: skip  (first)

import torch

from model.weights import WeightsError, read_state
from trainer.common.state_file import StateError, previous_path, read_newest_state, read_state_file

SAVE_INTERVAL = 40
FLAGS = ("--dim", 32, "--n_layers", 1, "--n_heads", 4, "--dropout", 0.1, "--max_seq_len", 32,
         "--device", "cpu", "--dtype", "float32", "--batch_size", 1, "--accumulation_steps", 2,
         "--epochs", 2, "--warmup_steps", 9, "--learning_rate", 3e-3, "--log_interval", 3,
         "--eval_interval", 70, "--save_interval", SAVE_INTERVAL, "--from_resume", 1,
         "--save_weight", "run", "--out_dir", ".")
COMPARED = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "skipped_steps",
            "val_loss", "val_ppl", "val_bpb")
# Parts of a state that differ from run to run: clocks, and generators that nothing seeds or uses.
NOT_COMPARED = ("arguments", "seconds", "window_seconds", "python", "numpy")
OURS = re.compile(r"run_32(\.pth|\.json|_resume(\.prev|\.damaged)?\.pth|_metrics(\.old\d+)?\.jsonl)"
                  r"|\.run_32\.lock")
START_UP = 0.4  # seconds, about
LONGEST = 1.6  # seconds from a start to a kill that is not aimed at a save
DAMAGED = 0.15  # share of the kills
WORDS = "the fox found a well and drank , then it slept under an old tree 我们 的 小 河".split()
TALLY = ("kills", "during start-up", "in the loop", "during a save",
         "with the state's file half-way", "newest state damaged too", "states valid",
         "fallbacks to .prev", "most steps repeated", "most allowed there",
         "most steps repeated if damaged", "runs completed", "runs completed, equal to the bit",
         "not as promised")


def allowed_repeats(launched: Launch, state_step: int) -> int:
    """The most steps that a kill of this launch may cost, the newest state being of that step."""
    reached, begun, ended = state_step, 0, {}
    for kind, value in launched.events:
        if kind == "step":
            reached = int(value)
        elif kind == "save":
            begun = int(value)
        elif kind == "saved":
            ended[int(value)] = reached
    # A save that is due while the one before is still being written begins within two steps of it.
    overdue = ended.get(state_step, state_step) - state_step + 2
    under_way = reached - begun if begun and begun not in ended else 0
    return max(SAVE_INTERVAL, overdue) + under_way


def differences(ours, reference, name: str) -> list[str]:
    """The names of what is not equal, bit for bit, in two nested values."""
    if isinstance(reference, dict) and isinstance(ours, dict) and ours.keys() == reference.keys():
        return [found for key in reference if key not in NOT_COMPARED
                for found in differences(ours[key], reference[key], f"{name}.{key}")]
    if isinstance(reference, list) and isinstance(ours, list) and len(ours) == len(reference):
        return [found for number, pair in enumerate(zip(ours, reference))
                for found in differences(*pair, f"{name}.{number}")]
    if isinstance(reference, torch.Tensor) and isinstance(ours, torch.Tensor):
        equal = ours.dtype == reference.dtype and torch.equal(ours, reference)
    else:
        equal = ours == reference
    return [] if equal else [name]


def result_of(folder: Path) -> dict:
    """All that a finished run leaves behind."""
    lines = (folder / "run_32_metrics.jsonl").read_text("utf-8").splitlines()
    rows = [{key: row[key] for key in COMPARED if key in row} for row in map(json.loads, lines)]
    return {"rows": rows, "weights": read_state(folder / "run_32.pth"),
            "state": read_state_file(folder / "run_32_resume.pth")}


class Stress:
    """Starts, kills, checks and counts."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.rng, self.tally = folder, random.Random(seed), Counter()
        corpus = folder / "corpus.jsonl"
        texts = (" ".join(self.rng.choices(WORDS, k=self.rng.randint(2, 10))) for _ in range(1100))
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        self.flags = [*FLAGS, "--data_path", corpus, "--cache_dir", folder / "cache"]
        self.run = self.reference = folder / "reference"
        done = launch(self.reference, [*self.flags, "--num_workers", 0], None)
        self.expect(done.status == 0, f"the uninterrupted run ended with {done.status}")
        self.total_steps = done.steps("step")[-1]

    def expect(self, fulfilled: bool, problem: str) -> None:
        """Counts and prints what is not as promised, with the run's own last words."""
        if not fulfilled:
            self.tally["not as promised"] += 1
            log = self.run.with_suffix(".log")
            tail = log.read_text("utf-8", "replace").splitlines()[-6:] if log.exists() else []
            print(f"NOT AS PROMISED ({self.run.name}): {problem}", *tail, sep="\n    ", flush=True)

    def most(self, name: str, number: int) -> None:
        self.tally[name] = max(self.tally[name], number)

    def kill_often(self, kills: int) -> None:
        """Run after run, until the kills are used up; the last run goes on to its end."""
        over = True
        while self.tally["kills"] < kills or not over:
            if over:
                self.run = self.folder / f"run{self.tally['kills']}"
                self.state_step, self.damaged = 0, False
            over = self.start(self.choose_aim() if self.tally["kills"] < kills else None)

    def choose_aim(self) -> Aim:
        if self.tally["kills"] % 2:  # into one of the next saves or the last, or just behind it
            save_of = self.state_step + self.rng.choice((1, 1 + SAVE_INTERVAL))
            if save_of + 2 * SAVE_INTERVAL > self.total_steps:
                save_of = self.total_steps
            return Aim(save_of, 1.1 * SLOW_SAVE * self.rng.random())
        return Aim(0, self.rng.choice((START_UP, LONGEST, LONGEST)) * self.rng.random())

    def start(self, aim: Aim | None) -> bool:
        """One launch of the run, killed or not, and all checks; True if the run is over."""
        launched = launch(self.run, [*self.flags, "--num_workers", self.rng.choice("0001")], aim)
        found = dict(launched.events).get("begin", ".run_32.lock").split("|")
        foreign = [name for name in found if not OURS.fullmatch(name)]
        self.expect(not foreign, f"still there after a start: {', '.join(foreign)}")
        self.expect(launched.status in (0, KILLED), f"a start ended with {launched.status}")
        self.expect(not launched.steps("failed"), "a save failed")
        if launched.status == KILLED:
            self.count_kill(launched)
            self.check_state(launched)
            return False
        self.check_result()
        return True

    def count_kill(self, launched: Launch) -> None:
        self.tally["kills"] += 1
        saving = len(launched.steps("save")) > len(launched.steps("saved"))
        where = "in the loop" if launched.events else "during start-up"
        self.tally["during a save" if saving else where] += 1
        half_way = (self.run / "run_32_resume.pth.tmp").exists()
        self.tally["with the state's file half-way"] += half_way

    def check_state(self, launched: Launch) -> None:
        """After a kill: is there a state, is it recent enough, can the weights be read?"""
        damage = self.rng.random() < DAMAGED and self.damage_newest()
        reached = max(launched.steps("step"), default=self.state_step)
        try:
            state, fell_back = self.read()
        except (StateError, WeightsError, ValueError) as error:
            return self.expect(False, f"after a kill at step {reached}: {error}")
        self.tally["states valid"] += 1
        self.tally["fallbacks to .prev"] += fell_back
        self.damaged = fell_back
        step, before = state["step"] if state else 0, max(launched.steps("saved"), default=0)
        repeated, allowed = reached - step, allowed_repeats(launched, step)
        if damage:
            self.most("most steps repeated if damaged", repeated)
            self.expect(repeated <= 2 * allowed, f"{repeated} steps back, allowed {2 * allowed}")
        else:
            self.most("most steps repeated", repeated)
            self.most("most allowed there", allowed)
            self.expect(repeated <= allowed, f"{repeated} steps back, allowed {allowed}")
            self.expect(step >= max(before, self.state_step), f"step {step} is older than {before}")
        self.state_step = step

    def damage_newest(self) -> bool:
        """Flips a bit of the newest state, as a disk might, if there is one before it."""
        newest = self.run / "run_32_resume.pth"
        previous = previous_path(newest)
        if self.damaged or not previous.exists() or newest.samefile(previous):
            return False
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        self.damaged = True
        self.tally["newest state damaged too"] += 1
        return True

    def read(self) -> tuple[dict | None, bool]:
        """The state to go on from, and whether it is the one before the newest; reads all files."""
        newest = self.run / "run_32_resume.pth"
        with contextlib.redirect_stdout(None):
            state = read_newest_state(newest)
        fell_back = False
        if state is not None:
            try:
                fell_back = read_state_file(newest)["step"] != state["step"]
            except StateError:
                fell_back = True
        self.expect(self.damaged or not fell_back, "a kill alone lost the newest state")
        if (self.run / "run_32.pth").exists():
            read_state(self.run / "run_32.pth")
            json.loads((self.run / "run_32.json").read_text("utf-8"))
        return state, fell_back

    def check_result(self) -> None:
        """Compares a run at its end with the one that was never interrupted."""
        try:
            wrong = differences(result_of(self.run), result_of(self.reference), "result")
        except (OSError, ValueError) as error:
            wrong = [str(error)]
        self.expect(not wrong, f"not equal to the uninterrupted run: {', '.join(wrong[:5])}")
        self.tally["runs completed"] += 1
        self.tally["runs completed, equal to the bit"] += not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default: 0)")
    args = parser.parse_args()
    begun, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="stress_resume."))
    stress = Stress(folder, args.seed)
    stress.kill_often(args.kills)
    print(f"{time.monotonic() - begun:.0f} s, saves every {SAVE_INTERVAL} steps")
    for name in TALLY:
        print(f"{name:<34}{stress.tally[name]:>6}")
    if stress.tally["not as promised"]:
        print(f"all files are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
