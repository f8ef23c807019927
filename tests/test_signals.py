"""Runs that are asked to end: by a signal, a closed terminal, a launcher, a time limit.

Each is a process of its own in a session of its own, with two loader workers; `slow_run.py` makes
its steps, validations and saves slow enough to be hit, and notes when each begins.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, texts

from trainer.common.state_file import read_newest_state

SLOW_RUN = Path(__file__).with_name("slow_run.py")
SCRIPT = ROOT / "trainer" / "train_pretrain.py"
STEPS = 12
FLAGS = ("--dim", 32, "--n_layers", 1, "--n_heads", 4, "--max_seq_len", 48, "--device", "cpu",
         "--dtype", "float32", "--num_workers", 2, "--warmup_steps", 0, "--batch_size", 2,
         "--accumulation_steps", 1, "--log_interval", 1, "--data_path", "data.jsonl",
         "--val_data_path", "val.jsonl", "--cache_dir", "cache", "--out_dir", "results",
         "--save_weight", "run", "--epochs", 9, "--max_steps", STEPS, "--save_interval", 3,
         "--eval_interval", 0)
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Run:
    """One run in a folder, wherever its process comes from."""

    def __init__(self, folder, pid=0, wait=None):
        self.folder, self.pid, self.wait = folder, pid, wait

    def events(self, kind):
        path = self.folder / "events"
        return path.read_text().split().count(kind) if path.exists() else 0

    def reaches(self, kind, number):
        wait_for(lambda: self.events(kind) >= number, f"never reached {kind} {number}: {self.log}")

    @property
    def log(self):
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def saved_step(self):
        state = read_newest_state(self.folder / "results" / "run_32_resume.pth")
        return state and state["step"]

    def send(self, number, to_group=False):
        (os.killpg if to_group else os.kill)(self.pid, number)

    def processes(self):
        """Living processes of the run's session."""
        living = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:  # gone meanwhile
                continue
            if int(session) == self.pid and state != "Z":
                living.append(path.parent.name)
        return living

    def ended_with(self, status, within, lingering=1.0):
        """It ends with this status within so many seconds, and leaves no worker behind."""
        begun = time.monotonic()
        assert self.wait() == status, self.log
        assert time.monotonic() - begun < within, self.log
        if Path("/proc/self/stat").exists():
            wait_for(lambda: not self.processes(), "workers live on", lingering)

    def saved_all(self):
        """The state is of exactly the steps that were begun, whole, and the log says how to go on.
        """
        assert self.saved_step == self.events("step")
        assert not list(self.folder.glob("results/*.tmp"))
        assert self.events("step") < STEPS, "the run was to be stopped before its end"


@pytest.fixture(scope="module")
def server():
    """A process that has imported torch, and forks a run for each job."""
    command = [sys.executable, str(SLOW_RUN)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def folder(tmp_path):
    for name, count in (("data", 60), ("val", 5), ("much", 200)):
        lines = (json.dumps(record) + "\n" for record in texts(count, seed=len(name)))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def start(server, folder):
    """start(*flags) forks a run in the test's folder."""
    started = []

    def start(*flags, slow="none 0 0", output="log", nohup=False):
        (folder / "events").unlink(missing_ok=True)
        job = {"folder": str(folder), "slow": slow, "output": output, "nohup": nohup,
               "script": str(SCRIPT), "flags": [*map(str, (*FLAGS, *flags))]}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        statuses = []

        def wait():
            statuses.extend([] if statuses else [int(server.stdout.readline())])
            return statuses[0]

        started.append(wait)
        return Run(folder, pid, wait)

    yield start
    for wait in started:  # or the next job would be answered by this one's status
        wait()


@pytest.mark.parametrize("number, to_group", [(INT, True), (TERM, False), (HUP, False)])
def test_before_the_first_step(start, number, to_group):
    """Nothing could be saved yet: it ends where it stands, and leaves nothing half-made."""
    run = start(slow="start-up 1 9")
    run.reaches("start-up", 1)
    run.send(number, to_group)
    run.ended_with(128 + number, within=2)
    assert f"stopped by {number.name} before the first step" in run.log
    assert run.saved_step is None and not list(run.folder.glob("results/run_32*.pth*"))


@pytest.mark.parametrize("event, count, number, to_group", [
    ("workers", 1, INT, True), ("birth", 1, TERM, True), ("step", 2, INT, False),
    ("step", 5, TERM, True), ("step", 3, HUP, True), ("save", 1, TERM, False),
    ("save", 2, INT, True)])
def test_a_signal_ends_the_step_and_saves(start, event, count, number, to_group):
    """The step is finished and saved, the line that resumes printed; 128 + signal says why."""
    run = start(slow=f"{event} {count} 0.6")
    run.reaches(event, count)
    begun = run.events("step")
    run.send(number, to_group)
    run.ended_with(128 + number, within=4)
    run.saved_all()
    # In a save, a step may have begun between the look and the signal.
    last = {"workers": [1], "birth": [1], "step": [count], "save": [begun, begun + 1]}
    assert run.events("step") in last[event]
    assert f"{number.name}: saving after this step; once more stops at once" in run.log
    assert re.search(rf"stopped by {number.name}; to go on: python \S+ .*--from_resume 1\n",
                     run.log)


@pytest.mark.parametrize("number, to_group", [(INT, True), (TERM, False)])
def test_a_validation_does_not_hold_up_the_end(start, number, to_group):
    """A cut validation reports nothing; the resumed run makes up for it, once."""
    much = ("--val_data_path", "much.jsonl")  # some sixty batches of 0.15 s
    run = start(*much, "--eval_interval", 2)
    run.reaches("validation", 3)
    run.send(number, to_group)
    run.ended_with(128 + number, within=2)
    run.saved_all()
    assert run.saved_step == 2 and "val_loss" not in run.log
    resumed = start(*much, "--max_steps", 3, "--from_resume", 1, "--batch_size", 64)
    resumed.ended_with(0, within=30)
    lines = (run.folder / "results" / "run_32_metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    assert [(row["step"], "val_loss" in row) for row in rows] == [
        (1, False), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize("signals", [[INT, INT], [INT, TERM, INT]])
def test_signals_within_two_seconds_are_one(start, signals):
    """A launcher repeats what the terminal has sent already."""
    run = start(slow="step 2 1.8")
    run.reaches("step", 2)
    for number in signals:
        run.send(number, to_group=True)
        time.sleep(0.5)
    run.ended_with(128 + signals[0], within=4)
    run.saved_all()
    assert run.saved_step == 2 and "again" not in run.log


@pytest.mark.parametrize("event, count, first, second, saved", [
    ("step", 5, INT, INT, 3), ("save", 2, TERM, HUP, 3), ("validation", 1, HUP, TERM, None)])
def test_a_later_one_stops_at_once(start, event, count, first, second, saved):
    """After more than two seconds patience is over; what was saved before stays whole."""
    eval_interval = 2 if event == "validation" else 0
    run = start("--eval_interval", eval_interval, slow=f"{event} {count} 20")
    run.reaches(event, count)
    run.send(first, to_group=True)
    time.sleep(2.2)
    run.send(second, to_group=True)
    run.ended_with(128 + second, within=1, lingering=8)
    assert f"{second.name} again: stopped at once" in run.log
    assert run.saved_step == saved


def test_the_reader_of_a_pipe_is_gone(start, folder):
    """`train 2>&1 | tee log`: Ctrl-C ends tee as well, and the run still saves."""
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    run = start(output="pipe")
    run.reaches("step", 2)
    os.close(reader)
    run.send(INT, to_group=True)
    run.ended_with(130, within=4)
    run.saved_all()


def test_the_terminal_is_closed(start, folder):
    """The kernel sends SIGHUP, and whatever is printed from then on fails."""
    master, slave = pty.openpty()
    run = start(output=os.ttyname(slave))
    run.reaches("step", 2)
    os.close(slave)
    os.close(master)
    run.ended_with(129, within=4)
    run.saved_all()


def test_nohup_lets_the_run_go_on(start):
    """A signal that was ignored before the start stays ignored."""
    run = start("--max_steps", 4, nohup=True)
    run.reaches("step", 2)
    run.send(HUP, to_group=True)
    run.ended_with(0, within=30)
    assert run.saved_step == 4 and "to go on" not in run.log


def test_a_time_limit_is_a_good_end(start):
    """--max_minutes: saved, with the line that resumes, and exit status 0."""
    run = start("--max_minutes", 1.2 / 60)
    run.ended_with(0, within=10)
    run.saved_all()
    assert "stopped by --max_minutes; to go on: python " in run.log
    assert 1 <= run.saved_step


@pytest.mark.slow
@pytest.mark.parametrize("launcher, number, to_group", [
    ([], INT, True),
    (["-m", "torch.distributed.run", "--nproc_per_node=1"], INT, True),
    (["-m", "torch.distributed.run", "--nproc_per_node=1"], TERM, False)],
    ids=["python", "torchrun", "torchrun-alone"])
def test_the_printed_line_resumes(folder, launcher, number, to_group):
    """Under `python` and torchrun, which passes signals on: the printed line, run as it is."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLOW": "none 0 0"}
    command = [sys.executable, *launcher, str(SLOW_RUN), str(SCRIPT), *map(str, FLAGS)]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment,
                                   start_new_session=True)
    run = Run(folder, process.pid, lambda: process.wait(60))
    run.reaches("step", 2)
    run.send(number, to_group)
    if launcher:
        assert run.wait() != 0  # torchrun's own status; its children's is not to be had
    else:
        run.ended_with(128 + number, within=4)
    assert run.processes() == []
    run.saved_all()
    step = run.saved_step
    line = re.search(r"to go on: (.*)", run.log)[1]
    assert line.startswith("torchrun --nproc_per_node 1 " if launcher else "python ")
    if to_group:
        resumed = subprocess.run(line, shell=True, cwd=folder, env=environment, timeout=60,
                                 capture_output=True, text=True)
        assert resumed.returncode == 0, resumed.stderr
        assert f"resuming after step {step} " in resumed.stdout
        assert run.saved_step == STEPS
