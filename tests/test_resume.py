"""Promise P4: a run that was killed and resumed is the run that was not; and which runs are one."""

import json
import sys
import types

import pytest
import torch
from conftest import texts
from resume_checks import STAGES, Runs, assert_same, chats

from model.transformer import MiniMindLM

# Two epochs of 7 steps; saves after 4, 8, 12, 14, rows after 3, 6, ..., validation after 5, 10, 14.
FLAGS = ("--dropout", 0.1, "--batch_size", 2, "--accumulation_steps", 2, "--epochs", 2,
         "--save_interval", 4, "--log_interval", 3, "--eval_interval", 5, "--learning_rate", 1e-2)
AGAIN = ("--from_resume", 1)


@pytest.fixture
def runs(tmp_path, monkeypatch, signals):
    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def data(write_jsonl):
    """The flags of a small training and validation file; data("full_sft") as conversations."""
    def flags(stage="pretrain"):
        parts = texts(36 if stage == "pretrain" else 27), texts(9, seed=1)
        if stage == "full_sft":
            parts = map(chats, parts)
        paths = [write_jsonl(f"{stage}{number}.jsonl", part) for number, part in enumerate(parts)]
        return "--data_path", paths[0], "--val_data_path", paths[1]

    return flags


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
    "three times": [("in a micro-batch", 4, 0), ("before the save", 7, 0), ("before a step", 13, 12)],
}


@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed_is_uninterrupted(runs, data, finished, stage, deaths):
    """P4, A44: the same weights, moments, random states and curve, to the bit, with dropout."""
    flags, script = (*data(stage), *FLAGS), STAGES[stage]
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
    flags = (*data(), *FLAGS)
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
    flags = (*data(), *FLAGS, "--max_steps", 7, "--dtype", "float16")
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
    assert runs.start(*data(), *FLAGS, "--max_steps", 3) == 0
    state = runs.state()
    assert {type(value) for value in plain(state)} <= {torch.Tensor, str, int, float, bool,
                                                       type(None)}
    assert (state["format"], state["step"], state["total_steps"], state["global_batch"],
            state["micro_batch_rows"], state["world_size"]) == (1, 3, 3, 4, 2, 1)
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


@pytest.mark.parametrize("flag, value, was", [
    ("n_layers", 3, "2"), ("n_heads", 2, "4"), ("n_kv_heads", 4, "2"), ("dropout", 0.2, "0.1"),
    ("max_seq_len", 40, "48"), ("long_docs", "drop", "split"), ("bad_lines", "skip", "stop"),
    ("seed", 43, "42"), ("dtype", "bfloat16", "float32"),
])
def test_another_run_is_refused(runs, data, capsys, flag, value, was):
    """A42: what the run is must not change; both values are named, and nothing is touched."""
    flags = (*data(), *FLAGS, "--max_steps", 2)
    assert runs.start(*flags) == 0
    before = {path: path.read_bytes() for path in runs.out.iterdir()}
    assert runs.start(*flags, f"--{flag}", value, *AGAIN) == 2
    assert f"--{flag} {value}: was {was}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in runs.out.iterdir()} == before
