"""Promise P4: a run that was killed and resumed is, to the bit, the run that was not."""

import importlib.machinery
import signal
import sys
import time
import types

import pytest
import torch
from resume_checks import AGAIN, FLAGS, STAGES, assert_same, data_flags

from model.transformer import MiniMindLM
from trainer.common.logger import cut_metrics
from trainer.common.stop import Stop


@pytest.fixture(scope="module")
def finished():
    """The results of uninterrupted runs, by stage."""
    return {}


DEATHS = {
    "at a step border": [("before a step", 9, 0)],
    "inside a step": [("in a micro-batch", 5, 0)],
    "after an update that no log has seen": [("after the update", 10, 0)],
    "at the end of an epoch": [("before the save", 6, 0)],
    "at the beginning of an epoch": [("before a step", 7, 0)],
    "while a save is written": [("before a step", 9, 8)],
    "before the first save is written": [("in a micro-batch", 5, 4)],
    "during the last step": [("in a micro-batch", 13, 0)],
    "while the last save is written": [("after the last save", 13, 14)],
    "after the last save": [("after the last save", 13, 0)],
    "three times": [("in a micro-batch", 4, 0), ("before the save", 7, 0),
                    ("before a step", 13, 12)],
}


@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed_is_uninterrupted(runs, finished, stage, deaths):
    """P4, A44: the same weights, moments, random states and curve, to the bit, with dropout."""
    flags, script = (*data_flags(runs.tmp_path, stage), *FLAGS), STAGES[stage]
    if stage not in finished:
        assert runs.start(*flags, script=script, name="whole") == 0
        finished[stage] = runs.result("whole")
        assert [(row["step"], row.get("epoch")) for row in runs.rows("whole")] == [
            (3, 0), (5, None), (6, 0), (9, 1), (10, None), (12, 1), (14, 1), (14, None)]
    for number, (instant, step, lost_save) in enumerate(DEATHS[deaths]):
        runs.killed(instant, step, *flags, *(AGAIN if number else ()), lost_save=lost_save,
                    script=script)
    assert runs.start(*flags, *AGAIN, script=script) == 0
    assert_same(runs.result(), finished[stage])


def test_killed_between_the_last_state_and_weights(runs, data):
    """P5: the weights of a finished run are those of its last step, wherever its save died."""
    flags = (*data, *FLAGS)
    assert runs.start(*flags, name="whole") == 0
    runs.killed("after the last save", 13, *flags, half_save=14)
    assert runs.start(*flags, *AGAIN) == 0
    assert_same(runs.result(), runs.result("whole"))


def test_float16_keeps_its_scale(runs, data, monkeypatch):
    """P4: the loss scale, halved once, and the steps since then go on; so do the skipped steps."""
    forward, calls = MiniMindLM.forward, []

    def once_too_large(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs) * (1e30 if len(calls) == 3 else 1)

    monkeypatch.setattr(MiniMindLM, "forward", once_too_large)
    flags = (*data, *FLAGS, "--max_steps", 7, "--dtype", "float16", "--eval_interval", 0)
    assert runs.start(*flags, name="whole") == 0
    calls.clear()
    runs.killed("in a micro-batch", 5, *flags)
    assert runs.start(*flags, "--dtype", "auto", *AGAIN) == 0  # auto: the dtype that the run has
    scaler = runs.state()["engine"]["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (32768, 5)
    assert_same(runs.result(), runs.result("whole"))


def plain(value):
    """Every value in nested dicts and lists."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from plain(item)
    else:
        yield value


def test_what_a_state_holds(runs, data, tokenizer):
    """A43, A44, P7: float32 throughout, random states, arguments, fingerprints; plain values only.
    """
    assert runs.start(*data, *FLAGS, "--max_steps", 3) == 0
    state = runs.state()
    assert {type(value) for value in plain(state)} <= {torch.Tensor, str, int, float, bool,
                                                       type(None)}
    assert (state["format"], state["step"], state["total_steps"], state["global_batch"],
            state["memory"]["rows"], state["world_size"]) == (1, 3, 3, 4, 2, 1)
    engine = state["engine"]
    for name, weight in engine["model"].items():
        moments = engine["optimizer"][name]
        assert {tensor.dtype for tensor in (weight, *moments.values())} == {torch.float32}
        assert moments["step"] == 3 and moments["exp_avg_sq"].shape == weight.shape
    embedding = engine["model"]["model.embed_tokens.weight"]
    assert not torch.equal(embedding, embedding.half().float()), "rounded to half precision"
    assert set(state["random"][0]) == {"python", "numpy", "torch"}
    assert state["arguments"]["seed"] == 42 and state["arguments"]["dtype"] == "float32"
    assert set(state["facts"]) == {"the training data", "the validation data", "the tokenizer"}
    assert state["facts"]["the tokenizer"] == tokenizer.hash
    assert {"tokens", "seconds", "window_nats", "tracker_id"} <= set(state["log"])
    assert "in_a_row" in state["finite"] and "skipped_steps" in engine


def interrupted(monkeypatch, validation):
    """In this process a SIGTERM comes in the validation of that number."""
    until_asked, seen = Stop.until_asked, []

    def with_signal(stop, items):
        seen.append(1)
        if len(seen) == validation:
            signal.raise_signal(signal.SIGTERM)
            while not stop.asked:
                time.sleep(0.001)
        return until_asked(stop, items)

    monkeypatch.setattr(Stop, "until_asked", with_signal)


@pytest.mark.parametrize("deaths", [[], [("before a step", 6)], [("before a step", 5)] * 2])
def test_a_validation_cut_short_is_made_up_for(runs, data, monkeypatch, deaths):
    """A47: a signal in a validation is not held up by it; the resumed run begins with it, and
    has it once, even if it dies before the next save.
    """
    flags = (*data, *FLAGS, "--max_steps", 9)
    assert runs.start(*flags, name="whole") == 0
    with monkeypatch.context() as patch:
        interrupted(patch, validation=1)
        assert runs.start(*flags) == 128 + signal.SIGTERM
    assert [row["step"] for row in runs.rows()] == [3] and runs.state()["step"] == 5
    for death in deaths:
        runs.killed(*death, *flags, *AGAIN)
        assert [row["step"] for row in runs.rows()][:3] == [3, 5] + [6] * (death[1] == 6)
    assert runs.start(*flags, *AGAIN) == 0
    assert_same(runs.result(), runs.result("whole"))


def test_the_last_validation_cut_short_is_made_up_for(runs, data, monkeypatch):
    """A run is not finished before its last validation is."""
    flags = (*data, *FLAGS, "--max_steps", 4)
    assert runs.start(*flags, name="whole") == 0
    with monkeypatch.context() as patch:
        interrupted(patch, validation=1)
        assert runs.start(*flags) == 128 + signal.SIGTERM
    for _ in range(2):
        assert runs.start(*flags, *AGAIN) == 0
        assert_same(runs.result(), runs.result("whole"))


def test_the_log_is_cut_to_the_state(runs, data):
    """P5: rows behind the saved step and a torn last line go, and come again."""
    flags = (*data, *FLAGS, "--max_steps", 8)
    assert runs.start(*flags, name="whole") == 0
    runs.killed("in a micro-batch", 6, *flags)
    with open(runs.path("_metrics.jsonl"), "a") as file:
        file.write('{"step": 6, "loss": 3.5}\n{"step": 7, "lo')
    assert runs.start(*flags, *AGAIN) == 0
    assert_same(runs.result(), runs.result("whole"))


@pytest.mark.parametrize("tail", ["", '{"step": 3}', '{"step": 3', "\n", "5\n", "[]\n", "{}\n",
                                  '{"step": null}\n', "\x00\x00\x00", '{"step": 5}\n'])
def test_cut_metrics(tmp_path, tail):
    """What is no whole row of the first steps is dropped; what is one stays as it is."""
    path, whole = tmp_path / "metrics.jsonl", '{"step": 2}\n{"step":4,  "val_loss": 1.5}\n'
    path.write_text(whole + tail)
    cut_metrics(path, 4)
    assert path.read_text() == whole
    cut_metrics(path, 4, validation_too=True)
    assert path.read_text() == '{"step": 2}\n' and [*tmp_path.iterdir()] == [path]


def test_totals_and_windows_go_on(runs, data, capsys):
    """Seconds and speeds count the time before the death as well, not only the last launch's."""
    flags = (*data, *FLAGS, "--max_steps", 6)
    runs.killed("in a micro-batch", 5, *flags)
    state = runs.state()
    assert 0 < state["log"]["window_seconds"] < state["log"]["seconds"]
    state["log"] |= {"seconds": 3600.0, "window_seconds": 1800.0}
    torch.save(state, runs.path("_resume.pth"))
    assert runs.start(*flags, *AGAIN) == 0
    rows = [row for row in runs.rows() if "tokens" in row]
    assert f"1h00m of training, {rows[-1]['tokens']:,} tokens" in capsys.readouterr().out
    assert rows[-1]["tokens_per_s"] * 1800 == pytest.approx(
        rows[-1]["tokens"] - rows[-2]["tokens"], rel=0.01)
    assert 3600 < runs.state()["log"]["seconds"] < 3700


def test_a_tracker_gets_the_same_run(runs, data, monkeypatch):
    """A resumed run goes on under its id in the tracker; a new one has another."""
    begun, steps = [], []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **options: begun.append((options["id"], options["resume"]))
    wandb.log = lambda row, step: steps.append(step)
    wandb.finish = lambda: steps.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = (*data, *FLAGS, "--max_steps", 6, "--use_wandb", "--tracker", "wandb")
    runs.killed("in a micro-batch", 4, *flags)
    runs.killed("in a micro-batch", 5, *flags, *AGAIN)
    assert runs.start(*flags, *AGAIN) == 0
    assert len(begun) == 3 and len(set(begun)) == 1
    assert begun[0][1] == "allow" and len(begun[0][0]) == 21
    assert steps == [3, 5, 5, 6, 6, "finish"]
    assert runs.start(*flags, name="another") == 0
    assert begun[3][0] != begun[0][0]
