"""Start-up: from the launch of `train_pretrain.py` to its first forward, and tokenising."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dataset.pretrain import PRETRAIN
from dataset.token_cache import open_token_cache
from model.files import ROOT
from scripts.benchmark_parts.figures import Bench, Figure


class StartError(RuntimeError):
    """The stage script did not come to a forward; the message is what it said."""


def seconds_to_forward(flags: list[str]) -> float:
    """Launches the stage script with these flags, and waits for its first forward."""
    runner = ROOT / "scripts" / "benchmark_parts" / "first_forward.py"
    command = [sys.executable, str(runner), repr(time.time()),
               str(ROOT / "trainer" / "train_pretrain.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    told = re.search(r"^first forward after ([\d.]+) s$", done.stdout, re.MULTILINE)
    if done.returncode or told is None:
        raise StartError(f"train_pretrain.py ended before a forward: {done.stderr.strip()}")
    return float(told[1])


def section(bench: Bench) -> list[Figure]:
    """Pairs of starts: with an empty folder for tokenised data, then with a full one."""
    length, args = next(iter(bench.args.items()))
    cold, warm, rates = [], [], []
    size = args.data_path.stat().st_size / 1e6
    for _ in range(bench.repeats):
        with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
            flags = [*bench.stage_flags, "--data_path", str(args.data_path), "--max_seq_len",
                     str(length), "--cache_dir", f"{folder}/cache", "--out_dir", f"{folder}/out",
                     "--max_steps", "1", "--use_compile", "0"]
            cold.append(seconds_to_forward(flags))
            warm.append(seconds_to_forward(flags))
            begun = time.perf_counter()
            open_token_cache(args.data_path, PRETRAIN, bench.tokenizer,
                             args.bad_lines, Path(folder) / "again")
            rates.append(size / (time.perf_counter() - begun))
    title = f"start-up, {size:,.1f} MB of JSONL"
    return [
        Figure(title, "launch to first forward, nothing tokenised yet", tuple(cold), "s"),
        Figure(title, "launch to first forward, tokenised before", tuple(warm), "s"),
        Figure(title, "reading, tokenising and writing", tuple(rates), "MB/s"),
    ]
