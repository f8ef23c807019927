"""Weight files: `out/pretrain_512.pth` (tensors) and `out/pretrain_512.json` (what they are).

The `.pth` is a plain float16 `state_dict` with the keys of MiniMind2 and Hugging Face Llama, the
tied matrix stored once. Both files are written whole or not at all: to a temporary name in the same
folder, flushed to the disk, then renamed over the old one. Loading executes nothing
(`weights_only=True`) and is strict: a missing, foreign or misshapen tensor is an error.
"""

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from model.files import find_path, write_atomically
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM

EMBEDDING = "model.embed_tokens.weight"
TIED_COPY = "lm_head.weight"  # MiniMind2 files hold the tied matrix under this name as well


class WeightsError(ValueError):
    """A weight file is missing, damaged, or not of the expected shape; the message says which."""


def save_weights(path: Path, config: LMConfig, tensors: dict[str, Tensor], about: dict) -> None:
    """Writes a model's tensors as float16 to path; its config and `about` to the `.json` beside it.

    Raises WeightsError, and writes nothing, if a value is not finite in float16.
    """
    state = {}
    for name, tensor in tensors.items():
        half = tensor.detach().to("cpu", torch.float16)
        if not half.isfinite().all():
            raise WeightsError(f"{name} holds values that are not finite in float16; not saved")
        state[name] = half
    description = {"config": config.to_dict(), **about}
    text = json.dumps(description, ensure_ascii=False, indent=1).encode()
    write_atomically(path.with_suffix(".json"), lambda file: file.write(text))
    write_atomically(path, lambda file: torch.save(state, file))


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file, the tied matrix once. Raises WeightsError."""
    if not path.is_file():
        raise WeightsError(f"{path}: there is no such weight file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows as KeyError, AssertionError, struct.error, ...
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise WeightsError(
            f"{path}: not a weight file that can be read safely ({first_line}). Expected a plain "
            "state_dict of tensors as torch.save writes it; copy or train it again."
        ) from None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise WeightsError(f"{path}: expected a dictionary of tensors (a state_dict)")
    copy = state.pop(TIED_COPY, None)
    if copy is not None and EMBEDDING in state and not torch.equal(copy, state[EMBEDDING]):
        raise WeightsError(
            f"{path}: {TIED_COPY} differs from {EMBEDDING}, but this model's output is tied to its "
            "embedding"
        )
    return state


def read_config(path: Path, state: dict[str, Tensor]) -> tuple[LMConfig, dict]:
    """The shape of a weight file, and the whole `.json` beside it ({} if there is none).

    Without a `.json` the shape is read off the tensors. The number of query heads leaves no trace
    in them: 8 is assumed, and printed.
    """
    description_path = path.with_suffix(".json")
    if description_path.is_file():
        try:
            description = json.loads(description_path.read_text("utf-8"))
            return LMConfig.from_dict(description.get("config", description)), description
        except (ValueError, TypeError, AttributeError) as error:
            raise WeightsError(f"{description_path}: not a model description: {error}") from None
    try:
        vocab_size, dim = state[EMBEDDING].shape
        n_heads = 8
        kv_dim = state["model.layers.0.self_attn.k_proj.weight"].shape[0]
        layers = [int(m[1]) for m in (re.match(r"model\.layers\.(\d+)\.", n) for n in state) if m]
        config = LMConfig(
            dim=dim, n_layers=max(layers) + 1, n_heads=n_heads,
            n_kv_heads=kv_dim // (dim // n_heads), vocab_size=vocab_size,
            hidden_dim=state["model.layers.0.mlp.gate_proj.weight"].shape[0],
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(f"{path}: its tensors are not those of this model ({error})") from None
    print(f"{path}: no {description_path.name} beside it; shape read off the tensors, "
          f"n_heads={n_heads} assumed")
    return config, {}


def fill_model(model: MiniMindLM, state: dict[str, Tensor], source: str) -> None:
    """Copies tensors into the model. Raises WeightsError listing every name or shape that differs.
    """
    own = model.state_dict()
    problems = [f"missing {name}" for name in own if name not in state]
    problems += [f"unknown {name}" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems += [
        f"{name} holds values that are not finite"
        for name in own
        if name in state and not state[name].isfinite().all()
    ]
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise WeightsError(
            f"{source}: its tensors do not fit a model of dim={model.config.dim}, "
            f"n_layers={model.config.n_layers}, n_heads={model.config.n_heads}, "
            f"n_kv_heads={model.config.n_kv_heads}, vocab_size={model.config.vocab_size} "
            f"({len(problems)} differ: {shown}). Give the shape the file was trained with."
        )
    model.load_state_dict(state)


def find_weights(given: str, out_dir: Path, dim: int | None = None) -> Path:
    """The file that `--weight` or `--from_weight` names: a file, or a name in out_dir.

    The name `pretrain` stands for `pretrain_{dim}.pth`. With dim None that is the one file of any
    dim, or, of several, the one of the default dim. Raises WeightsError that lists what is there if
    no file fits, or several do.
    """
    if find_path(given).is_file():
        return find_path(given)
    if (out_dir / f"{given}.pth").is_file():
        return out_dir / f"{given}.pth"
    size = r"\d+" if dim is None else str(dim)
    there = sorted(out_dir.glob("*.pth")) if out_dir.is_dir() else []
    fitting = [path for path in there if re.fullmatch(rf"{re.escape(given)}_{size}", path.stem)]
    default = out_dir / f"{given}_{LMConfig().dim}.pth"
    if len(fitting) == 1 or default in fitting:
        return default if default in fitting else fitting[0]
    names = ", ".join(path.stem for path in fitting or there if "_resume" not in path.stem)
    raise WeightsError(
        f"{given!r}: {'several weights fit' if fitting else 'no such weights'}; in {out_dir} there "
        f"{'are ' + names if names else 'is none yet'}. Expected a file, or one of those names"
        + (f" followed by _{dim} (--dim)." if dim else ".")
    )


def load_model(path: Path) -> tuple[MiniMindLM, dict]:
    """The model in a weight file, in float32 on the CPU, and the description beside it."""
    state = read_state(path)
    config, description = read_config(path, state)
    model = MiniMindLM(config)
    fill_model(model, state, str(path))
    return model, description
