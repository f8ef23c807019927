"""Hooks: what tests put into the processes of `processes.py`, to look into one, or to break it.

Each is called in the new process before the script, with the script's module and a report, a dict
that the test finds again in `Launch.seen`.
"""

import os
import signal
import time


def watch(script, report: dict) -> None:
    """Notes the engine, the rows read, forwards, token caches built, and sums of gradients."""
    from dataset import token_cache
    from dataset.loader import PackedRows
    from model.transformer import MiniMindLM
    from trainer.common.reducer import Reducer

    report.update(rows=[], forwards=0, builds=0, reductions=0, reduced_numbers=0)
    get, forward, build = PackedRows.__getitem__, MiniMindLM.forward, token_cache.build
    begin, send, make_engine = Reducer.begin, Reducer.send, script.make_engine

    def noted_engine(*args):
        engine = make_engine(*args)
        report["engine"] = type(engine).__name__ + str(getattr(engine, "stage", ""))
        return engine

    def noted_get(self, row):
        report["rows"].append(int(row))
        return get(self, row)

    def noted_forward(self, *args, **kwargs):
        report["forwards"] += 1
        return forward(self, *args, **kwargs)

    def noted_build(*args):
        report["builds"] += 1
        return build(*args)

    def noted_begin(self):
        report["reductions"] += 1
        begin(self)

    def noted_send(self, tensor):
        report["reduced_numbers"] += tensor.numel()
        send(self, tensor)

    script.make_engine = noted_engine
    PackedRows.__getitem__, MiniMindLM.forward = noted_get, noted_forward
    token_cache.build, Reducer.begin, Reducer.send = noted_build, noted_begin, noted_send


def at_step(script, step: int, action) -> None:
    """Calls action() before a step (counted from 0) of a script."""
    learning_rate = script.learning_rate

    def noted(now, *args):
        if now == step:
            action()
        return learning_rate(now, *args)

    script.learning_rate = noted


def die(script, report: dict) -> None:
    """SIGKILL before the step $DIE_AT, on the rank $DIE_RANK or on all."""
    if os.environ.get("DIE_RANK", os.environ["RANK"]) == os.environ["RANK"]:
        at_step(script, int(os.environ["DIE_AT"]), lambda: os.kill(os.getpid(), signal.SIGKILL))


def nan(script, report: dict) -> None:
    """A loss that is not a number, in step 2 of the last process."""
    from model.transformer import MiniMindLM

    forward, factor = MiniMindLM.forward, [1.0]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        at_step(script, 2, lambda: factor.__setitem__(0, float("nan")))
        at_step(script, 3, lambda: factor.__setitem__(0, 1.0))
    MiniMindLM.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) * factor[0]


def overflow(script, report: dict) -> None:
    """A gradient that is infinite, of a loss that is not, in step 2 of the last process."""
    make, factor = script.make_engine, [1.0]

    def made(*args):
        engine = make(*args)
        backward = engine.backward
        engine.backward = lambda loss: backward(loss * factor[0])
        return engine

    script.make_engine = made
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        at_step(script, 2, lambda: factor.__setitem__(0, float("inf")))
        at_step(script, 3, lambda: factor.__setitem__(0, 1.0))


def unsupervised(script, report: dict) -> None:
    """Two of three rows hold no token that counts."""
    from dataset.loader import PackedRows

    get = PackedRows.__getitem__

    def without_mask(self, row):
        pieces = get(self, row)
        return pieces if row % 3 == 0 else [
            piece._replace(loss_mask=0 * piece.loss_mask, text_bytes=0.0) for piece in pieces]

    PackedRows.__getitem__ = without_mask


def late(script, report: dict) -> None:
    """All but the main process take longer to open their data."""
    open_data = script.open_data

    def opened(*args):
        time.sleep(0.5 * (os.environ["RANK"] != "0"))
        return open_data(*args)

    script.open_data = opened


def impatient(script, report: dict) -> None:
    """Waits seconds, not minutes, for others to come."""
    from trainer.common import distributed

    distributed.START_SECONDS = 2


def compiled(script, report: dict) -> None:
    """torch.compile counts its graphs, and runs them as they are: making code takes a minute."""
    import torch

    compile_model, report["graphs"] = torch.compile, 0

    def counted(graph, inputs):
        report["graphs"] += 1
        return graph.forward

    torch.compile = lambda model: compile_model(model, backend=counted)


def autocast_as_on_a_gpu(script, report: dict) -> None:
    """torch.is_autocast_enabled() without a device is about GPUs; here it is about the CPU.

    Notes the number formats of what the query and key matrices give.
    """
    import torch

    from model import transformer

    enabled, rotate = torch.is_autocast_enabled, transformer.rotate
    torch.is_autocast_enabled = lambda device="cpu": enabled(device)
    report["dtypes"] = []

    def noted(x, *table):
        if str(x.dtype) not in report["dtypes"]:
            report["dtypes"].append(str(x.dtype))
        return rotate(x, *table)

    transformer.rotate = noted


HOOKS = {hook.__name__: hook for hook in (watch, die, nan, overflow, unsupervised, late, impatient,
                                          compiled, autocast_as_on_a_gpu)}
