"""The file that a run resumes from: whole at every instant, damage noticed, nothing executed."""

import contextlib
import copy
import io
import os
import pickle
import random
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from resume_checks import assert_same, leaves

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from trainer.common.run_files import RunFiles
from trainer.common.state_file import (
    StateError,
    peek,
    previous_path,
    random_states,
    read_newest_state,
    read_state_file,
    set_random_states,
    to_host,
    write_state,
)

CPU = torch.device("cpu")


def new_state(step: int) -> dict:
    """A small state, different at every step, with a tensor in each of its parts."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(6, 5, generator=generator) for name in ("a", "b")}
    moments = {name: {"step": torch.tensor(float(step)), "exp_avg": tensor / 2}
               for name, tensor in tensors.items()}
    return {"step": step, "total_steps": 9, "engine": {"model": tensors, "optimizer": moments},
            "arguments": {"text": "two words", "rate": 1e-3, "flag": True, "none": None},
            "random": [torch.arange(40, dtype=torch.uint8)]}


@pytest.fixture
def path(tmp_path):
    """A saved state of step 2, with that of step 1 beside it."""
    path = tmp_path / "out" / "run_32_resume.pth"
    path.parent.mkdir()
    for step in (1, 2):
        write_state(path, new_state(step))
    return path


def step_of(path) -> int:
    """The step of a file that is whole and holds what was saved."""
    state = read_state_file(path)
    assert_same(dict(leaves(state)), dict(leaves({"format": 1, **new_state(state["step"])})))
    return state["step"]


def status_of_dying(path, deadly_call: int, lasting=None) -> int:
    """The exit status of a child that saves step 3 and dies just before that call to the system
    (status 9), or has no such call (0); 1 if `lasting` (path) was not there at any call.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = []

    def noted(function):
        def call(*args, **options):
            if not (lasting or path).exists():
                os._exit(1)
            calls.append(function)
            if len(calls) == deadly_call:
                os._exit(9)
            return function(*args, **options)
        return call

    try:
        for name in ("fsync", "link", "replace", "unlink", "open"):
            setattr(os, name, noted(getattr(os, name)))
        write_state(path, new_state(3))
        os._exit(0)
    finally:
        os._exit(3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("cleaned", [True, False])
def test_killed_at_any_instant_of_a_save(path, cleaned):
    """P5, A46: the old state or the new one, at no instant none; the next save goes well, and
    what was left half-written is gone, by the cleaning at the start or by that save.
    """
    seen, before = [], {file: file.read_bytes() for file in path.parent.iterdir()}
    for deadly_call in range(1, 20):
        for file in {*before, *path.parent.iterdir()}:
            file.write_bytes(before[file]) if file in before else file.unlink()
        status = status_of_dying(path, deadly_call)
        if status == 0:
            break
        assert status == 9
        seen.append((step_of(path), step_of(previous_path(path))))
        assert read_newest_state(path)["step"] == seen[-1][0]
        if cleaned:
            RunFiles(path.parent, "run_32").clean()
            assert {file.name for file in path.parent.iterdir()} == {file.name for file in before}
        write_state(path, new_state(4))
        assert (step_of(path), step_of(previous_path(path))) == (4, seen[-1][0])
        assert {file.name for file in path.parent.iterdir()} == {file.name for file in before}
    assert status == 0 and sorted(set(seen)) == [(2, 1), (2, 2), (3, 2)] and seen == sorted(seen)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_killed_in_the_save_after_a_damaged_one(path):
    """P5: what was resumed from is there until the next save is; a damaged file takes no place."""
    previous = previous_path(path)
    current, good = path.read_bytes(), previous.read_bytes()
    for deadly_call in range(1, 20):
        path.write_bytes(current[:-50])
        previous.write_bytes(good)
        assert read_newest_state(path)["step"] == 1
        status = status_of_dying(path, deadly_call, lasting=previous)
        assert read_newest_state(path)["step"] in (1, 3)
        if status == 0:
            break
        assert status == 9
    assert deadly_call > 2 and step_of(path) == 3 and step_of(previous) == 1


@pytest.mark.skipif(os.name != "posix", reason="folders are flushed on POSIX only")
@pytest.mark.parametrize("links", [True, False])
def test_the_order_of_a_save(path, monkeypatch, links):
    """A46, P5: the new state is on the disk before the old one gets its second name, by a link
    where there are links, and before it takes the first name; the folder comes last.
    """
    events, fsync, link, replace = [], os.fsync, os.link, os.replace

    def flushed(fd):
        events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def linked(source, target):
        if not links:
            raise OSError("no links here")
        assert step_of(source) == 2
        link(source, target)

    def renamed(source, target):
        assert step_of(path) == 2
        events.append((os.path.basename(target), step_of(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "replace", renamed)
    inode = path.stat().st_ino
    write_state(path, new_state(3))
    assert events == ["file", ("run_32_resume.prev.pth", 2), ("run_32_resume.pth", 3), "folder"]
    assert (previous_path(path).stat().st_ino == inode) is links


def test_flipped_bits_are_noticed_or_harmless(path):
    """P5: wherever a bit flips, what is read is what was saved, or the state before is taken."""
    whole, rng, harmless = path.read_bytes(), random.Random(0), 0
    with zipfile.ZipFile(path) as archive:
        records = {info: archive.read(info) for info in archive.infolist() if info.file_size}
    for info, content in records.items():
        start = whole.index(content, info.header_offset)
        for place in {start, start + len(content) - 1, start + rng.randrange(len(content))}:
            path.write_bytes(flipped(whole, place, rng))
            with pytest.raises(StateError, match=r"damaged|cannot be read"):
                read_state_file(path)
            assert read_newest_state(path)["step"] == 1
    assert len([info for info in records if "/data/" in info.filename]) == 7
    for place in range(0, len(whole), 5):  # headers, padding and directory as well
        path.write_bytes(flipped(whole, place, rng))
        with contextlib.suppress(StateError):
            assert step_of(path) == 2
            harmless += 1
    assert 0 < harmless < len(whole) / 10


def flipped(content, place, rng) -> bytes:
    """The content with one bit of the byte at place turned over."""
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["torch", "torch legacy", "pickle", "inside a state"])
def test_pickle_bombs_execute_nothing(path, tmp_path, form, capsys):
    """P7, A53: a state that runs code when unpickled is refused, as the current one or as the one
    before, also where only its step is looked up.
    """
    marker, whole = tmp_path / "marker", path.read_bytes()
    bomb = {"format": 1, "step": 5, "total_steps": 9, "engine": Bomb(marker)}
    if form == "inside a state":
        bomb = {**new_state(5), "format": 1, "random": [Bomb(marker)]}
    content = io.BytesIO(pickle.dumps(bomb))
    if form != "pickle":
        torch.save(bomb, content, _use_new_zipfile_serialization=form != "torch legacy")
    path.write_bytes(content.getvalue())
    assert peek(path) is None and read_newest_state(path)["step"] == 1
    assert f"taking the one before: {previous_path(path)}, after step 1" in capsys.readouterr().out
    previous_path(path).write_bytes(content.getvalue())
    with pytest.raises(StateError, match=r"read safely.*Move the file away"):
        read_newest_state(path)
    path.write_bytes(whole)
    assert read_newest_state(path)["step"] == 2 and not marker.exists()
    pickle.loads(pickle.dumps(bomb))
    assert marker.exists()  # the bomb is a live one


@pytest.mark.parametrize("damage", [0, 1, 100, 0.3, 0.9, -1, "text", "list", "gone"])
def test_a_damaged_state_gives_way_to_the_one_before(path, damage, capsys):
    """P5: truncated, empty, foreign or missing: the one before is taken; without it, advice."""
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif isinstance(damage, str):
        torch.save([1.0], path) if damage == "list" else path.write_text("<html></html>")
    else:
        path.write_bytes(whole[: int(len(whole) * damage) if 0 < damage < 1 else damage])
    assert read_newest_state(path)["step"] == 1
    assert (f"{path}: " in capsys.readouterr().out) is (damage != "gone")
    shutil.copy(previous_path(path), path)
    previous_path(path).unlink()
    assert read_newest_state(path)["step"] == 1
    path.unlink()
    assert read_newest_state(path) is None


def test_both_damaged(path):
    """P5: two bad files are an error that names both and says what to do, not a fresh start."""
    for file in (path, previous_path(path)):
        file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(StateError) as caught:
        read_newest_state(path)
    assert all(f"{file}: " in str(caught.value) for file in (path, previous_path(path)))
    assert "Move the file away to begin anew, or copy a good one there" in str(caught.value)


@pytest.mark.parametrize("part, key", [("model", None), ("optimizer", "exp_avg")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_not_saved(path, part, key, value):
    """A11: a weight or a moment that is not finite is named, and what was saved before stays."""
    state, before = new_state(3), {file: file.read_bytes() for file in path.parent.iterdir()}
    tensor = state["engine"][part]["b"]
    (tensor if key is None else tensor[key])[2, 3] = value
    with pytest.raises(StateError, match=rf"^{part}\.b.*not finite; not saved"):
        write_state(path, state)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_a_state_is_a_copy_of_plain_values():
    """What is written is the state at the save, whatever training does meanwhile (P4), and
    nothing that reading would have to execute (P7).
    """
    model = MiniMindLM(LMConfig(dim=32, n_layers=1, n_heads=4, vocab_size=50))
    state = {"engine": model.state_dict(), "list": [torch.ones(2), {"deep": torch.ones(2)}],
             "count": 3, "text": "words", "none": None}
    copied, expected = to_host(state), copy.deepcopy(state)
    with torch.no_grad():
        for tensor in (*model.parameters(), state["list"][0], state["list"][1]["deep"]):
            tensor.add_(1)
    assert_same(dict(leaves(copied)), dict(leaves(expected)))
    for value in (Path("a"), torch.float16, {1, 2}, np.float64(1), (1, 2)):
        with pytest.raises(TypeError, match="plain values only"):
            to_host({"a": [value]})


def test_random_states_come_back(tmp_path):
    """A44: python, numpy and torch draw on as if nothing had been between, through a file too."""
    def draw():
        return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(),
                torch.rand(3).tolist(), torch.randint(9, (3,)).tolist())

    draw()  # gauss and normal keep a second value for the next call
    torch.save(random_states(CPU), tmp_path / "random.pth")
    expected = [draw(), draw()]
    set_random_states(torch.load(tmp_path / "random.pth", weights_only=True), CPU)
    assert [draw(), draw()] == expected
