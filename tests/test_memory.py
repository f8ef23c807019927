"""The memory guard in one process: steps that are taken again, and micro-batches that fit."""

import pytest
import torch
from out_of_memory import ON_CPU, ON_CUDA, inject
from resume_checks import AGAIN, Runs, assert_same, data_flags, join_writers

from trainer.common.memory import MemoryGuard, is_out_of_memory

# 28 rows: steps of 12, 12 and 4 rows, in micro-batches of 4 (numbers 0-2, 3-5, 6), with a save
# after each.
FLAGS = ("--batch_size", 4, "--accumulation_steps", 3, "--save_interval", 1,
         "--learning_rate", 1e-3)
POSITIONS = [(number, where) for number in range(7) for where in ("forward", "backward")]


class GuardRuns(Runs):
    """Runs on 28 rows whose memory runs out, or whose micro-batches change on their own."""

    def run(self, *flags, name="run", faults=None, error=ON_CUDA, **rows_from_step):
        """Returns (exit status, rows of each micro-batch tried).

        rows_from_step: e.g. s1=2, micro-batches of two rows from step 1 (counted from 0) on.
        """
        attempts, step = MemoryGuard.attempts, iter(range(99))

        def cut(guard):
            guard.rows = rows_from_step.get(f"s{next(step)}", guard.rows)
            return attempts(guard)

        with pytest.MonkeyPatch.context() as patch:
            sizes = inject(patch.setattr, faults or {}, error)
            patch.setattr(MemoryGuard, "attempts", cut)
            status = self.start(*data_flags(self.tmp_path), *FLAGS, *flags, name=name)
        join_writers()
        return status, sizes


@pytest.fixture
def runs(tmp_path, monkeypatch, signals):
    return GuardRuns(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def module_runs(tmp_path_factory):
    """One folder for undisturbed runs, which several tests compare with."""
    with pytest.MonkeyPatch.context() as patch:
        yield GuardRuns(tmp_path_factory.mktemp("undisturbed"), patch)


@pytest.fixture
def undisturbed(module_runs, signals):
    """undisturbed(name, flags, s1=2) -> the runs' folder, after a run that nothing befell."""
    def get(name, *flags, **rows_from_step):
        if not module_runs.path(".pth", name).exists():
            assert module_runs.run(*flags, name=name, **rows_from_step)[0] == 0
        return module_runs

    return get


def memory_lines(capsys):
    """What the guard printed."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory:")]


def assert_close(runs, others, name, atol=1e-6):
    """Log and weights of two runs agree to rounding."""
    for row, other in zip(runs.curve(), others.curve(name), strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    weights, expected = (state["engine"]["model"] for state in (runs.state(), others.state(name)))
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-5, atol=atol)


def same_but_last_change(result):
    """A run's result without what only the guard's history tells."""
    return {key: value for key, value in result.items() if not key.endswith(".last_change")}


@pytest.mark.parametrize(("number", "where"), POSITIONS)
def test_a_step_is_taken_again(runs, undisturbed, capsys, number, where):
    """P1: wherever in a step memory runs out, the losses, gradient norms and weights are those of
    the undisturbed run; micro-batches have half the rows from there on, and one line says so.
    """
    error = (ON_CUDA, ON_CPU)[(number + len(where)) % 2]
    status, sizes = runs.run(faults={number: where}, error=error)
    assert status == 0
    assert len(memory_lines(capsys)) == 1
    in_step = number % 3 if number < 6 else 0
    assert sizes[: number + 1] == [4] * (number + 1)
    assert sizes[number + 1 :] == [2] * (28 - 4 * (number - in_step) >> 1)
    assert_close(runs, undisturbed("plain"), "plain")


@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_attempt_leaves_no_trace(runs, undisturbed, number, where, dtype):
    """Dropout draws in the repeated step what it would have drawn, and the scaler of float16 knows
    nothing: to the bit, the run is one that had the smaller micro-batches from this step on.
    """
    flags = ("--dropout", 0.1, "--dtype", dtype)
    assert runs.run(*flags, faults={number: where})[0] == 0
    reference = undisturbed(f"dropout_{dtype}", *flags, s1=2)
    assert_same(*map(same_but_last_change, (runs.result(),
                                            reference.result(f"dropout_{dtype}"))))


def test_twice_in_a_step(runs, undisturbed, capsys):
    """Memory that runs out in the second attempt as well: a quarter of the rows, and two lines."""
    status, sizes = runs.run(faults={4: "backward", 7: "forward"})
    assert status == 0 and sizes == [4] * 5 + [2] * 3 + [1] * 16
    first, second = memory_lines(capsys)
    assert "at 4 rows" in first and "now 2" in first and "at 2 rows" in second
    assert_close(runs, undisturbed("plain"), "plain")


def test_one_row_that_does_not_fit(runs, capsys):
    """Then the run ends with status 2 and names the flags that help; what it saved is resumed."""
    status, sizes = runs.run(faults={3: "forward", 4: "backward", 5: "backward"})
    assert status == 2 and sizes == [4, 4, 4, 4, 2, 1]
    message = capsys.readouterr().err.splitlines()[-1]
    for flag in ("--max_seq_len", "--gradient_checkpointing", "--dim"):
        assert flag in message
    assert runs.run(*AGAIN) == (0, [4, 4, 4, 4])


def test_other_errors_are_not_swallowed(runs):
    """A RuntimeError that is not about memory ends the run."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        runs.run(faults={4: "forward"}, error=(RuntimeError, "mat1 and mat2 have other shapes"))


def test_what_is_out_of_memory():
    """What torch raises for more than a machine has, and nothing else that it raises."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried"))
    for other in (RuntimeError("size mismatch"), ValueError("out of memory"), OSError(28), None,
                  IndexError("out of range"), RuntimeError("CUDA error: device-side assert")):
        assert not is_out_of_memory(other)


@pytest.mark.parametrize("number", [0, 3])
def test_a_resume_after_a_halving_is_exact(runs, undisturbed, capsys, number):
    """P4: a run that goes on after a halving, in this launch or an earlier one, cuts its steps
    alike and ends, to the bit, where it would have; another --batch_size is heeded.
    """
    flags = ("--dropout", 0.1, "--epochs", 2)  # a save after each of six steps
    faults = {number: "backward"}
    runs.killed("before a step", 3, *data_flags(runs.tmp_path), *FLAGS, *flags, name="other")
    with pytest.MonkeyPatch.context() as patch:
        inject(patch.setattr, faults)
        runs.killed("before a step", 3, *data_flags(runs.tmp_path), *FLAGS, *flags)
    status, sizes = runs.run(*flags, *AGAIN)
    assert status == 0 and set(sizes) == {2}
    assert runs.run(*flags, faults=faults, name="whole")[0] == 0
    result, whole = runs.result(), runs.result("whole")
    assert_same(result, whole)
    assert runs.state()["memory"]["rows"] == 2
    status, sizes = runs.run(*flags, *AGAIN, "--batch_size", 3, name="other")
    assert status == 0 and sizes == [3] * 4 + [3] * 4 + [3, 1]


# 16 rows a step: 28 rows are steps of 16 and 12.
AS_MANY_AS_FIT = ("--batch_size", 0, "--accumulation_steps", 2)


@pytest.mark.parametrize(("faults", "expected"), [
    ({}, [16, 12]), ({0: "backward"}, [16, 8, 8, 8, 4]),
], ids=["fits", "does not fit"])
def test_as_many_rows_as_fit(runs, undisturbed, faults, expected):
    """--batch_size 0: a step has the rows that --batch_size 8 gives it, in one micro-batch if they
    fit; the losses are the same.
    """
    assert runs.run(*AS_MANY_AS_FIT, faults=faults) == (0, expected)
    assert runs.state()["global_batch"] == 16
    eight = undisturbed("eight", *AS_MANY_AS_FIT, "--batch_size", 8)
    # Another cut shares attention calls otherwise: a gradient near its rounding moves AdamW's step
    # of 1e-3 by a hundredth.
    assert_close(runs, eight, "eight", atol=1e-5)


def test_a_resume_with_as_many_rows_as_fit(runs, capsys):
    """Whatever --accumulation_steps says then, a resumed run keeps the rows of its steps, and the
    micro-batch that was found to fit: to the bit, it is the uninterrupted run.
    """
    flags, faults = (*AS_MANY_AS_FIT, "--epochs", 2), {0: "backward"}
    with pytest.MonkeyPatch.context() as patch:
        inject(patch.setattr, faults)
        runs.killed("before a step", 1, *data_flags(runs.tmp_path), *FLAGS, *flags)
    capsys.readouterr()
    assert runs.run(*flags, *AGAIN, "--accumulation_steps", 1) == (0, [8, 4, 8, 8, 8, 4])
    assert "a step keeps its 16 rows, though the flags say 8" in capsys.readouterr().out
    assert runs.run(*flags, faults=faults, name="whole")[0] == 0
    assert_same(runs.result(), runs.result("whole"))
