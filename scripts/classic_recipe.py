"""The classic recipe: what a small language model is usually pretrained with, for comparison.

    python scripts/classic_recipe.py --data_path FILE --val_data_path FILE --minutes 20
    python scripts/classic_recipe.py --data_path FILE --max_steps 100 --dtype bfloat16

The same model as ours, `model/transformer.py`, in the loop that such repositories have: each
document padded or cut to max_seq_len and tokenised when it is asked for, 8 rows a step, plain cross
entropy over all logits (mean over the targets of the micro-batch), plainly causal attention, AdamW
at 5e-4 along a cosine without warm-up, float32 on a CPU and autocast on CUDA. Made as well as that
can be: workers, pinned memory, one padding for all, nothing computed twice.

`scripts/benchmark.py` times these steps beside ours. Not here: saving and resuming.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dataset.jsonl import DataError, JsonlReader
from dataset.loader import PackedRows, batches_in_order
from dataset.packing import IGNORED_TARGET
from dataset.pretrain import PRETRAIN
from dataset.stage_data import pack
from dataset.token_cache import open_token_cache
from dataset.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from model.device import DTYPES, autocast, choose_device
from model.files import find_path
from model.LMConfig import LMConfig
from model.metrics import evaluate
from model.transformer import MiniMindLM
from trainer.common.errors import run

PEAK_LR, LAST_LR, BATCH_SIZE, GRAD_CLIP = 5e-4, 5e-5, 8, 1.0


class PaddedTexts(Dataset):
    """Text number -> (input_ids, targets, text bytes), int64 (max_seq_len,) and an int.

    A document has the tokens that ours has. Padding stands on the right, where a causal model
    cannot see it, and its targets do not count. The bytes are those of the text that is trained
    on: what a cut leaves away is not counted, nor half a character at the cut.
    """

    def __init__(self, texts: list[str], tokenizer: Tokenizer, max_seq_len: int):
        self.texts, self.tokenizer, self.max_seq_len = texts, tokenizer, max_seq_len

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        text = self.texts[index]
        ids = [BOS_ID, *self.tokenizer.encode(text), EOS_ID]
        kept = ids[: self.max_seq_len + 1]  # max_seq_len positions predict the next token each
        row = torch.full((self.max_seq_len + 1,), PAD_ID)
        row[: len(kept)] = torch.tensor(kept)
        targets = row[1:].clone()
        targets[len(kept) - 1 :] = IGNORED_TARGET
        if len(kept) < len(ids):
            text = self.tokenizer.decode(kept[1:]).removesuffix("\ufffd")
        return row[:-1], targets, len(text.encode("utf-8"))


class Counts(NamedTuple):
    """What a step trained on."""

    tokens: int  # targets that count
    positions: int  # that the model computed, padding included
    text_bytes: float


def cosine(progress: float) -> float:
    """The learning rate after this share of the training, 0..1."""
    return LAST_LR + (PEAK_LR - LAST_LR) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """In nats per target, a scalar. logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(),
                           ignore_index=IGNORED_TARGET)


class ClassicRecipe:
    """Model, optimizer and endless shuffled batches; `step` trains on the next one."""

    def __init__(self, config: LMConfig, texts: list[str], tokenizer: Tokenizer, max_seq_len: int,
                 device: torch.device, dtype: torch.dtype, seed: int = 42, num_workers: int = 2):
        torch.manual_seed(seed)
        self.device, self.dtype, self.wait_seconds = device, dtype, 0.0
        self.model = MiniMindLM(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_LR, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.loader = DataLoader(
            PaddedTexts(texts, tokenizer, max_seq_len), BATCH_SIZE, shuffle=True,
            num_workers=num_workers, persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda", generator=torch.Generator().manual_seed(seed))
        self.batches = self.endless()

    def endless(self) -> Iterator[list[Tensor]]:
        while True:
            yield from self.loader

    def step(self, progress: float = 0.0) -> Counts:
        """One optimizer step; progress 0..1 says where on the cosine. Its loss is in `loss`."""
        begun = time.perf_counter()
        input_ids, targets, text_bytes = next(self.batches)
        self.wait_seconds += time.perf_counter() - begun
        tokens = int((targets != IGNORED_TARGET).sum())  # while it is on the host: no waiting
        input_ids = input_ids.to(self.device, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = cosine(progress)
        with autocast(self.device, self.dtype):
            loss = mean_cross_entropy(self.model(input_ids), targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return Counts(tokens, targets.numel(), int(text_bytes.sum()))


def read_texts(path: Path) -> list[str]:
    """All texts of a file. Raises DataError."""
    return [text for _, text in JsonlReader(path, PRETRAIN.parse)]


def validation_rows(path: Path, tokenizer: Tokenizer, args: argparse.Namespace) -> PackedRows:
    """A validation file in packed rows, as our stage scripts have it: the figures compare."""
    cache = open_token_cache(path, PRETRAIN, tokenizer)
    options = argparse.Namespace(max_seq_len=args.max_seq_len, seed=args.seed, long_docs="split")
    return pack(cache, np.arange(len(cache.lengths)), PRETRAIN, options, "validation")


def train(recipe: ClassicRecipe, args: argparse.Namespace, log, validate) -> dict[str, float]:
    """Trains for so many minutes or steps; returns what it took. validate(): metrics, or {}.

    With --minutes the cosine goes by the clock, so it ends with the training however fast the
    machine is and however busy. Validation stops the clock.
    """
    recipe.model.train()
    step = tokens = positions = 0
    text_bytes = seconds = paused = 0.0
    begun = time.perf_counter()
    while step < (args.max_steps or math.inf) and seconds < (60 * args.minutes or math.inf):
        progress = step / max(args.max_steps - 1, 1) if args.max_steps \
            else seconds / (60 * args.minutes)
        counts = recipe.step(progress)
        step += 1
        tokens, positions = tokens + counts.tokens, positions + counts.positions
        text_bytes += counts.text_bytes
        if step % 10 == 0:
            log(step=step, seconds=seconds, loss=recipe.loss.item(), lr=cosine(progress))
        seconds = time.perf_counter() - begun - paused
        if args.eval_interval and step % args.eval_interval == 0:
            log(step=step, seconds=seconds, **validate())
            paused += time.perf_counter() - begun - paused - seconds
    if recipe.device.type == "cuda":
        torch.cuda.synchronize(recipe.device)
        seconds = time.perf_counter() - begun - paused
    return {"steps": step, "seconds": seconds, "tokens": tokens, "bytes": text_bytes,
            "bytes_per_s": text_bytes / seconds, "fill": tokens / positions}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data_path", default="dataset/sample_pretrain.jsonl", help="JSONL file")
    parser.add_argument("--val_data_path", default=None, help="JSONL file to validate on")
    parser.add_argument("--max_seq_len", type=int, default=512, help="tokens in a row")
    parser.add_argument("--minutes", type=float, default=0, help="of training; or --max_steps")
    parser.add_argument("--max_steps", type=int, default=0, help="optimizer steps; or --minutes")
    parser.add_argument("--eval_interval", type=int, default=0,
                        help="steps between validations, whose time does not count; 0 = at the end")
    for name, default in (("dim", 512), ("n_layers", 8), ("n_heads", 8), ("n_kv_heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model's shape")
    parser.add_argument("--num_workers", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps, cpu")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto",
                        help="of matrix products; auto = float16 on CUDA, else float32")
    parser.add_argument("--seed", type=int, default=42, help="of weights and order")
    parser.add_argument("--log", default=None, metavar="FILE", help="JSON lines are added to it")
    args = parser.parse_args()
    if (args.minutes > 0) == (args.max_steps > 0) or min(args.minutes, args.max_steps) < 0:
        parser.error("expected one of --minutes and --max_steps, above 0")
    at_least = {"max_seq_len": 2, "eval_interval": 0, "num_workers": 0, "seed": 0}
    for name, least in at_least.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: expected at least {least}")
    for name in ("data_path", "val_data_path"):
        if (given := getattr(args, name)) is not None:
            setattr(args, name, find_path(given, parser.get_default(name)))
            if not getattr(args, name).is_file():
                parser.error(f"--{name} {getattr(args, name)}: there is no such file "
                             "(scripts/make_sample_data.py writes dataset/sample_pretrain.jsonl)")
    try:
        args.config = LMConfig(dim=args.dim, n_layers=args.n_layers, n_heads=args.n_heads,
                               n_kv_heads=args.n_kv_heads)
    except ValueError as error:
        parser.error(f"model shape: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    device = choose_device(args.device)
    automatic = torch.float16 if device.type == "cuda" else torch.float32
    dtype = automatic if args.dtype == "auto" else DTYPES[args.dtype]
    tokenizer = Tokenizer()
    recipe = ClassicRecipe(args.config, read_texts(args.data_path), tokenizer, args.max_seq_len,
                           device, dtype, args.seed, args.num_workers)
    val_set = args.val_data_path and validation_rows(args.val_data_path, tokenizer, args)

    def log(**figures: float) -> None:
        print(" | ".join(f"{name} {value:.6g}" for name, value in figures.items()), flush=True)
        if args.log is not None:
            with open(args.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")

    def validate() -> dict[str, float]:
        if val_set is None:
            return {}
        batches = batches_in_order(val_set, rows_per_batch=BATCH_SIZE)
        metrics = evaluate(recipe.model, batches, BATCH_SIZE * args.max_seq_len, device, dtype)
        return {f"val_{name}": metrics[name] for name in ("loss", "bpb")}

    figures = train(recipe, args, log, validate)
    log(**figures, **validate())


if __name__ == "__main__":
    run(main, DataError)
