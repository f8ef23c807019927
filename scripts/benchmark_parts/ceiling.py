"""The ceiling: how fast this device multiplies matrices of exactly the model's shapes.

A linear layer of a step with N positions is three products, equally expensive (2 N in out each):

    forward             (N, in) x (in, out)      y = x W^T
    gradient of input   (N, out) x (out, in)
    gradient of weight  (out, N) x (N, in)

so a step multiplies for 6 N x (numbers in the matrices) operations, the attention itself apart.
"""

import time
from collections.abc import Callable, Iterator

import torch

from model.device import cpu_has_bfloat16
from model.LMConfig import LMConfig
from scripts.benchmark_parts.figures import Bench, Figure, synchronise

PRODUCTS = 3  # for each layer, as above
GRAPH_CALLS = 100  # that one launch on a GPU repeats


def layers(config: LMConfig) -> dict[str, tuple[int, int, int]]:
    """Linear layers of one step: what -> (in, out, how many there are)."""
    C, F, L = config.dim, config.hidden_dim, config.n_layers
    kv = config.n_kv_heads * config.head_dim
    return {"q and o": (C, C, 2 * L), "k and v": (C, kv, 2 * L), "gate and up": (C, F, 2 * L),
            "down": (F, C, L), "output": (C, config.vocab_size, 1)}


def operations(config: LMConfig, positions: int) -> int:
    """Floating-point operations of a step's products with weights."""
    return sum(count * PRODUCTS * 2 * positions * inputs * outputs
               for inputs, outputs, count in layers(config).values())


def usable_dtypes(device: torch.device) -> tuple[list[torch.dtype], list[str]]:
    """Formats the device multiplies by itself, and a note on each that it would emulate."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return [torch.float32, torch.float16, torch.bfloat16], []
        return [torch.float32, torch.float16], ["bfloat16: this GPU emulates it, left out"]
    if device.type == "cpu":
        if cpu_has_bfloat16():
            return [torch.float32, torch.bfloat16], ["float16: left out on a CPU"]
        return [torch.float32], ["bfloat16: this processor emulates it, left out",
                                 "float16: left out on a CPU"]
    return [torch.float32, torch.float16], []


def products(inputs: int, outputs: int, positions: int, dtype: torch.dtype, device: torch.device
             ) -> Iterator[Callable]:
    """The three products of a layer, as functions without arguments."""
    x = torch.randn(positions, inputs, dtype=dtype, device=device)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
    grad = torch.randn(positions, outputs, dtype=dtype, device=device)
    yield lambda: x @ weight.T
    yield lambda: grad @ weight
    yield lambda: grad.T @ x


def seconds_of(function: Callable, device: torch.device, budget: float) -> float:
    """Mean time of a call, of as many as fit into the budget, in seconds; one more goes first."""
    function()
    calls_at_once = 1
    if device.type == "cuda":
        # Small products take less time than it takes to launch them; a graph launches many.
        function, calls_at_once = recorded(function), GRAPH_CALLS
        function()
    synchronise(device)
    calls, begun = 0, time.perf_counter()
    while True:
        function()
        synchronise(device)
        calls += calls_at_once
        if (passed := time.perf_counter() - begun) >= budget:
            return passed / calls


def recorded(function: Callable) -> Callable:
    """A function that repeats the kernels of GRAPH_CALLS calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            function()
    return graph.replay


def ceiling(config: LMConfig, positions: int, dtype: torch.dtype, device: torch.device,
            seconds: float) -> dict[str, float]:
    """Operations per second of each kind of layer and, weighted as a step does, of "all"."""
    shapes = layers(config)
    budget = seconds / len(shapes) / PRODUCTS
    rates, total = {}, 0.0
    for name, (inputs, outputs, count) in shapes.items():
        taken = sum(seconds_of(product, device, budget)
                    for product in products(inputs, outputs, positions, dtype, device))
        rates[name] = PRODUCTS * 2 * positions * inputs * outputs / taken
        total += count * taken
    rates["all"] = operations(config, positions) / total
    return rates


def section(bench: Bench) -> list[Figure]:
    """The ceiling in each dtype, at the first length."""
    length, args = next(iter(bench.args.items()))
    positions = args.batch_size * length
    dtypes, notes = usable_dtypes(bench.device)
    rounds = [{dtype: ceiling(args.config, positions, dtype, bench.device, bench.seconds)
               for dtype in dtypes} for _ in range(bench.repeats)]
    title = f"ceiling, {positions:,} positions"
    return [
        Figure(title, f"{str(dtype).removeprefix('torch.')}, {name}",
               tuple(rates[dtype][name] / 1e9 for rates in rounds), "GFLOP/s")
        for dtype in dtypes for name in ("all", *layers(args.config))
    ] + [Figure(title, note, ()) for note in notes]
