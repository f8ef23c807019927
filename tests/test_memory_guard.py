"""The memory guard acting before memory runs out: after a step, and before the first one."""

import argparse
import itertools
from types import SimpleNamespace

import pytest
import torch
from out_of_memory import ON_CPU, ON_CUDA

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from trainer.common import memory
from trainer.common.distributed import Dist
from trainer.common.engine import Engine
from trainer.common.memory import FEWEST_STEPS, QUIET_STEPS, MemoryGuard, OutOfMemory
from trainer.common.optim import make_adamw

GIB = 2**30
ALONE = Dist(0, 0, 1, torch.device("cpu"))
FLAGS = {"batch_size": 8, "max_seq_len": 64, "memory_fraction": 0.8, "memory_limit_gb": 0}


class FakeGauge:
    """A device of 10 GiB, of which a step takes `base` and `per_row` for each row (GiB)."""

    def __init__(self, base=1.0, per_row=1.0):
        self.limit, self.base, self.per_row = 10 * GIB, base * GIB, per_row
        self.frees = 0

    def start(self):
        pass

    def peak(self):
        return self.base + self.guard.rows * self.per_row * GIB

    def free(self):
        self.frees += 1


def make_guard(monkeypatch, gauge, dist=ALONE, engine=None, **flags):
    """A guard with what it printed in `guard.lines`."""
    monkeypatch.setattr(memory, "make_gauge", lambda *args: gauge)
    engine = engine or SimpleNamespace(can_repeat=True, grows=False, bytes_to_come=lambda: 0)
    lines = []
    guard = MemoryGuard(argparse.Namespace(**{**FLAGS, **flags}), dist, engine, 32, lines.append)
    guard.lines, gauge.guard = lines, guard
    return guard


def rows_after(guard, steps, per_row=None):
    """The guard's rows after each of some steps; per_row: step -> GiB."""
    for step in steps:
        if per_row is not None:
            guard.gauge.per_row = per_row(step)
        guard.after(step)
        yield guard.rows


def changes(rows, asked=8):
    """(step, rows) where they changed."""
    return [(step, now) for step, (before, now) in enumerate(zip([asked, *rows], rows))
            if now != before]


def test_a_peak_above_the_threshold_halves(monkeypatch):
    """8 rows come to 9 of 10 GiB, above 80 %: 4 rows, said in one line with what was seen; the
    token budget goes with them.
    """
    guard = make_guard(monkeypatch, FakeGauge())
    assert list(rows_after(guard, range(60))) == [4] * 60
    [line] = guard.lines
    assert all(part in line for part in ("step 1", "9.0 GiB of 10.0 GiB", "80%", "now 4"))
    assert guard.token_budget == 4 * 64 and guard.gauge.frees == 1


def test_a_peak_below_the_threshold_is_left_alone(monkeypatch):
    """Nothing changes, and nothing grows beyond what was asked, in a thousand steps."""
    guard = make_guard(monkeypatch, FakeGauge(per_row=0.1))
    assert set(rows_after(guard, range(1000))) == {8} and not guard.lines


def test_changes_are_rare(monkeypatch):
    """With memory too small for even one row, a change at most every 20 steps; one row goes on."""
    guard = make_guard(monkeypatch, FakeGauge(base=9))
    steps = [step for step, _ in changes(list(rows_after(guard, range(200))))]
    assert len(steps) == 3 and guard.rows == 1
    assert min(later - step for step, later in itertools.pairwise(steps)) >= FEWEST_STEPS


@pytest.mark.parametrize(("per_row", "grows"), [(0.8, True), (0.9, False)])
def test_growth(monkeypatch, per_row, grows):
    """After 100 quiet steps the rows double only if bytes per row say that the double fits (1 GiB
    and 8 rows of 0.8 do, of 0.9 do not), and never beyond what was asked.
    """
    guard = make_guard(monkeypatch, FakeGauge())
    rows = list(rows_after(guard, range(400), lambda step: per_row if step else 1.0))
    grown = changes(rows)[1:]
    assert len(grown) == grows and all(now == 8 and step >= QUIET_STEPS for step, now in grown)
    assert len(guard.lines) == 1 + grows


def test_growth_is_not_misled_by_a_short_step(monkeypatch):
    """An epoch's last step may hold one row: its small peak says nothing about full ones."""
    guard = make_guard(monkeypatch, FakeGauge())
    rows = rows_after(guard, range(400), lambda step: 0.1 if step % 10 == 9 else 1.0)
    assert changes(list(rows)) == [(0, 4)]


def test_growth_after_running_out(monkeypatch):
    """A halving for want of memory starts the quiet spell as well, and its peak, that of the
    attempt that failed, does not halve again.
    """
    guard = make_guard(monkeypatch, FakeGauge(per_row=0.2))
    list(rows_after(guard, range(300)))
    guard.halve("out of memory")
    peaks = iter([9.5 * GIB])
    monkeypatch.setattr(guard.gauge, "peak", lambda: next(peaks, 2 * GIB))
    rows = list(rows_after(guard, range(300, 500)))
    assert rows.index(8) >= QUIET_STEPS and set(rows) == {4, 8}


@pytest.mark.parametrize("other_peak", [5 * GIB, 9 * GIB])
def test_processes_agree_on_the_highest_peak(monkeypatch, other_peak):
    """What any process sees counts for all, so that all cut their steps alike."""
    class TwoProcesses(Dist):
        def max(self, *values):
            return [max(pair) for pair in zip(values, (other_peak, other_peak / 8))]

    dist = TwoProcesses(0, 0, 2, torch.device("cpu"))
    guard = make_guard(monkeypatch, FakeGauge(per_row=0.1), dist)
    guard.after(0)
    assert guard.rows == (4 if other_peak == 9 * GIB else 8)


# --- The probe

class Small(MiniMindLM):
    """A model that notes the rows it is given, and fails where there are too many."""

    def __init__(self, most_rows=99, error=ON_CUDA):
        torch.manual_seed(0)
        super().__init__(LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=80, dropout=0.1))
        self.most_rows, self.error, self.seen = most_rows, error, []

    def forward(self, input_ids, **others):
        self.seen.append(len(input_ids))
        if len(input_ids) > self.most_rows:
            raise self.error[0](self.error[1])
        return super().forward(input_ids, **others)


def probed(monkeypatch, model, gauge, predicted=9 * GIB, **flags):
    """A guard after its probe of a model for which so many bytes are predicted."""
    monkeypatch.setattr(memory, "predicted_bytes", lambda *args: {"all": predicted})
    engine = Engine(model, make_adamw(model, 0.1), ALONE, torch.float32)
    guard = make_guard(monkeypatch, gauge, engine=engine, **flags)
    guard.probe(model, torch.float32)
    return guard


@pytest.mark.parametrize("error", [ON_CUDA, ON_CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize(("flags", "tried"), [({}, [8, 4, 2]),
                                              ({"batch_size": 0}, [32, 16, 8, 4, 2])])
def test_the_probe_halves_until_it_fits(monkeypatch, error, flags, tried):
    """From what was asked down, with 0 from all rows that a step gives to a process; weights,
    gradients and random states are as before.
    """
    model = Small(most_rows=3, error=error)
    before = [parameter.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    guard = probed(monkeypatch, model, FakeGauge(per_row=0.1), **flags)
    assert guard.rows == 2 and list(dict.fromkeys(model.seen)) == tried
    assert len(guard.lines) == len(tried) - 1
    assert all("before the first step: memory ran out" in line for line in guard.lines)
    assert torch.equal(torch.get_rng_state(), random)
    for parameter, old in zip(model.parameters(), before):
        assert torch.equal(parameter, old) and parameter.grad is None


def test_the_probe_heeds_the_threshold(monkeypatch):
    """9 GiB for 8 rows fit into 10, but not into 80 % of them."""
    guard = probed(monkeypatch, Small(), FakeGauge())
    assert guard.rows == 4 and "9.0 GiB of 10.0 GiB" in guard.lines[0]


def test_the_probe_reckons_with_the_moments(monkeypatch):
    """The first update allocates them, after the probe: 7.9 GiB and 0.2 for them are too much."""
    gauge = FakeGauge(base=7.1, per_row=0.1)
    monkeypatch.setattr(Engine, "bytes_to_come", lambda engine: 0.2 * GIB)
    assert probed(monkeypatch, Small(), gauge).rows == 4


def test_no_probe_where_all_is_well(monkeypatch):
    """Half of the threshold is more than predicted: nothing is tried."""
    model = Small()
    guard = probed(monkeypatch, model, FakeGauge(), predicted=3 * GIB)
    assert guard.rows == 8 and model.seen == []


def test_the_probe_at_one_row(monkeypatch):
    """One row that does not fit is an error that names the flags that help."""
    with pytest.raises(OutOfMemory, match=r"max_seq_len.*gradient_checkpointing.*dim"):
        probed(monkeypatch, Small(most_rows=0), FakeGauge())


def test_the_probe_passes_on_other_errors(monkeypatch):
    """A RuntimeError that is not about memory is no sign of too many rows."""
    with pytest.raises(RuntimeError, match="mat1"):
        probed(monkeypatch, Small(most_rows=0, error=(RuntimeError, "mat1 and mat2")), FakeGauge())
