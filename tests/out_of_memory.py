"""Memory that runs out where a test wants it to, in this process or in one of two.

    python out_of_memory.py    runs two processes for each line of standard input, e.g.
        {"folder": ..., "name": "a", "command": [SCRIPT, FLAGS...], "faults": {1: {5: "forward"}}}
                               and answers with their exit statuses; output goes to a.0.out ...

On rank 1 the forward of the micro-batch that is number 5 since the start, counted from 0 and with
those of repeated steps, fails half-way. `backward` fails when half of the gradients are there.
The two are forks of a process that has imported torch, which takes longer than their whole run.
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.transformer import Block, MiniMindLM

SECONDS = 60  # that two processes may take
ON_CUDA = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."
ON_CPU = RuntimeError, ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                        "allocate memory: you tried to allocate 64 bytes. Error code 12")
FAILED = weakref.WeakSet()  # faults in backward, as long as their graph is alive


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
            FAILED.add(ctx)
            raise ctx.error[0](ctx.error[1])
        return grad, None, None


def inject(set_attribute, faults: dict[int, str], error=ON_CUDA) -> list[int]:
    """Lets micro-batches of a model of two blocks fail; returns a list that gets each one's rows.

    set_attribute is `setattr`, or a monkeypatch's. faults: number of a micro-batch -> where.
    """
    forward, forward_block, sizes = MiniMindLM.forward, Block.forward, []
    FAILED.clear()

    def counted(self, input_ids, *others, **named):
        if torch.is_grad_enabled():
            assert not FAILED, "what an earlier attempt computed is still held"
            sizes.append(len(input_ids))
        return forward(self, input_ids, *others, **named)

    def second_fails(self, x, *others):
        if torch.is_grad_enabled():
            second_fails.calls += 1
            if second_fails.calls % 2 == 0:
                x = Fault.apply(x, faults.get(len(sizes) - 1), error)
        return forward_block(self, x, *others)

    second_fails.calls = 0
    set_attribute(MiniMindLM, "forward", counted)  # a block may see rows laid end to end
    set_attribute(Block, "forward", second_fails)
    return sizes


def run_rank(rank: int, port: int, launch: dict) -> None:
    """Becomes one of two processes, in a fork, with the environment that torchrun would give it."""
    for number, end in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{launch['name']}.{rank}.{end}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="localhost", MASTER_PORT=str(port))
    faults = launch["faults"].get(str(rank), {})
    inject(setattr, {int(number): where for number, where in faults.items()}, ON_CPU)
    sys.argv = launch["command"]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for thread in threading.enumerate():  # saves that are being written
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        os._exit(code)


def launch_two(launch: dict) -> list[int]:
    """Runs two processes; returns their exit statuses, -SIGKILL for those that never end."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        processes.append(os.fork())
        if not processes[-1]:
            run_rank(rank, port, launch)
    codes, deadline = {}, time.monotonic() + SECONDS
    while len(codes) < 2:
        for rank, process in enumerate(processes):
            if rank not in codes and time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                codes[rank] = -signal.SIGKILL
                os.waitpid(process, 0)
            elif rank not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[rank] for rank in range(2)]


def main():
    import torch._dynamo  # noqa: F401 - what an optimizer imports when it is made

    from trainer import train_pretrain  # noqa: F401 - forks have all this for nothing

    for line in sys.stdin:
        launch = json.loads(line)
        os.chdir(launch["folder"])
        print(json.dumps(launch_two(launch)), flush=True)


if __name__ == "__main__":
    main()
