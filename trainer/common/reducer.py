"""The sum of all processes' gradients, made while the last backward of a step is still at work.

    backward of the last micro-batch     | block 8 | block 7 | ... | block 1 | embedding |
    gradients on their way                         | block 8 | block 7 | ... | block 1 | embedding |

What DistributedDataParallel does (arXiv:2006.15704), and one thing more: a process that runs out of
memory, anywhere in the step, can end its part so that no other waits for it. All processes send the
same parameters in the same order, each as soon as its gradient and all before it are there; whoever
ran out answers what is left with something. Those sums are worthless, and the step's end says so:
all then take the step again (`memory.py`). Not here: parts of models (`sharded_engine.py`).
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as torch_dist
from torch import nn

from model.transformer import MiniMindLM


class Reducer:
    """Makes the weights of all processes those of rank 0, and sums their gradients once a step."""

    def __init__(self, model: MiniMindLM):
        self.model, self.calls = model, []
        self.queue: deque[nn.Parameter] | None = None  # not sent yet; None: the sum has not begun
        for parameter in model.parameters():
            torch_dist.broadcast(parameter.detach(), src=0)
            parameter.register_post_accumulate_grad_hook(self.arrived)
        largest = max(model.parameters(), key=torch.numel)
        self.answer = torch.zeros_like(largest).flatten()  # made while there is memory

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Context of the backward after which every `grad` is the sum over all processes."""
        self.begin()
        yield
        while self.queue:  # those that a process did not use count as zeros
            if self.queue[0].grad is None:
                self.queue[0].grad = torch.zeros_like(self.queue[0])
            self.send(self.queue[0].grad)
        self.wait()

    def abandon(self) -> None:
        """Answers the other processes for the rest of the step, whose sums are then worthless."""
        if self.queue is None:
            self.begin()
        while self.queue:
            self.send(self.answer[: self.queue[0].numel()])
        self.wait()

    def reset(self) -> None:
        """The gradients have been used, or forgotten: another step may come."""
        self.queue = None

    def begin(self) -> None:
        self.queue = deque(reversed(self.model.parameters_in_use()))
        self.there = set()  # parameters whose gradient is complete

    def arrived(self, parameter: nn.Parameter) -> None:
        """Called by each backward when it has added to a parameter's gradient."""
        if not self.queue:  # an earlier micro-batch
            return
        self.there.add(parameter)
        while self.queue and self.queue[0] in self.there:
            self.send(self.queue[0].grad)

    def send(self, tensor: torch.Tensor) -> None:
        """Sends what stands for the parameter whose turn it is."""
        self.calls.append(torch_dist.all_reduce(tensor, async_op=True))
        self.queue.popleft()  # not before: a call that failed has to be answered

    def wait(self) -> None:
        """Until all sums are there; on a GPU it is the GPU that waits."""
        for call in self.calls:
            call.wait()
        self.calls.clear()
