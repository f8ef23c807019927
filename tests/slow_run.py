"""A stage script whose steps, validations and saves are slow, and which notes when each begins.

    python slow_run.py SCRIPT FLAGS...      runs it
    python slow_run.py                      forks a run for each job on standard input (JSON lines);
                                            answers with its process id, then with its exit status

Events go, one a line, to the file `events` in the current folder: start-up, workers, birth (of a
worker), step, validation, save. The environment may lengthen one: SLOW="step 3 4.0" makes the third
step take 4 seconds. Forks save the import of torch, which takes longer than all the rest.
"""

import json
import os
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAUSE = 0.15  # seconds that each event lasts longer


def slow_down():
    """Patches the program, in this process."""
    from torch.utils.data import DataLoader

    import dataset.loader
    from model.transformer import MiniMindLM
    from trainer.common.checkpoint import Checkpoint
    from trainer.common.stop import Stop

    name, number, seconds = os.environ.get("SLOW", "none 0 0").split()
    seen = Counter()

    def event(kind):
        seen[kind] += 1
        with open("events", "a") as file:
            file.write(kind + "\n")
        longer = kind == name and seen[kind] == int(number)
        deadline = time.monotonic() + (float(seconds) if longer else PAUSE)
        while time.monotonic() < deadline:
            time.sleep(0.01)

    def before(owner, method, kind_of):
        original = getattr(owner, method)

        def patched(self, *arguments, **keywords):
            event(kind_of(self))
            return original(self, *arguments, **keywords)

        setattr(owner, method, patched)

    before(MiniMindLM, "forward", lambda model: "step" if model.training else "validation")
    before(Checkpoint, "write", lambda checkpoint: "save")
    before(Stop, "begin", lambda stop: "start-up")
    before(DataLoader, "__iter__", lambda loader: "workers")
    before(dataset.loader, "ignore_stop_signals", lambda worker: "birth")  # of a worker


def run(script, flags):
    """Becomes the script; returns its exit status."""
    slow_down()
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 1


def run_job(job):
    """In a fork: a session of its own, as a terminal or a launcher would give it."""
    os.setsid()
    os.chdir(job["folder"])
    os.environ["SLOW"] = job["slow"]
    if job["nohup"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A terminal that a session's leader opens to read, too, is from then on the session's own.
    is_terminal = job["output"].startswith("/dev/")
    output = os.open(job["output"], os.O_RDWR if is_terminal
                     else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    status = run(job["script"], job["flags"])
    sys.stdout.flush()
    return status


def serve():
    import torch._dynamo
    import torch.utils.data  # noqa: F401

    import trainer.common.checkpoint  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run_job(json.loads(line))
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    serve()
