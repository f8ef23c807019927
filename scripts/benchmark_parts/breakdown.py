"""Where a step's time goes: by parts of the program, and by kernels; and the memory it takes."""

import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from model import transformer
from scripts.benchmark_parts.figures import synchronise
from scripts.memory_table import tensor_peak

ATTENTION, FEED_FORWARD, NORMS = "attention", "feed-forward", "norms and rotary"
LOSS, FORWARD = "embedding and loss (with the loss's gradient)", "the rest of the forward"
BACKWARD, OPTIMIZER, REST = "backward", "optimizer", "the rest of the step"
PARTS = (ATTENTION, FEED_FORWARD, NORMS, LOSS, FORWARD, BACKWARD, OPTIMIZER, REST)
CLASSES = {"Attention": ATTENTION, "FeedForward": FEED_FORWARD, "RMSNorm": NORMS,
           "Embedding": LOSS}
FUNCTIONS = {"way_to_attend": ATTENTION, "rotary_table": NORMS, "rotate": NORMS,
             "output_loss": LOSS}

# The first that fits an operator's name. Outside the optimizer, batched products and softmax occur
# in attention alone; linear layers are mm, and the loss takes log_softmax.
KERNELS = {
    "optimizer": r"adam|muon|foreach",
    "attention, both ways": r"scaled_dot_product|flash|efficient_attention|flex_attention|bmm|"
                            r"aten::_softmax|aten::_safe_softmax",
    "matrix products": r"::(mm|addmm|matmul|linear|mkldnn_linear|_addmm)",
    "compiled": r"compiled|triton_|cpp_fused",
    "log-softmax of the loss": r"log_softmax|nll_loss|cross_entropy",
    "copies": r"copy|clone|::cat|contiguous|::_to_|::to$|fill|zero|index|gather|scatter|repeat",
    "elementwise": r"::(mul|add|sub|div|neg|silu|silu_backward|rsqrt|pow|square|where|exp|cos|sin|"
                   r"sigmoid|mean|sum|eq|ne|le|ge|lt|gt|bitwise_and|logical_and|sqrt|_conj)_?$",
}
OTHER, BETWEEN = "other", "between kernels"


class Stopwatch:
    """Seconds in named parts, each less the parts that it calls."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.inside = device, Counter(), [REST]
        self.mark()

    def mark(self) -> None:
        synchronise(self.device)
        self.since = time.perf_counter()

    def charge(self) -> None:
        """What passed since the last time belongs to the innermost part."""
        begun = self.since
        self.mark()
        self.seconds[self.inside[-1]] += self.since - begun

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, its time charged to the part."""
        def wrapper(*args, **kwargs):
            if BACKWARD in self.inside:  # gradient checkpointing computes a block anew in there
                return function(*args, **kwargs)
            self.charge()
            self.inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self.inside.pop()

        return wrapper


@contextlib.contextmanager
def watched(run, watch: Stopwatch) -> Iterator[None]:
    """The parts of a run report to the watch. A compiled forward has no parts, it stays whole."""
    def watch_over(owner, name: str, part: str) -> None:
        stack.enter_context(patch.object(owner, name, watch.timed(part, getattr(owner, name))))

    with contextlib.ExitStack() as stack:
        watch_over(run.engine, "backward", BACKWARD)
        watch_over(run.engine, "update", OPTIMIZER)
        if not run.args.use_compile:
            for module in run.model.modules():
                if type(module).__name__ in CLASSES:
                    watch_over(module, "forward", CLASSES[type(module).__name__])
            for name, part in FUNCTIONS.items():
                if hasattr(transformer, name):
                    watch_over(transformer, name, part)
        watch_over(run, "train_model", FORWARD)
        yield


def parts(run, device: torch.device, seconds: float) -> dict[str, float]:
    """Shares of our step's time, 0..1, over about so many seconds of steps, of what was seen."""
    begun = time.perf_counter()
    watch = Stopwatch(device)
    with watched(run, watch):
        watch.mark()
        while watch.seconds.total() == 0 or time.perf_counter() - begun < seconds:
            run.step()
        watch.charge()
    return {part: watch.seconds[part] / watch.seconds.total()
            for part in PARTS if watch.seconds[part]}


def kind_of(operator: str) -> str:
    """Which of KERNELS an operator such as `aten::mm` is, or "other"."""
    return next((kind for kind, names in KERNELS.items() if re.search(names, operator, re.I)),
                OTHER)


def of_optimizer(event) -> bool:
    """True for what an optimizer's step calls; torch names the step itself."""
    while event is not None and not event.name.startswith("Optimizer.step"):
        event = event.cpu_parent
    return event is not None


def profiled_step(run, device: torch.device) -> tuple[dict[str, float], int]:
    """One step of a run: shares of its time by kind of kernel, 0..1, and its peak in bytes.

    The peak is what weights and moments take, plus the most that the step's tensors did beside
    them. On a CPU kernels run one after the other, so what is left over is the interpreter's; on
    CUDA it is the time in which none runs.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    synchronise(device)
    with profile(activities=activities, profile_memory=not on_cuda) as profiler:
        begun = time.perf_counter()
        run.step()
        synchronise(device)
        wall = time.perf_counter() - begun
    rise = torch.cuda.max_memory_allocated(device) - before if on_cuda else tensor_peak(profiler)
    seconds = Counter(dict.fromkeys((*KERNELS, OTHER), 0.0))
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:  # a kernel's time is its operator's, too
            own = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            seconds["optimizer" if of_optimizer(event) else kind_of(event.name)] += own / 1e6
    shares = {kind: taken / wall for kind, taken in seconds.items()}
    return {**shares, BETWEEN: max(1 - sum(shares.values()), 0.0)}, at_rest(run) + rise


def at_rest(run) -> int:
    """Bytes of a run's weights and of what its optimizer keeps."""
    moments = itertools.chain.from_iterable(state.values()
                                            for state in run.optimizer.state.values())
    tensors = [*run.model.parameters(), *(m for m in moments if isinstance(m, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)
