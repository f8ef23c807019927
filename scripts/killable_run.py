"""A stage script in a forked process that tells what it does, and is killed where told.

For `scripts/stress_resume.py`. A fork has imported torch already, so that hundreds of starts do not
take hundreds of imports. The program has no hooks for this: it is observed, and its saves are
slowed down, from outside. Whoever imports this must not have started threads (it sets
OMP_NUM_THREADS=1, and so is to be imported before torch), nor run a backward pass.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import io
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # optimizers need it: imported once here, not by every fork

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.files import ROOT
from trainer.common.checkpoint import Checkpoint
from trainer.common.finite import FiniteCheck
from trainer.common.stop import Stop

SCRIPT = ROOT / "trainer" / "train_pretrain.py"
PAUSE = 0.02  # seconds added at each stage of a save
SLOW_SAVE = 0.3  # seconds that a save then takes, about
KILLED = -signal.SIGKILL


class Aim(NamedTuple):
    """When to kill: seconds after the start or, if save_of > 0, after a save began that is of so
    many steps or more.
    """

    save_of: int
    seconds: float


class Launch(NamedTuple):
    """What one process did: its events, in order, and its exit status.

    Events: ("begin", what lay in the folder), then ("step" | "save" | "saved" | "failed", number of
    steps done): a step was finished, a save of that step was begun, ended, could not be written.
    """

    events: list[tuple[str, str]]
    status: int

    def steps(self, kind: str) -> list[int]:
        return [int(value) for name, value in self.events if name == kind]


def report_to(pipe: int) -> None:
    """Makes the program, in this process, write its events to a pipe."""
    begin, note, write = Stop.begin, FiniteCheck.note, Checkpoint.write

    def tell(kind, value):
        os.write(pipe, f"{kind} {value}\n".encode())

    def told_begin(stop):
        tell("begin", "|".join(os.listdir(".")))
        begin(stop)

    def told_note(check, step, outcome):
        tell("step", step + 1)
        note(check, step, outcome)

    def told_write(checkpoint, state):
        tell("save", state["step"])
        write(checkpoint, state)
        tell("failed" if checkpoint.problem else "saved", state["step"])

    Stop.begin, FiniteCheck.note, Checkpoint.write = told_begin, told_note, told_write


def make_saves_slow() -> None:
    """Stretches every stage of a save, so that a kill can meet each: a file half-written, written
    but not on the disk, on the disk but not renamed, the old one linked, the new one renamed.
    """
    save = torch.save

    def slow_save(value, file):
        buffer = io.BytesIO()
        save(value, buffer)
        content = buffer.getbuffer()
        quarter = len(content) // 4 + 1
        for start in range(0, len(content), quarter):
            file.write(content[start : start + quarter])
            file.flush()
            time.sleep(PAUSE / 2)

    def slowed(call):
        def slow_call(*arguments):
            time.sleep(PAUSE)
            return call(*arguments)

        return slow_call

    torch.save, os.fsync, os.replace = slow_save, slowed(os.fsync), slowed(os.replace)


def become_the_run(flags: Iterable, pipe: int, log: Path, slow: bool) -> int:
    """Runs the stage script as `python train_pretrain.py ...` would; returns its exit status."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    report_to(pipe)
    if slow:
        make_saves_slow()
    sys.argv = [str(SCRIPT), *map(str, flags)]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
    return 1


def launch(folder: Path, flags: Iterable, aim: Aim | None) -> Launch:
    """Starts the run in a folder and kills it where the aim says, if it has not ended before.

    Without an aim its saves are not slow, and it runs to its end. What it prints is in FOLDER.log.
    """
    folder.mkdir(exist_ok=True)
    receiver, sender = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        status = become_the_run(flags, sender, folder.with_suffix(".log"), slow=aim is not None)
        sys.stdout.flush()
        os._exit(status)
    os.close(sender)
    never = float("inf")
    kill_at = time.monotonic() + aim.seconds if aim and not aim.save_of else never
    received, ended, status = b"", 0, 0

    def launched():
        lines = received.decode().splitlines()
        return Launch([tuple(line.split(" ", 1)) for line in lines],
                      os.waitstatus_to_exitcode(status))

    while not ended:
        wait = min(max(kill_at - time.monotonic(), 0), 0.05)
        if select.select([receiver], [], [], wait)[0]:
            received += os.read(receiver, 1 << 16)
            if aim and kill_at == never and max(launched().steps("save"), default=0) >= aim.save_of:
                kill_at = time.monotonic() + aim.seconds
        if time.monotonic() >= kill_at:
            os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0)
        else:
            ended, status = os.waitpid(pid, os.WNOHANG)
    # Its loader workers, if any, live on for a while with the pipe open: no waiting for its end.
    while select.select([receiver], [], [], 0)[0] and (more := os.read(receiver, 1 << 16)):
        received += more
    os.close(receiver)
    return launched()
