"""What a training step takes: predicted (formulae in model/memory.py) and measured.

    python scripts/memory_table.py                            # a table for the default shape
    python scripts/memory_table.py --rows 8 --max_seq_len 340 --dtypes float32 --checkpointing 0

Measured is the most that tensors took at one time in the second of two steps' micro-batches, when
gradients and moments are there: on CUDA by the allocator, on a CPU by PyTorch's profiler, which
sees every allocation and release of a tensor (not the process's size, which holds Python as well).
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

from dataset.packing import document_starts
from model.device import DTYPES, autocast, choose_device
from model.LMConfig import LMConfig
from model.memory import predicted_bytes
from model.transformer import MiniMindLM
from trainer.common.optim import make_adamw

CARDS = (6, 8, 12, 24)  # GiB
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "all")


def step_after_step(config: LMConfig, rows: int, max_seq_len: int, dtype: torch.dtype,
                    checkpointing: bool, device: torch.device):
    """Yields before, and then after, a micro-batch that meets gradients and moments."""
    model = MiniMindLM(config, checkpointing).to(device)
    optimizer = make_adamw(model, 0.1)
    ids = torch.randint(config.vocab_size, (rows, max_seq_len), device=device)
    documents = torch.arange(max_seq_len, device=device).expand(rows, -1) // 100

    def micro_batch(length: int):
        part = ids[:, :length], documents[:, :length]
        with autocast(device, dtype):
            loss = model(part[0], doc_ids=part[1], targets=part[0],
                         doc_starts=document_starts(part[1]))
        loss.backward()

    micro_batch(1)  # gradients are as large after one position, and come in no time
    optimizer.step()
    yield sum(p.nbytes for p in model.parameters()) * 4 + ids.nbytes + documents.nbytes
    micro_batch(max_seq_len)
    yield 0


def measured_bytes(*step, device: torch.device) -> int:
    """Peak bytes of tensors in such a step."""
    steps = step_after_step(*step, device)
    at_rest = next(steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        next(steps)
        return torch.cuda.max_memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        next(steps)
    return at_rest + tensor_peak(profiler)


def tensor_peak(profiler: profile) -> int:
    """The most bytes that tensors took at one time, beside what there was when it began.

    The profiler has to have seen a CPU's memory (profile_memory=True).
    """
    changes = [(event.start_ns(), event.nbytes()) for event in
               profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = itertools.accumulate(size for _, size in sorted(changes))
    return max(taken, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=512, help="model width (default: 512)")
    parser.add_argument("--n_layers", type=int, default=8, help="blocks (default: 8)")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8], help="in a micro-batch")
    parser.add_argument("--max_seq_len", type=int, nargs="+", default=[512], help="tokens in a row")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--checkpointing", type=int, nargs="+", default=[0, 1], choices=(0, 1))
    parser.add_argument("--device", default="cpu", help="to measure on: cpu, cuda (default: cpu)")
    args = parser.parse_args()
    config = LMConfig(dim=args.dim, n_layers=args.n_layers)
    device = choose_device(args.device)
    print("| rows x length | dtype | checkpointing | " + " | ".join(KINDS) + " | measured | off |")
    print("|---|---|" + "--:|" * (len(KINDS) + 3))
    for rows, length, dtype, checkpointing in itertools.product(
            args.rows, args.max_seq_len, args.dtypes, args.checkpointing):
        step = (config, rows, length, DTYPES[dtype], bool(checkpointing))
        predicted = predicted_bytes(*step)
        measured = measured_bytes(*step, device=device)
        figures = [f"{predicted[kind] / 2**20:,.0f}" for kind in KINDS]
        print(f"| {rows} x {length} | {dtype} | {checkpointing} | " + " | ".join(figures)
              + f" | {measured / 2**20:,.0f} | {predicted['all'] / measured - 1:+.0%} |",
              flush=True)
    print("\nMiB. Rows of 512 that fit in 80 % of a card, predicted:\n")
    print("| card | " + " | ".join(f"{dtype}{', checkpointing' * on}"
                                   for dtype in args.dtypes for on in (0, 1)) + " |")
    print("|---|" + "--:|" * (2 * len(args.dtypes)))
    for card in CARDS:
        fits = [largest(config, DTYPES[dtype], bool(on), 0.8 * card * 2**30)
                for dtype in args.dtypes for on in (0, 1)]
        print(f"| {card} GiB | " + " | ".join(map(str, fits)) + " |")


def largest(config: LMConfig, dtype: torch.dtype, checkpointing: bool, limit: float) -> int:
    """The most rows of 512 whose step stays below the limit."""
    rows = 1
    while predicted_bytes(config, rows + 1, 512, dtype, checkpointing)["all"] <= limit:
        rows += 1
    return rows


if __name__ == "__main__":
    main()
