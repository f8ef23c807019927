"""What saving costs: how long the loop is held, how long a write takes, and what it does to steps.

    python scripts/save_cost.py                  # the default shape, a save every 5 steps

Trains on generated text in a temporary folder, with every save timed from outside. One row is 512
tokens and a step one row, so that steps are short beside a save; real steps are longer.
"""

import argparse
import itertools
import json
import random
import runpy
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.common.checkpoint import Checkpoint
from trainer.common.engine import Engine

WORDS = "the fox found a well and drank , then it slept under an old tree 我们 的 小 河".split()


def timed(owner: type, name: str, seconds: list[tuple[float, float]]) -> None:
    """Makes a method note when it began and ended."""
    method = getattr(owner, name)

    def wrapper(*args, **kwargs):
        begun = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append((begun, time.perf_counter()))
        return result

    setattr(owner, name, wrapper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--save_interval", type=int, default=5, help="steps (default: 5)")
    parser.add_argument("--dim", type=int, default=512, help="model width (default: 512)")
    args = parser.parse_args()
    held, writes, updates = [], [], []
    timed(Checkpoint, "save", held)
    timed(Checkpoint, "write", writes)
    timed(Engine, "update", updates)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="save_cost.") as folder:
        data = Path(folder) / "data.jsonl"
        texts = (" ".join(rng.choices(WORDS, k=400)) for _ in range(2 * args.steps))
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        sys.argv = [str(ROOT / "trainer" / "train_pretrain.py"), "--data_path", str(data),
                    "--cache_dir", f"{folder}/cache", "--out_dir", folder, "--dim", str(args.dim),
                    "--batch_size", "1", "--accumulation_steps", "1", "--eval_interval", "0",
                    "--max_steps", str(args.steps), "--save_interval", str(args.save_interval)]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        size = next(Path(folder).glob("*_resume.pth")).stat().st_size
    report(held, writes, updates, size)


def report(held: list, writes: list, updates: list, size: int) -> None:
    """Prints the figures; each list holds (begin, end) in seconds."""
    def spread(name: str, seconds: list[float]) -> None:
        if seconds:
            print(f"{name:<34} median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s"
                  f" (of {len(seconds)})")

    print(f"\nresume file: {size / 1e6:.0f} MB")
    spread("the loop is held by a save for", [end - begun for begun, end in held])
    spread("writing behind it takes", [end - begun for begun, end in writes])
    ends = [end for _, end in updates]
    alone, beside = [], []
    for begun, end in itertools.pairwise(ends):
        copied = sum(stop - start for start, stop in held if begun < start < end)
        busy = any(start < end and stop > begun for start, stop in writes)
        (beside if busy else alone).append(end - begun - copied)
    spread("a step with no write beside it", alone)
    spread("a step while a write goes on", beside)


if __name__ == "__main__":
    main()
