"""The memory guard in two processes: one runs out of memory, both take the step again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN
from resume_checks import data_flags

# 28 rows: two steps of 12 and one of 4, so 6, 6 and 2 rows for each process, in micro-batches of
# 2 rows (numbers 0-2, 3-5 and 6).
FLAGS = ("--batch_size", 2, "--accumulation_steps", 3, "--save_interval", 1,
         "--learning_rate", 1e-3)


class Launches:
    """Runs of two processes on this machine, all in one folder."""

    def __init__(self, folder: Path):
        self.folder, self.flags = folder, data_flags(folder)
        self.server = subprocess.Popen([sys.executable, ROOT / "tests/out_of_memory.py"], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, name: str, faults: dict[int, dict[int, str]], *flags):
        """faults: for each rank what fails. Returns (exit statuses, output of both)."""
        command = [ROOT / "trainer/train_pretrain.py", *TINY_RUN, *self.flags, *FLAGS, "--out_dir",
                   self.folder / "out", "--cache_dir", self.folder / "cache", "--save_weight", name,
                   *flags]
        launch = {"folder": str(self.folder), "name": f"{name}{len(flags)}", "faults": faults,
                  "command": [str(part) for part in command]}
        self.server.stdin.write(json.dumps(launch) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        told = [path.read_text() for path in sorted(self.folder.glob(f"{launch['name']}.?.*"))]
        print(codes, *told, sep="\n")
        return codes, "".join(told)

    def curve(self, name: str) -> list[dict]:
        lines = (self.folder / "out" / f"{name}_32_metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{key: row[key] for key in ("step", "loss", "grad_norm", "tokens", "val_loss")
                 if key in row} for row in rows]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    launches = Launches(tmp_path_factory.mktemp("launches"))
    assert launches.run("plain", {})[0] == [0, 0]
    yield launches
    launches.server.stdin.close()
    launches.server.wait()


EVERYWHERE = [{rank: {number: where}} for number in range(7) for where in ("forward", "backward")
              for rank in range(2)]
TOGETHER = [{0: {4: "backward"}, 1: {3: "forward"}}, {0: {5: "forward"}, 1: {5: "forward"}},
            {0: {5: "forward"}, 1: {5: "backward"}}, {0: {3: "backward"}, 1: {5: "backward"}},
            {0: {6: "backward"}, 1: {6: "backward"}}]


@pytest.mark.parametrize("faults", EVERYWHERE + TOGETHER, ids=str)
def test_all_take_the_step_again(launches, faults, request):
    """P1: whichever process runs out of memory, and wherever (2, 5 and 6: the last micro-batch, in
    whose backward half of the gradients are on their way by then), nobody hangs, and the losses
    and gradient norms are those of an undisturbed run.
    """
    name = f"case{request.node.callspec.indices['faults']}"
    codes, told = launches.run(name, faults)
    assert codes == [0, 0]
    lines = [line for line in told.splitlines() if line.startswith("memory:")]
    assert len(lines) == 1 and "at 2 rows" in lines[0]
    assert ("another process" in lines[0]) == (0 not in faults)
    for row, other in zip(launches.curve(name), launches.curve("plain"), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


def test_one_row_does_not_fit(launches):
    """Memory runs out in a step, and again when it is taken with one row: both processes end with
    the flags that help.
    """
    codes, told = launches.run("one_row", {0: {5: "backward"}, 1: {8: "backward"}})
    assert codes == [2, 2] and "one row is the smallest" in told and "--max_seq_len" in told


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_a_model_cannot_go_back(launches, rank):
    """With --shard full both processes end, one of them with the flags that help, and the run goes
    on from its last save.
    """
    name = f"parts{rank}"
    codes, told = launches.run(name, {rank: {5: "backward"}}, "--shard", "full")
    assert codes[rank] == 2 and codes[1 - rank] == 1
    assert "out of memory, and with --shard full" in told and "--batch_size" in told
    assert len(launches.curve(name)) == 1
    assert launches.run(name, {}, "--from_resume", 1, "--shard", "full")[0] == [0, 0]
    assert [row["step"] for row in launches.curve(name)] == [1, 2, 3, 3]  # and a validation
