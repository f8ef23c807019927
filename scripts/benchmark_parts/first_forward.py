"""Runs a stage script up to its first forward, and prints how long after the launch that began.

    python scripts/benchmark_parts/first_forward.py LAUNCHED trainer/train_pretrain.py FLAGS ...

LAUNCHED is time.time() where this was launched. The script itself is unchanged: the model's
forward is replaced by one that prints and ends the program.
"""

import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.transformer import MiniMindLM  # what the script imports anyway


def main() -> None:
    launched = float(sys.argv[1])

    def forward(*args, **kwargs):
        print(f"first forward after {time.time() - launched:.3f} s", flush=True)
        sys.exit(0)

    MiniMindLM.forward = forward
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
