"""Loss, perplexity and bits per byte against their formulas, up to `eval_model.py --data_path`."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from conftest import save_model

import eval_model
from dataset.packing import Piece, TokenBudgetCollate
from model.LMConfig import LMConfig
from model.metrics import evaluate, loss_metrics
from model.transformer import MiniMindLM

CPU = torch.device("cpu")




@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LMConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, dropout=0.5)
    model = MiniMindLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_formulas():
    """loss = nats/token, ppl = e^loss, bpb = nats / ln 2 / bytes: a uniform guess among 256 bytes
    costs 8 bits each (A102).
    """
    metrics = loss_metrics(nats=30 * math.log(256), tokens=10, text_bytes=30)
    assert metrics["loss"] == pytest.approx(3 * math.log(256))
    assert metrics["ppl"] == pytest.approx(256**3)
    assert metrics["bpb"] == pytest.approx(8)


def test_extremes_stay_finite():
    """P6: no token at all, and a loss beyond exp's range, give numbers and no exception."""
    assert loss_metrics(0.0, 0, 0) == {"loss": 0.0, "ppl": 1.0, "bpb": 0.0}
    assert math.isfinite(loss_metrics(1e6, 1, 1)["ppl"])


def rows_of(*lengths: int, mask_from: int = 0):
    """Documents of these token counts, two rows: what the collate function makes of them."""
    rng = np.random.default_rng(0)
    pieces = []
    for length in lengths:
        mask = (np.arange(length) >= mask_from).astype(np.int64) if mask_from else None
        pieces.append(Piece(rng.integers(0, 50, length), mask, text_bytes=2.5 * length))
    return pieces, TokenBudgetCollate(24)([pieces[:2], pieces[2:]])


@pytest.mark.parametrize("budget", [1, 24, 48, 10_000])
@pytest.mark.parametrize("mask_from", [0, 4])
def test_evaluate_equals_one_document_at_a_time(model, budget, mask_from):
    """P1, P2: the figures over packed rows are those of the documents taken alone, whatever the
    micro-batch cut, with dropout off.
    """
    pieces, rows = rows_of(9, 12, 24, mask_from=mask_from)
    model.eval()
    nats, tokens = 0.0, 0
    for piece in pieces:
        ids = torch.from_numpy(piece.ids)
        log_probs = model(ids[None, :-1])[0].log_softmax(-1)
        for position in range(len(ids) - 1):
            if position + 1 >= mask_from:
                nats -= log_probs[position, ids[position + 1]].item()
                tokens += 1
    model.train()
    metrics = evaluate(model, [rows, rows], budget, CPU, torch.float32)
    assert metrics["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert metrics["ppl"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert metrics["bpb"] == pytest.approx(nats / math.log(2) / (2.5 * 45), rel=1e-5)
    assert (metrics["tokens"], metrics["bytes"]) == (2 * tokens, 225)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_restores_the_mode(model, training):
    """Validation in the middle of training leaves dropout as it was, and no gradient."""
    model.train(training)
    evaluate(model, [rows_of(5, 5, 5)[1]], 24, CPU, torch.float32)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluate_without_data_is_not_nan(model):
    """A20, P6: nothing to measure gives 0 tokens, not a division by zero."""
    metrics = evaluate(model, [], 24, CPU, torch.float32)
    assert metrics["tokens"] == 0 and math.isfinite(metrics["loss"])


def chat_document(tokenizer, turns: list[tuple[str, str]]) -> tuple[list[int], list[int], int]:
    """The chat template by hand: ids, which of them count, and the answers' bytes."""
    ids, mask = [], []
    for role, content in turns:
        head, body = [1, *tokenizer.encode(role + "\n")], [*tokenizer.encode(content), 2]
        newline = tokenizer.encode("\n")
        ids += head + body + newline
        mask += [0] * len(head) + [int(role == "assistant")] * len(body) + [0] * len(newline)
    return ids, mask, sum(len(text.encode()) for role, text in turns if role == "assistant")


def figures_by_hand(model, documents) -> tuple[float, int, int]:
    """(nats, tokens, bytes) of documents (ids, mask, bytes), one document and token at a time."""
    nats, tokens, total_bytes = 0.0, 0, 0
    for ids, mask, text_bytes in documents:
        with torch.no_grad():
            log_probs = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        for position, (target, counts) in enumerate(zip(ids[1:], mask[1:])):
            nats -= counts * log_probs[position, target].item()
            tokens += counts
        total_bytes += text_bytes
    return nats, tokens, total_bytes


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys, write_jsonl):
    """measure(records, positions) -> (the random model, printed lines, the JSON object)."""
    def call(records, positions=1000):
        torch.manual_seed(0)
        model = MiniMindLM(LMConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=1,
                                    max_position_embeddings=positions))
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
        save_model(tmp_path / "pretrain_32.pth", model, {"stage": "pretrain"})
        argv = ["eval_model.py", "--out_dir", tmp_path, "--weight", "pretrain", "--device", "cpu",
                "--dtype", "float32", "--json", "--data_path", write_jsonl("data.jsonl", records)]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        eval_model.main()
        *lines, last = capsys.readouterr().out.splitlines()
        return model.half().float().eval(), lines, json.loads(last)

    return call


def test_figures_of_a_data_file(measure, tokenizer):
    """A102: --data_path gives what a computation by hand gives, for texts (every token and the end
    mark) and conversations (answers and their end marks) alike.
    """
    texts = ["Hello, world.", "从前有一只小狐狸 🦊。" * 3, "a <|im_end|> b"]
    turns = [("system", "Be kind."), ("user", "hi"), ("assistant", "你好！"), ("user", "bye"),
             ("assistant", "Goodbye.")]
    records = [{"text": text, "id": 1} for text in texts]
    records.append({"conversations": [{"role": r, "content": c} for r, c in turns]})
    documents = [chat_document(tokenizer, turns)]
    for text in texts:
        ids = [1, *tokenizer.encode(text), 2]
        documents.append((ids, [1] * len(ids), len(text.encode())))
    model, lines, figures = measure(records)
    nats, tokens, total_bytes = figures_by_hand(model, documents)
    assert figures == {
        "loss": pytest.approx(nats / tokens, rel=1e-5),
        "perplexity": pytest.approx(math.exp(nats / tokens), rel=1e-4),
        "bpb": pytest.approx(nats / math.log(2) / total_bytes, rel=1e-5),
        "tokens": tokens, "bytes": total_bytes,
    }
    assert "is not below 3.0" in lines[-1]


def test_a_long_document_is_taken_up_to_the_last_position(measure, tokenizer):
    """A document longer than max_position_embeddings counts with its first 40 targets."""
    ids = [1, *tokenizer.encode("one two three four " * 40)][:41]
    model, _, figures = measure([{"text": "one two three four " * 40}], positions=40)
    nats, _, _ = figures_by_hand(model, [(ids, [1] * 41, 1)])
    assert figures["tokens"] == 40
    assert figures["loss"] == pytest.approx(nats / 40, rel=1e-5)
    spelt = len(tokenizer.decode(ids[1:]).encode())
    assert figures["bytes"] == pytest.approx(spelt, rel=0.05)
