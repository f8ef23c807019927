"""Memory that runs out where a test wants it to, in this process or in those of torchrun.

    FAULTS='{"1": {"5": "forward"}}' torchrun ... out_of_memory.py SCRIPT FLAGS...

On rank 1 the forward of the micro-batch that is number 5 since the start, counted from 0 and with
those of repeated steps, fails half-way. `backward` fails when half of the gradients are there.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.transformer import Block

ON_CUDA = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."
ON_CPU = RuntimeError, ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                        "allocate memory: you tried to allocate 64 bytes. Error code 12")


class Fault(torch.autograd.Function):
    """x as it is, and an error in forward or in backward."""

    @staticmethod
    def forward(ctx, x, where, error):
        ctx.where, ctx.error = where, error
        if where == "forward":
            raise error[0](error[1])
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            raise ctx.error[0](ctx.error[1])
        return grad, None, None


def inject(set_attribute, faults: dict[int, str], error=ON_CUDA) -> list[int]:
    """Lets micro-batches of a model of two blocks fail; returns a list that gets each one's rows.

    set_attribute is `setattr`, or a monkeypatch's. faults: number of a micro-batch -> where.
    """
    forward, sizes = Block.forward, []

    def second_fails(self, x, *others):
        if torch.is_grad_enabled():
            second_fails.calls += 1
            if second_fails.calls % 2:
                sizes.append(len(x))
            else:
                x = Fault.apply(x, faults.get(len(sizes) - 1), error)
        return forward(self, x, *others)

    second_fails.calls = 0
    set_attribute(Block, "forward", second_fails)
    return sizes


def main():
    faults = json.loads(os.environ["FAULTS"]).get(os.environ["RANK"], {})
    inject(setattr, {int(number): where for number, where in faults.items()}, ON_CPU)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
