"""The file that a run resumes from: `out/pretrain_512_resume.pth`, whole at every instant.

A new state goes to a temporary name and to the disk; then the current one gets the second name
`_resume.prev.pth`, and the new one takes its place. `torch.load` does not notice a flipped bit, but
the file is a zip archive with a checksum for each tensor: they are compared before anything is
used, and a damaged file is passed over for the one before. Reading executes nothing.
"""

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.files import write_atomically

FORMAT = 1  # rises when an older program could not read the state


class StateError(ValueError):
    """A state is missing, damaged, or of another run; the message says which and what to do."""


def previous_path(path: Path) -> Path:
    """`pretrain_512_resume.pth` -> `pretrain_512_resume.prev.pth`."""
    return path.with_suffix(".prev.pth")


def write_state(path: Path, state: dict) -> None:
    """Writes a state (tensors, numbers, strings, lists, dicts); the one before stays beside it.

    Raises StateError, and writes nothing, if a weight or a moment is not finite.
    """
    bad = [name for name, tensor in tensors_of(state["engine"]) if not tensor.isfinite().all()]
    if bad:
        raise StateError(f"{', '.join(bad[:3])}: values that are not finite; not saved")
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file),
                     previous_path(path))


def read_state_file(path: Path) -> dict:
    """Reads one file whole, on the CPU. Raises StateError if it is missing, damaged or foreign."""
    if not path.is_file():
        raise StateError(f"{path}: there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise StateError(f"{path}: damaged (the checksum of {damaged} is wrong)")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except StateError:
        raise
    except Exception as error:  # damage has many faces, and a foreign pickle is refused here too
        lines = str(error).strip().splitlines() or [repr(error)]
        raise StateError(f"{path}: cannot be read safely ({lines[0][:200]})") from None
    if not isinstance(state, dict) or "format" not in state:
        raise StateError(f"{path}: not a state that this program saved")
    if state["format"] != FORMAT:
        raise StateError(f"{path}: format {state['format']}, expected {FORMAT}; continue with the "
                         "version of the program that wrote it")
    return state


def peek(path: Path) -> dict | None:
    """A state whose tensors stay on the disk and are not checked, or None if it cannot be read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state if {"step", "total_steps"} <= set(state) else None
    except Exception:  # missing, or damaged in one of many ways
        return None


def read_newest_state(path: Path) -> dict | None:
    """The current state or, if it is damaged, the one before; None if there is neither.

    Says so when it takes the older one. Raises StateError if there are files but no good one.
    """
    problems = []
    for candidate in (path, previous_path(path)):
        if candidate.exists():
            try:
                state = read_state_file(candidate)
            except StateError as error:
                problems.append(str(error))
                continue
            if problems:
                print(f"{problems[0]}\ntaking the one before: {candidate}, after step "
                      f"{state['step']}")
            return state
    if problems:
        raise StateError("; ".join(problems) + ". Move the file away to begin anew, or copy a good "
                         "one there.")
    return None


def replace_damaged(path: Path, step: int) -> None:
    """Puts the state that was read, after so many steps, at path if it is the one before.

    Otherwise the next save would give the damaged file the name of the good one, and a kill before
    the new one has its name would leave none.
    """
    newest, before = ((peek(file) or {}).get("step") for file in (path, previous_path(path)))
    if before == step != newest:
        os.replace(previous_path(path), path)


def tensors_of(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every floating-point tensor in nested dicts and lists, with its dotted name."""
    if isinstance(value, Tensor):
        return [(name, value)] if value.is_floating_point() else []
    items = value.items() if isinstance(value, dict) else \
        enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items
            for found in tensors_of(item, f"{name}.{key}" if name else str(key))]


def to_host(value: Any) -> Any:
    """A copy of nested dicts and lists whose tensors lie in host memory and are nobody else's.

    Raises TypeError for what a state may not hold, because reading it would have to execute code.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_host(item) for item in value]
    if type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"a state holds plain values only, not {type(value)}")
    return value


def random_states(device: torch.device) -> dict:
    """This process's random states: python, numpy, torch on the CPU and on the device."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {"python": [version, list(words), gauss],
             "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *map(float, rest)],
             "torch": torch.get_rng_state()}
    if device.type in ("cuda", "mps"):
        state[device.type] = getattr(torch, device.type).get_rng_state()
    return state


def set_random_states(state: dict, device: torch.device) -> None:
    """Puts back what `random_states` gave; a device of another kind keeps its own."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss),
                         cached))
    torch.set_rng_state(state["torch"])
    if device.type in state:
        getattr(torch, device.type).set_rng_state(state[device.type])
