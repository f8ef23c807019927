"""The stage scripts' loops: what is wired to what, seen from outside."""

import sys

import pytest
import torch
from conftest import ROOT, texts

from model.transformer import FeedForward, MiniMindLM
from trainer import train_full_sft, train_pretrain
from trainer.common import arguments, engines
from trainer.common.checkpoint import Checkpoint
from trainer.common.engine import Engine
from trainer.common.schedule import warmup_cosine

SMALL = ("--batch_size", 2, "--accumulation_steps", 1)
DEFAULTS = {
    "dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 2, "dropout": 0, "max_seq_len": 512,
    "val_data_path": None, "num_workers": 2, "bad_lines": "stop", "epochs": 1, "max_steps": 0,
    "batch_size": 8, "accumulation_steps": 4, "min_lr_ratio": 0.1, "warmup_steps": 100,
    "weight_decay": 0.1, "learning_rate": None, "start_layers": 0,
    "grad_clip": 1.0, "seed": 42, "from_resume": 0, "save_interval": 100,
    "log_interval": 10, "eval_interval": 500, "device": "auto", "dtype": "auto", "use_compile": 0,
    "use_wandb": False, "tracker": "swanlab", "out_dir": "out",
}


def test_saves_come_after_whole_steps(train, write_jsonl, monkeypatch):
    """A03, A05: saves fall between steps, and the last file is the model in memory, to the bit."""
    models, saves, save = [], [], Checkpoint.save

    def new_model(config, **options):
        models.append(MiniMindLM(config, **options))
        return models[-1]

    def noted(self, step):
        saves.append((step, all(p.grad is None for p in models[-1].parameters())))
        save(self, step)

    monkeypatch.setattr(train_pretrain, "MiniMindLM", new_model)
    monkeypatch.setattr(Checkpoint, "save", noted)
    path = write_jsonl("data.jsonl", texts(60))
    _, weights = train(train_pretrain, "--data_path", path, "--batch_size", 2,
                       "--accumulation_steps", 2, "--max_steps", 5, "--save_interval", 2,
                       "--learning_rate", 1e-2, "--min_lr_ratio", 1)
    assert saves == [(2, True), (4, True), (5, True)]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(weights[name], tensor.half()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_loop_runs_in_the_chosen_dtype(train, write_jsonl, monkeypatch, dtype):
    """A08: --dtype reaches the matrix products and the scaler, not only the first line."""
    products, scaled, forward = set(), set(), FeedForward.forward

    def noted(self, x):
        products.add(str(self.up_proj(x).dtype))
        return forward(self, x)

    class NotedEngine(Engine):
        def backward(self, loss):
            scaled.add(self.scaler.is_enabled())
            super().backward(loss)

    monkeypatch.setattr(FeedForward, "forward", noted)
    monkeypatch.setattr(engines, "Engine", NotedEngine)
    train(train_pretrain, "--data_path", write_jsonl("data.jsonl", texts(20)), *SMALL,
          "--max_steps", 1, "--dtype", dtype)
    assert products == {f"torch.{dtype}"} and scaled == {dtype == "float16"}


def test_both_stages_have_the_same_loop():
    """What the tests show of pretraining's loop holds for fine-tuning's: it is the same text."""
    def loop(name):
        source = (ROOT / "trainer" / name).read_text("utf-8")
        return source[source.index("    # --- Model"):].replace("SFT", "PRETRAIN")

    assert loop("train_full_sft.py") == loop("train_pretrain.py")


def test_a_step_that_is_not_a_number_is_said_and_survived(train, write_jsonl, monkeypatch, capsys):
    """A11: a NaN loss costs one step of the run, which the log and the console say."""
    forward, calls = MiniMindLM.forward, []

    def sometimes_nan(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs) * (float("nan") if len(calls) == 2 else 1)

    monkeypatch.setattr(MiniMindLM, "forward", sometimes_nan)
    log, weights = train(train_pretrain, "--data_path", write_jsonl("data.jsonl", texts(40)),
                         *SMALL, "--max_steps", 4)
    assert [row["skipped_steps"] for row in log] == [0, 1, 1, 1]
    assert [row["loss"] is None for row in log] == [False, True, False, False]
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert "1 steps skipped" in capsys.readouterr().out


def test_a_compiled_run_saves_plain_names(train, write_jsonl, monkeypatch):
    """A51: --use_compile 1 compiles, and its file has the names of a run without."""
    compiled, compile_model = [], torch.compile

    def eager(module):  # no C++ compiler needed
        compiled.append(module)
        return compile_model(module, backend="eager")

    monkeypatch.setattr(torch, "compile", eager)
    flags = ("--data_path", write_jsonl("data.jsonl", texts(20)), *SMALL, "--max_steps", 2)
    log, weights = train(train_pretrain, *flags, "--use_compile", 1, name="compiled")
    plain_log, plain = train(train_pretrain, *flags, name="plain")
    assert len(compiled) == 1 and set(weights) == set(plain)
    assert log[-1]["loss"] == pytest.approx(plain_log[-1]["loss"], rel=1e-5)


def test_the_learning_rate_follows_its_flags(train, write_jsonl):
    """A14: warm-up is used, and the cosine ends at --max_steps, at --min_lr_ratio of the peak."""
    log, _ = train(train_pretrain, "--data_path", write_jsonl("data.jsonl", texts(60)), *SMALL,
                   "--max_steps", 32, "--warmup_iters", 3, "--learning_rate", 1e-3, "--epochs", 9,
                   "--min_lr_ratio", 0.2)
    expected = [warmup_cosine(step, 32, 3, 1e-3, 0.2) for step in range(32)]
    assert [row["lr"] for row in log] == pytest.approx(expected)
    assert log[0]["lr"] == pytest.approx(1e-3 / 3) and log[-1]["lr"] == pytest.approx(2e-4)


def test_training_on_a_cpu_unasked_is_said(train, write_jsonl, monkeypatch, capsys):
    """A62: `auto` that finds no GPU says so, with what it took."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    flags = ("--data_path", write_jsonl("data.jsonl", texts(20)), *SMALL, "--max_steps", 1)
    train(train_pretrain, *flags, "--device", "auto", name="auto")
    out = capsys.readouterr().out
    assert "no GPU found" in out and "| cpu (" in out and "| float32 | seed 42" in out
    train(train_pretrain, *flags, name="asked")
    assert "no GPU found" not in capsys.readouterr().out


@pytest.mark.parametrize(("script", "own"), [
    (train_pretrain, {"data_path": "dataset/pretrain_hq.jsonl", "save_weight": "pretrain",
                      "optimizer": "auto", "from_weight": "none", "long_docs": "split"}),
    (train_full_sft, {"data_path": "dataset/sft_mini_512.jsonl", "save_weight": "full_sft",
                      "from_weight": "pretrain", "optimizer": "adamw"}),
])
def test_documented_defaults(script, own, monkeypatch):
    """Flags have the defaults that the README's one-liners rely on."""
    monkeypatch.setattr(arguments, "path_problems", lambda args, parser: [])
    monkeypatch.setattr(sys, "argv", ["train"])
    expected, args = {**DEFAULTS, **own}, vars(script.parse_arguments())
    assert {name: args[name] for name in expected} == expected
