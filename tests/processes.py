"""Several processes of a stage script, for the tests, forked from one that has loaded torch.

    python tests/processes.py LAUNCHES.json

A launcher that starts N interpreters spends seconds on each `import torch`; here a launch costs
little more than its steps. It sets what torchrun sets (RANK, WORLD_SIZE, MASTER_PORT ...), and the
processes meet over gloo as they do under torchrun, which other tests use itself. The hooks of
`process_hooks.py` look into a process, or break it, without a line of the program being changed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from process_hooks import HOOKS  # noqa: E402

# --- What tests call


class Launch:
    """What became of a launch: exit statuses, output by rank, the log, what `watch` saw."""

    def __init__(self, folder: Path, out: Path):
        self.folder, self.out = folder, out
        result = json.loads((folder / "result.json").read_text())
        # seconds: from the first process's end to the last one's
        self.codes, self.seconds = result["codes"], result["seconds"]
        ranks = range(len(self.codes))
        self.stdout = [(folder / f"{rank}.out").read_text() for rank in ranks]
        self.stderr = "".join((folder / f"{rank}.err").read_text() for rank in ranks)
        self.told = self.stdout[0] + self.stderr if self.codes else ""

    @property
    def log(self) -> list[dict]:
        lines = (self.out / "run_32_metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.log]

    @property
    def validations(self) -> list[float]:
        lines = (self.out / "run_32_metrics.jsonl").read_text().splitlines()
        return [row["val_loss"] for row in map(json.loads, lines) if "val_loss" in row]

    @property
    def weights(self) -> dict:
        """float32, out of the state; the .pth holds them in float16."""
        return self.state["engine"]["model"]

    @property
    def state(self) -> dict:
        from trainer.common.state_file import read_state_file

        return read_state_file(self.out / "run_32_resume.pth")

    @property
    def seen(self) -> list[dict]:
        """By rank."""
        return [json.loads((self.folder / f"{rank}.json").read_text())
                for rank in range(len(self.codes))]


def launch_all(folder: Path, launches: dict[str, dict], timeout=600) -> dict[str, Launch]:
    """Runs launches one after the other: {name: keywords of `launch`}, each in a folder of its own
    but for those with the same `out`.
    """
    spec = {name: {**options, "flags": [str(flag) for flag in options.get("flags", ())]}
            for name, options in launches.items()}
    (folder / "launches.json").write_text(json.dumps(spec))
    command = [sys.executable, __file__, str(folder / "launches.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    return {name: Launch(folder / name, out_folder(folder, name, options))
            for name, options in spec.items()}


def out_folder(folder: Path, name: str, options: dict) -> Path:
    return folder / options.get("out", name) / "out"


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# --- In the launching process and its children


def launch(folder: Path, out: Path, *, processes=1, script="train_pretrain", flags=(), hooks=(),
           environment=None, timeout=150) -> None:
    """Forks the processes, waits for all, and writes what became of them."""
    folder.mkdir(parents=True)
    port, children = free_port(), {}
    for rank in range(processes):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes,
                     "MASTER_ADDR": "localhost", "MASTER_PORT": port, **(environment or {})}
        if (child := os.fork()) == 0:
            os.environ.update({key: str(value) for key, value in variables.items()})
            be_a_process(folder / str(rank), out, script, flags, hooks)
        children[child] = rank
    codes, ends, begun = {}, [], time.monotonic()
    while len(codes) < processes:
        for child in [child for child, rank in children.items() if rank not in codes]:
            if time.monotonic() - begun > timeout:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[children[child]] = os.waitstatus_to_exitcode(status)
                ends.append(time.monotonic())
        time.sleep(0.01)
    print(folder.name, f"{time.monotonic() - begun:.1f} s", flush=True)
    (folder / "result.json").write_text(json.dumps(
        {"codes": [codes[rank] for rank in range(processes)], "seconds": max(ends) - min(ends)}))


def be_a_process(path: Path, out: Path, script: str, flags: list[str], hooks: list[str]) -> None:
    """One process of a run, from its first line to its end."""
    code, report = 70, {}
    try:
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(path.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), descriptor)
        module = __import__(script) if script.startswith("test_") else \
            getattr(__import__(f"trainer.{script}"), script)
        for hook in hooks:
            HOOKS[hook](module, report)
        sys.argv = [f"{script}.py", "--out_dir", str(out), *flags]
        from dataset.jsonl import DataError
        from trainer.common.errors import run

        run(module.main, DataError)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        path.with_suffix(".json").write_text(json.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    path = Path(sys.argv[1])
    launches = json.loads(path.read_text())
    import trainer.train_full_sft  # before the forks
    import trainer.train_pretrain  # noqa: F401

    if any("--deepspeed" in options["flags"] for options in launches.values()):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401
    for name, options in launches.items():
        options["out"] = out_folder(path.parent, name, options)
        launch(path.parent / name, **options)


if __name__ == "__main__":
    main()
