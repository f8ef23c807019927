"""The stage scripts, run whole on tiny models: promise P1, the log, the files, the messages."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import texts

from dataset.loader import epoch_order, split_documents
from dataset.packing import make_plan
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from trainer import train_full_sft, train_pretrain
from trainer.common.distributed import Dist
from trainer.common.engine import BACKED_OFF, NOT_FINITE, UPDATED, Engine
from trainer.common.optim import make_adamw
from trainer.common.schedule import is_due, warmup_cosine

ALONE = Dist(0, 0, 1, torch.device("cpu"))


def reference_run(path, tokenizer, steps, global_batch, lr, seed=42, max_seq_len=48):
    """Plain training, one document at a time, without rows, masks or micro-batches."""
    documents = [[1, *tokenizer.encode(json.loads(line)["text"]), 2] for line in open(path)]
    lengths = np.array([len(ids) for ids in documents])
    plan = make_plan(np.arange(len(documents)), lengths, max_seq_len, seed)
    torch.manual_seed(seed)
    model = MiniMindLM(LMConfig(dim=32, n_layers=2, n_heads=4))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": gains, "weight_decay": 0.0}], betas=(0.9, 0.95))
    rows = epoch_order(plan.num_rows, seed, 0)
    log = []
    for step in range(steps):
        nats, tokens = 0, 0
        for row in rows[step * global_batch : (step + 1) * global_batch]:
            for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
                start = plan.starts[piece]
                ids = documents[plan.documents[piece]][start : start + plan.positions[piece] + 1]
                logits = model(torch.tensor([ids[:-1]]))[0]
                nats = nats - logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].sum()
                tokens += len(ids) - 1
        optimizer.zero_grad()
        (nats / tokens).backward()
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, steps, 0, lr, 0.1)
        optimizer.step()
        log.append((nats.item() / tokens, norm, tokens))
    return log, model.state_dict()


def test_a_run_is_the_plain_algorithm(train, write_jsonl, tokenizer):
    """P1, A01, A03, A04: every loss and gradient norm, and the saved weights, are those of a loop
    over single documents; the last, shorter step counts its own tokens and is saved.
    """
    path = write_jsonl("data.jsonl", texts(60))
    log, weights = train(train_pretrain, "--data_path", path, "--batch_size", 2,
                         "--accumulation_steps", 3, "--learning_rate", 1e-2)
    expected, expected_weights = reference_run(path, tokenizer, len(log), 6, lr=1e-2)
    assert len(log) > 3
    for row, (loss, norm, _) in zip(log, expected):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert log[-1]["tokens"] == sum(tokens for _, _, tokens in expected)
    assert expected[-1][2] < expected[0][2], "the last step was meant to be a short one"
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name].float(), tensor, rtol=2e-3, atol=2e-3)


def test_the_cut_into_micro_batches_changes_nothing(train, write_jsonl):
    """P1, A01: short and long answers, in one micro-batch or in one each."""
    chats = [{"conversations": [{"role": "user", "content": "hi"},
                                {"role": "assistant", "content": "fox " * (1 if i % 2 else 30)}]}
             for i in range(24)]
    path = write_jsonl("chats.jsonl", chats)
    logs = [train(train_full_sft, "--data_path", path, "--from_weight", "none", "--batch_size", b,
                  "--accumulation_steps", 8 // b, name=f"run{b}")[0] for b in (8, 1)]
    assert len(logs[0]) >= 2
    for a, b in zip(*logs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_logged_loss_is_the_windows_mean(train, write_jsonl):
    """A12: with --log_interval 3 a row holds the token-weighted mean of its three steps."""
    path = write_jsonl("data.jsonl", texts(60))
    flags = ("--data_path", path, "--batch_size", 2, "--accumulation_steps", 2, "--max_steps", 6)
    single, _ = train(train_pretrain, *flags, name="a")
    windows, _ = train(train_pretrain, *flags, "--log_interval", 3, name="b")
    tokens = np.diff([0] + [row["tokens"] for row in single])
    nats = np.array([row["loss"] for row in single]) * tokens
    assert [row["step"] for row in windows] == [3, 6]
    for row, part in zip(windows, (slice(0, 3), slice(3, 6))):
        assert row["loss"] == pytest.approx(nats[part].sum() / tokens[part].sum(), rel=1e-6)
        assert row["ppl"] == pytest.approx(math.exp(row["loss"]))


def test_metrics_have_the_promised_fields(train, write_jsonl):
    """DESIGN section 5: names of a logged row and of a validation row."""
    path = write_jsonl("data.jsonl", texts(30))
    log, _ = train(train_pretrain, "--data_path", path, "--val_data_path", path, "--max_steps", 3,
                   "--eval_interval", 2, "--batch_size", 2, "--accumulation_steps", 1)
    assert set(log[0]) == {"step", "epoch", "loss", "ppl", "lr", "grad_norm", "tokens",
                           "tokens_per_s", "text_bytes_per_s", "mem_gib", "skipped_steps", "time"}
    validations = [row for row in log if "val_loss" in row]
    assert [row["step"] for row in validations] == [2, 3]
    assert {"val_loss", "val_ppl", "val_bpb"} <= set(validations[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_learns(train, write_jsonl, dtype):
    """A08: each --dtype is what it says, and trains to about the same loss."""
    path = write_jsonl("data.jsonl", texts(80))
    log, _ = train(train_pretrain, "--data_path", path, "--dtype", dtype, "--batch_size", 4,
                   "--accumulation_steps", 1, "--epochs", 3, "--learning_rate", 1e-2)
    assert log[0]["loss"] == pytest.approx(math.log(6400), abs=0.2)
    assert log[-1]["loss"] < log[0]["loss"] - 2


def test_float16_scales_and_others_do_not():
    """A08: the scaler is on for float16 and only for it."""
    model = torch.nn.Linear(2, 2)
    for dtype, on in ((torch.float16, True), (torch.bfloat16, False), (torch.float32, False)):
        engine = Engine(model, torch.optim.SGD(model.parameters(), fused=True), ALONE, dtype)
        assert engine.scaler.is_enabled() is on


@pytest.mark.parametrize("grad_clip, moved", [(0.0, 50.0), (1.0, 1.0), (100.0, 50.0)])
def test_grad_clip(grad_clip, moved):
    """A10: 0 leaves the gradient alone; otherwise its norm is at most --grad_clip."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    model, optimizer = torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter], fused=True)
    engine = Engine(model, optimizer, ALONE, torch.float32)
    loss = (parameter * torch.tensor([30.0, 40.0])).sum()
    engine.backward(loss)
    norm = engine.update(lr=1.0, grad_clip=grad_clip, nats=loss.detach())
    assert norm.item() == pytest.approx(50.0)
    assert parameter.norm().item() == pytest.approx(moved, rel=1e-4)
    assert parameter.grad is None, "gradients must not leak into the next step"


def step(engine, model, features, loss_scale=1.0):
    """One step of an engine on a linear model."""
    loss = model(torch.tensor(features)).sum() * loss_scale
    engine.backward(loss)
    return engine.update(lr=0.1, grad_clip=1.0, nats=loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, bad):
    """A11: one bad gradient costs one step, which is counted; no weight or moment changes."""
    model = torch.nn.Linear(2, 2)
    engine = Engine(model, make_adamw(model, 0.1), ALONE, dtype)
    before = [parameter.clone() for parameter in model.parameters()]
    step(engine, model, [1.0, bad])
    assert engine.skipped_steps == 1 and engine.outcome == NOT_FINITE
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    step(engine, model, [1.0, 1.0])
    assert engine.skipped_steps == 1 and engine.outcome == UPDATED
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_that_is_not_finite_changes_nothing(dtype):
    """A11: also where its gradient is finite, as of a loss with a constant that overflowed."""
    model = torch.nn.Linear(2, 2)
    engine = Engine(model, make_adamw(model, 0.1), ALONE, dtype)
    before = [parameter.clone() for parameter in model.parameters()]
    engine.backward(model(torch.ones(2)).sum())
    engine.update(lr=0.1, grad_clip=1.0, nats=torch.tensor(float("inf")))
    assert engine.outcome == NOT_FINITE
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_float16_backs_off_and_that_is_no_fault():
    """Infinite gradients under a scale above 1 halve the scale; at scale 1 they are a fault."""
    model = torch.nn.Linear(2, 2)
    engine = Engine(model, make_adamw(model, 0.1), ALONE, torch.float16)
    outcomes = []
    for _ in range(18):  # 65,536 is halved 16 times until it is 1
        loss = model(torch.ones(2)).sum()
        engine.backward(loss * float("inf"))
        engine.update(lr=0.1, grad_clip=1.0, nats=loss.detach())
        outcomes.append(int(engine.outcome))
    assert outcomes == [BACKED_OFF] * 16 + [NOT_FINITE] * 2
    assert engine.skipped_steps == 18


def test_weight_decay_is_on_matrices_only():
    """A14: two groups; gains of norms are not pulled towards zero."""
    model = MiniMindLM(LMConfig(dim=32, n_layers=1, n_heads=4))
    decayed, spared = make_adamw(model, 0.1).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}
    assert sum(p.numel() for g in (decayed, spared) for p in g["params"]) == model.num_parameters()


def test_learning_rate_schedule():
    """Linear warm-up to the peak, half a cosine to the floor, never outside; short runs too."""
    rates = [warmup_cosine(step, 1000, 100, 1e-3, 0.1) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-5) and rates[99] == pytest.approx(1e-3)
    assert rates[100] == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-4)
    middle = (100 + 999) / 2
    assert np.interp(middle, range(1000), rates) == pytest.approx(5.5e-4, rel=1e-3)
    assert all(np.diff(rates[:100]) > 0) and all(np.diff(rates[100:]) < 0)
    short = [warmup_cosine(step, 20, 100, 1e-3, 0.1) for step in range(20)]
    assert short[1] == max(short) == pytest.approx(1e-3) and short[-1] == pytest.approx(1e-4)
    assert warmup_cosine(0, 1, 100, 1e-3, 0.1) == pytest.approx(1e-3)


def test_what_is_due():
    """Intervals count finished steps; the last step is always due; 0 means only then."""
    assert [step for step in range(10) if is_due(step, 4, 10)] == [3, 7, 9]
    assert [step for step in range(10) if is_due(step, 0, 10)] == [9]


def test_held_out_documents():
    """A102: min(1 %, 2,000) documents, a function of the seed; none if too few."""
    train_ids, held_out = split_documents(5000, 42, False)
    assert len(held_out) == 50 and len(train_ids) == 4950
    assert not set(held_out) & set(train_ids)
    assert (split_documents(5000, 42, False)[1] == held_out).all()
    assert len(split_documents(1_000_000, 42, False)[1]) == 2000
    assert len(split_documents(999, 42, False)[1]) == 0
    assert len(split_documents(5000, 42, True)[1]) == 0


def test_weights_describe_themselves(train, write_jsonl, tokenizer, tmp_path):
    """DESIGN section 5: the .json holds config, step, validation, tokenizer hash and command."""
    path = write_jsonl("data.jsonl", texts(30))
    train(train_pretrain, "--data_path", path, "--val_data_path", path, "--max_steps", 2,
          "--batch_size", 4, "--accumulation_steps", 2)
    about = json.loads((tmp_path / "out" / "run_32.json").read_text())
    assert about["config"]["dim"] == 32 and about["config"]["hidden_dim"] == 128
    assert about["step"] == 2 and about["tokenizer_hash"] == tokenizer.hash
    assert about["validation"]["loss"] > 0 and "--val_data_path" in about["command"]
