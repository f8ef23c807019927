"""The memory guard in two processes: one runs out of memory, both take the step again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN
from resume_checks import data_flags

# 28 rows: two steps of 12 and one of 4, so 6, 6 and 2 rows for each process, in micro-batches of
# 2 rows (numbers 0-2, 3-5 and 6).
FLAGS = ("--batch_size", 2, "--accumulation_steps", 3, "--save_interval", 1,
         "--learning_rate", 1e-3)
SECONDS = 60


class Launch:
    """torchrun with two processes on this machine, all in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flags = data_flags(folder)

    def run(self, name: str, faults: dict[int, dict[int, str]], *flags):
        """faults: for each rank what `out_of_memory.py` takes. Returns the finished process."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                   "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
                   ROOT / "tests/out_of_memory.py", ROOT / "trainer/train_pretrain.py",
                   *TINY_RUN, *self.flags, *FLAGS, "--out_dir", self.folder / "out",
                   "--cache_dir", self.folder / "cache", "--save_weight", name, *flags]
        environment = {**os.environ, "FAULTS": json.dumps(faults), "OMP_NUM_THREADS": "1"}
        begun = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env=environment,
                                   start_new_session=True)
        try:
            output = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{name} hangs: {process.communicate()}")
        print(f"{time.monotonic() - begun:.1f} s", *output, sep="\n")
        return subprocess.CompletedProcess(command, process.returncode, *output)

    def curve(self, name: str) -> list[dict]:
        lines = (self.folder / "out" / f"{name}_32_metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{key: row[key] for key in ("step", "loss", "grad_norm", "tokens", "val_loss")
                 if key in row} for row in rows]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    launch = Launch(tmp_path_factory.mktemp("launch"))
    assert launch.run("plain", {}).returncode == 0
    return launch


@pytest.mark.parametrize("faults", [
    {1: {0: "forward"}}, {0: {2: "forward"}}, {1: {2: "forward"}}, {1: {3: "backward"}},
    {0: {4: "forward"}}, {1: {4: "backward"}}, {1: {5: "forward"}}, {0: {6: "forward"}},
    {0: {4: "backward"}, 1: {3: "forward"}}, {0: {5: "forward"}, 1: {5: "forward"}},
], ids=str)
def test_all_take_the_step_again(launch, faults, request):
    """P1: whichever process runs out of memory, and where (in the last micro-batch: in its forward)
    nobody hangs, and the losses and gradient norms are those of an undisturbed run.
    """
    name = f"case{request.node.callspec.indices['faults']}"
    ended = launch.run(name, faults)
    assert ended.returncode == 0
    lines = [line for line in ended.stdout.splitlines() if line.startswith("memory:")]
    assert len(lines) == 1 and "at 2 rows" in lines[0]
    assert ("another process" in lines[0]) == (0 not in faults)
    for row, other in zip(launch.curve(name), launch.curve("plain"), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("faults", [{1: {5: "backward"}}, {0: {5: "backward"}}], ids=str)
def test_memory_runs_out_while_gradients_travel(launch, faults, request):
    """Then the step cannot be repeated: all processes end, and say what helps; the run resumes."""
    name = f"late{request.node.callspec.indices['faults']}"
    ended = launch.run(name, faults)
    assert ended.returncode != 0
    assert "ran out of memory while gradients" in ended.stderr and "--batch_size" in ended.stderr
    assert len(launch.curve(name)) == 1
    assert launch.run(name, {}, "--from_resume", 1).returncode == 0
    for row, other in zip(launch.curve(name), launch.curve("plain"), strict=True):
        assert row == pytest.approx(other, rel=1e-5)
