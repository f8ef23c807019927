"""What a run leaves in --out_dir, under one name: NAME_DIM.pth, .json, _metrics.jsonl."""

import argparse
import shutil
import sys
from pathlib import Path

from model.transformer import MiniMindLM
from model.weights import (
    WeightsError,
    fill_model,
    find_weights,
    read_config,
    read_state,
    save_weights,
)


def run_name(args: argparse.Namespace) -> str:
    """The stem of all files of a run, e.g. `pretrain_512`."""
    return f"{args.save_weight}_{args.dim}"


def start_weights(model: MiniMindLM, args: argparse.Namespace, tokenizer_hash: str) -> None:
    """Fills the model with --from_weight, unless that is `none`.

    Raises WeightsError if they do not fit. Tensors alone do not tell all: another number of heads,
    or another tokenizer, can have the same shapes, so the `.json` is compared where there is one.
    """
    if args.from_weight == "none":
        return
    path = find_weights(args.from_weight, args.out_dir, args.dim)
    state = read_state(path)
    if path.with_suffix(".json").is_file():
        config, about = read_config(path, state)
        wanted = {**model.config.to_dict(), "dropout": config.dropout}
        problems = [f"{name} is {value}, expected {wanted[name]}"
                    for name, value in config.to_dict().items() if value != wanted[name]]
        if about.get("tokenizer_hash", tokenizer_hash) != tokenizer_hash:
            problems.append("made with another model/tokenizer.json")
        if problems:
            raise WeightsError(f"{path.with_suffix('.json')}: {'; '.join(problems)}. Give the "
                               "flags that the weights were trained with.")
    fill_model(model, state, str(path))
    print(f"starting from {path}")


def check_out_dir(args: argparse.Namespace, model: MiniMindLM) -> None:
    """Raises WeightsError if the weights would not fit on the disk of --out_dir twice, and says so
    if they are going to replace others.
    """
    path = args.out_dir / f"{run_name(args)}.pth"
    if path.exists():
        print(f"{path} will be replaced at the first save; --save_weight chooses another name")
    needed = 2 * 2 * model.num_parameters()  # float16, old and new file side by side
    free = shutil.disk_usage(args.out_dir).free
    if free < needed:
        raise WeightsError(f"--out_dir {args.out_dir}: {free / 2**20:,.0f} MiB free, expected at "
                           f"least {needed / 2**20:,.0f} MiB for the weights. Free some, or give "
                           "another --out_dir.")


def save_run(args: argparse.Namespace, model: MiniMindLM, stage_name: str, step: int,
             tokenizer_hash: str, validation: dict[str, float]) -> Path:
    """Writes the weights and their description; returns the path. step is the number done."""
    path = args.out_dir / f"{run_name(args)}.pth"
    save_weights(path, model, {
        "stage": stage_name, "step": step, "validation": validation,
        "tokenizer_hash": tokenizer_hash, "command": sys.argv,
    })
    return path
