"""The classic recipe: a fair opponent, whose figures count what it really trains on."""

import json
import math
import sys

import pytest
import torch
from conftest import texts

from dataset.jsonl import DataError
from model.LMConfig import LMConfig
from scripts import classic_recipe
from scripts.classic_recipe import ClassicRecipe, Counts, PaddedTexts, mean_cross_entropy

CPU = torch.device("cpu")
TINY = LMConfig(dim=32, n_layers=1, n_heads=4)


def test_classic_counts_what_it_trains_on(tokenizer):
    """A document that is cut counts the bytes before the cut; one that fits, all of them."""
    text = "the fox found a well " * 4 + "我们的小河" * 20
    rows = PaddedTexts([text, "a fox"], tokenizer, 10)
    input_ids, targets, text_bytes = rows[0]
    spelled = tokenizer.decode(targets.tolist())
    assert text.startswith(spelled) and text_bytes == len(spelled.encode()) < len(text.encode())
    assert (targets != -100).all() and torch.equal(input_ids[1:], targets[:-1])

    whole = [1, *tokenizer.encode("a fox"), 2]
    input_ids, targets, text_bytes = rows[1]
    assert text_bytes == 5
    assert targets.tolist() == whole[1:] + [-100] * (10 - len(whole) + 1)
    assert input_ids.tolist() == whole + [0] * (10 - len(whole))


@pytest.mark.parametrize("cut", range(2, 12))
def test_half_a_character_does_not_count(tokenizer, cut):
    """A cut inside a character leaves no U+FFFD's three bytes in the count."""
    text = "\U0001f98a\U0001f9e9" * 4  # several tokens each
    *_, text_bytes = PaddedTexts([text], tokenizer, cut)[0]
    assert text_bytes % 4 == 0 and text_bytes <= len(text.encode())


def test_classic_epoch_counts_the_file(tokenizer):
    """Rows long enough for every document: an epoch's bytes are the file's."""
    contents = [record["text"] for record in texts(20)]
    recipe = ClassicRecipe(TINY, contents, tokenizer, 200, CPU, torch.float32, num_workers=0)
    done = [recipe.step() for _ in range(3)]  # 8, 8 and 4 rows
    assert sum(counts.text_bytes for counts in done) == sum(len(t.encode()) for t in contents)
    assert [counts.positions for counts in done] == [1600, 1600, 800]


def test_classic_loss_is_the_mean_over_targets(tokenizer):
    """On a known batch: each document alone, summed by hand, over the number of its targets."""
    contents = ["the fox", "a well and a small river", "我们"]
    recipe = ClassicRecipe(TINY, contents, tokenizer, 24, CPU, torch.float32, num_workers=0)
    nats, count = 0.0, 0
    with torch.no_grad():
        for text in contents:
            ids = [1, *tokenizer.encode(text), 2]
            probs = recipe.model(torch.tensor([ids[:-1]]))[0].double().softmax(-1)
            nats -= sum(math.log(probs[i, token]) for i, token in enumerate(ids[1:]))
            count += len(ids) - 1
    assert recipe.step().tokens == count
    assert recipe.loss.item() == pytest.approx(nats / count, rel=1e-5)
    logits = torch.randn(1, 3, 5, requires_grad=True)
    mean_cross_entropy(logits, torch.tensor([[4, -100, -100]])).backward()
    assert logits.grad[0, 0].abs().sum() > 0 and not logits.grad[0, 1:].any()


def test_classic_is_the_recipe(tokenizer):
    """Learning rate, betas, rows and the cosine's ends are those that it is known for."""
    recipe = ClassicRecipe(TINY, ["a fox"] * 9, tokenizer, 8, CPU, torch.float32, num_workers=0)
    [group] = recipe.optimizer.param_groups
    assert type(recipe.optimizer) is torch.optim.AdamW and group["betas"] == (0.9, 0.999)
    assert recipe.step().positions == 8 * 8 and group["lr"] == 5e-4  # no warm-up
    recipe.step(1.0)
    assert group["lr"] == pytest.approx(5e-5)
    assert classic_recipe.cosine(0.5) == pytest.approx((5e-4 + 5e-5) / 2)


def test_validation_stops_the_clock(monkeypatch):
    """Minutes are minutes of training; validation takes none of them, and ends none early."""
    now, at = [0.0], []

    class Recipe:
        device, loss = CPU, torch.zeros(())
        model = torch.nn.Linear(1, 1)

        def step(self, progress):
            at.append(progress)
            now[0] += 10
            return Counts(1, 2, 3)

    def validate():
        now[0] += 500
        return {}

    monkeypatch.setattr(classic_recipe.time, "perf_counter", lambda: now[0])
    args = classic_recipe.argparse.Namespace(minutes=1, max_steps=0, eval_interval=2)
    figures = classic_recipe.train(Recipe(), args, lambda **_: None, validate)
    assert at == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert (figures["steps"], figures["seconds"], figures["bytes_per_s"]) == (6, 60, 18 / 60)


def test_a_faulty_line_is_named(write_jsonl, monkeypatch):
    """Both sides read data as the stage scripts do."""
    path = write_jsonl("bad.jsonl", [{"text": "a"}, {"txt": "b"}])
    monkeypatch.setattr(sys, "argv", ["x", "--data_path", str(path), "--max_steps", "1",
                                      "--device", "cpu"])
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        classic_recipe.main()


@pytest.mark.slow
def test_the_classic_command(run_script, write_jsonl, tmp_path):
    """It trains until the time is over, validates on packed rows, ends by itself, and logs."""
    data = write_jsonl("data.jsonl", texts(30))
    done = run_script("scripts/classic_recipe.py", "--data_path", data, "--val_data_path", data,
                      "--dim", 32, "--n_layers", 1, "--max_seq_len", 48, "--minutes", 0.03,
                      "--num_workers", 1, "--device", "cpu", "--log", tmp_path / "log")
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert 1.8 <= last["seconds"] < 60 and 0 < last["fill"] < 1 and 0 < last["val_bpb"] < 10
