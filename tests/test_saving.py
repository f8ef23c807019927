"""Saves in a run: behind the loop, a disk that is full or read-only, names that are taken."""

import contextlib
import copy
import shutil
import subprocess
import threading
import time

import pytest
import torch
from conftest import TINY_RUN, texts
from resume_checks import AGAIN, FLAGS, Death, assert_same, join_writers, leaves

from model.weights import WeightsError
from trainer import train_pretrain
from trainer.common import checkpoint
from trainer.common.checkpoint import Checkpoint
from trainer.common.run_files import RunFiles
from trainer.common.state_file import (
    FORMAT,
    StateError,
    read_newest_state,
    read_state_file,
)


def small_disk(folder, size="12m") -> None:
    """Mounts a disk of this size, or skips the test."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")


@pytest.fixture
def disk(runs):
    """A disk of 12 MiB as the output folder; a run needs 9."""
    small_disk(runs.out)
    yield runs.out
    subprocess.run(["umount", "-l", runs.out], check=True)


def fill(folder) -> None:
    """Takes what is left of a disk."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


@pytest.mark.parametrize("noticed", ["before the write", "in the write"])
def test_a_full_disk_is_survived(runs, disk, data, monkeypatch, capsys, noticed):
    """P5: old files stay whole, training goes on with a warning, later saves try again; the log
    has all its rows once there is room.
    """
    flags = (*data, *FLAGS, "--epochs", 5, "--max_steps", 30, "--log_interval", 1)
    if noticed == "in the write":
        monkeypatch.setattr(RunFiles, "check_space", lambda *args, **options: None)

    def at_step(step):
        join_writers()
        if step == 5:
            fill(disk)
        if step == 25:
            assert read_newest_state(runs.path("_resume.pth"))["step"] == 4
            assert not list(disk.glob("*.tmp"))
            (disk / "filler").unlink()

    assert runs.start(*flags, at_step=at_step) == 0
    err = capsys.readouterr().err
    assert err.count("the last good save stays") == 5  # 8, 12, ..., 24
    assert err.count("trying again with the next row") == 1
    assert runs.state()["step"] == 30
    assert [row["step"] for row in runs.rows() if "loss" in row] == [*range(1, 31)]


def test_a_last_save_that_fails(runs, disk, data, capsys):
    """P5: a run whose last save failed ends with status 2 and advice that works."""
    flags = (*data, *FLAGS, "--max_steps", 7)
    assert runs.start(*flags, at_step=lambda step: step == 5 and fill(disk)) == 2
    captured = capsys.readouterr()
    assert "not saved after step 7: " in captured.out
    assert "Make room, then run the same command with --from_resume 1" in captured.err
    (disk / "filler").unlink()
    assert runs.start(*flags, *AGAIN) == 0 and "resuming after step 4" in capsys.readouterr().out
    assert [row["step"] for row in runs.rows()] == [3, 5, 6, 7, 7]


def test_too_small_a_disk_is_found_at_the_start(runs, data, capsys):
    """P6: room for two weights and three states is looked for before the first step."""
    small_disk(runs.out, size="8m")
    try:
        assert runs.start(*data, *FLAGS) == 2
        assert "8 MiB free, expected at least 9 MiB" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", "-l", runs.out], check=True)


def test_a_disk_that_is_read_only(runs, disk, data, capsys):
    """P5, P6: said at the start, and nothing is lost; it goes on once it can be written to."""
    flags = (*data, *FLAGS, "--max_steps")
    assert runs.start(*flags, 3) == 0
    flags = (*flags, 6)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    before = {path: path.read_bytes() for path in disk.iterdir()}
    assert runs.start(*flags, *AGAIN) == 2
    assert f"--out_dir {disk}: cannot be written to (Read-only" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in disk.iterdir()} == before
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert runs.start(*flags, *AGAIN) == 0


def test_damaged_states_in_a_run(runs, data, capsys):
    """P5: one bad file costs a save's steps, and the curve has no seam; two are status 2."""
    flags = (*data, *FLAGS, "--save_interval", 2, "--max_steps", 6)
    assert runs.start(*flags, name="whole") == 0
    runs.killed("in a micro-batch", 5, *flags)
    path = runs.path("_resume.pth")
    path.write_bytes(path.read_bytes()[:-1000])
    assert runs.start(*flags, *AGAIN) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    assert_same(runs.result(), runs.result("whole"))
    for file in (path, runs.path("_resume.prev.pth")):
        file.write_bytes(b"")
    before = {file: file.read_bytes() for file in runs.out.iterdir()}
    assert runs.start(*flags, *AGAIN) == 2
    assert "Move the file away to begin anew" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in runs.out.iterdir()} == before


def test_leftovers_are_cleaned_at_the_start(runs, data):
    """P5: what a killed save left behind is gone, and nothing else is."""
    runs.out.mkdir()
    for suffix in (".pth", ".json", "_resume.pth", "_resume.prev.pth", "_metrics.jsonl"):
        runs.path(suffix + ".tmp").write_bytes(b"half")
    (runs.out / "notes.tmp").write_text("mine")
    assert runs.start(*data, *FLAGS, "--max_steps", 1) == 0
    assert [path.name for path in runs.out.glob("*.tmp")] == ["notes.tmp"]


def test_one_name_one_process(runs, data, run_script):
    """P5: a second process with the same name and folder is refused, another name is not."""
    runs.out.mkdir()
    files = RunFiles(runs.out, "run_32")
    files.lock()
    flags = (*TINY_RUN, *data, *FLAGS, "--max_steps", 1, "--out_dir", runs.out, "--cache_dir",
             runs.tmp_path / "cache", "--save_weight")
    refused = run_script("trainer/train_pretrain.py", *flags, "run")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "another process is writing a run named run_32" in refused.stderr
    assert run_script("trainer/train_pretrain.py", *flags, "other").returncode == 0
    assert runs.path(".pth", "other").exists() and not runs.path(".pth").exists()
    files.lock_file.close()


def test_a_slow_save_does_not_hold_the_loop(runs, data, monkeypatch):
    """The state is copied when it is due and written behind the loop; saves that are due
    meanwhile become one that follows. What is written is the copy.
    """
    live, written, go_on = {}, [], threading.Event()
    save, write_state = Checkpoint.save, checkpoint.write_state

    def noted(self, step):
        live[step] = copy.deepcopy(self.engine.state_dict())
        save(self, step)

    def slow(path, state):
        if not written:
            assert go_on.wait(10), "the loop waits for the write"
        write_state(path, state)
        engine = read_state_file(path)["engine"]
        assert_same(dict(leaves(engine)), dict(leaves(live[state["step"]])))
        written.append(state["step"])

    monkeypatch.setattr(Checkpoint, "save", noted)
    monkeypatch.setattr(checkpoint, "write_state", slow)
    assert runs.start(*data, *FLAGS, "--save_interval", 3, "--max_steps", 9,
                      at_step=lambda step: step == 7 and (go_on.set(), join_writers())) == 0
    assert written == [3, 8, 9] == sorted(live)  # 6 was due while 3 was being written


def test_an_exit_waits_for_the_write(runs, data, monkeypatch):
    """A run that has ended is saved; one that fails does not take its save with it."""
    write_state = checkpoint.write_state

    def slow(*args):
        time.sleep(0.5)
        write_state(*args)

    monkeypatch.setattr(checkpoint, "write_state", slow)
    assert runs.start(*data, *FLAGS, "--max_steps", 3) == 0
    assert runs.state()["step"] == 3

    def fail(step):
        if step == 2:
            raise Death

    with pytest.raises(Death):
        runs.start(*data, *FLAGS, "--save_interval", 2, name="failed", at_step=fail)
    writers = [thread for thread in threading.enumerate() if thread.name != "MainThread"
               and not thread.daemon]
    assert len(writers) == 1, "Python waits for threads that are no daemons"
    join_writers()
    assert runs.state("failed")["step"] == 2


def test_a_state_of_another_version_is_not_damage(tmp_path):
    """P5: a whole state that is too new for this program is refused, and stays where it is."""
    path = tmp_path / "run_32_resume.pth"
    torch.save({"format": FORMAT + 1, "step": 5}, path)
    before = path.read_bytes()
    with pytest.raises(StateError, match="continue with the version"):
        read_newest_state(path)
    assert path.read_bytes() == before


def test_weights_beyond_float16_do_not_stop_the_state(train, write_jsonl, monkeypatch, tmp_path):
    """P5: the float32 state is saved where the float16 weights cannot be, and the run says so."""
    def refuse(*arguments):
        raise WeightsError("x holds values that are not finite in float16; not saved")

    monkeypatch.setattr(checkpoint, "save_weights", refuse)
    with pytest.raises(StateError, match="not finite in float16"):
        train(train_pretrain, "--data_path", write_jsonl("data.jsonl", texts(30)), "--max_steps", 3,
              "--batch_size", 2, "--accumulation_steps", 1)
    assert read_newest_state(tmp_path / "out" / "run_32_resume.pth")["step"] == 3
