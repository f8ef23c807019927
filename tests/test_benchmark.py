"""The benchmark: what is counted and compared is what the table says it is."""

import json
import math
import re
import sys

import pytest
import torch
from conftest import texts

from dataset.jsonl import DataError
from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from scripts import benchmark, classic_recipe
from scripts.benchmark_parts import breakdown, ceiling, generation, training
from scripts.benchmark_parts.figures import Bench, Figure, table
from scripts.classic_recipe import ClassicRecipe, Counts, PaddedTexts, mean_cross_entropy
from trainer.common.distributed import Dist

CPU = torch.device("cpu")
SHAPE = ("--dim", "32", "--n_layers", "1", "--n_heads", "4", "--num_workers", "0",
         "--device", "cpu", "--dtype", "float32", "--batch_size", "2", "--accumulation_steps", "2")
TINY = LMConfig(dim=32, n_layers=1, n_heads=4)


@pytest.fixture
def data(write_jsonl):
    return write_jsonl("data.jsonl", texts(30))


@pytest.fixture
def bench(data, tmp_path, tokenizer):
    """The settings of a benchmark in which everything takes milliseconds."""
    args = benchmark.stage_arguments([*SHAPE, "--data_path", str(data)], 48, tmp_path)
    return Bench({48: args}, [], Dist(0, 0, 1, CPU), torch.float32, tokenizer, 0.01, 2, 8, tmp_path)


def values(figures: list[Figure], ending: str) -> tuple[float, ...]:
    [found] = [figure.values for figure in figures if figure.name.endswith(ending)]
    return found


def test_a_step_multiplies_six_times_its_parameters():
    """The products timed as the ceiling are all those of the model's matrices, and no others."""
    config = LMConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2)
    matrices = sum(parameter.numel() for parameter in MiniMindLM(config).parameters()
                   if parameter.dim() == 2)
    assert ceiling.operations(config, 100) == 6 * 100 * matrices
    for inputs, outputs, _ in ceiling.layers(config).values():
        forward, for_input, for_weight = ceiling.products(inputs, outputs, 7, torch.float32, CPU)
        assert forward().shape == (7, outputs)
        assert for_input().shape == (7, inputs) and for_weight().shape == (outputs, inputs)


def test_the_ceiling_is_weighted_by_operations(monkeypatch):
    """The rate of all products is their operations over their time, not a mean of rates."""
    taken = iter([1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5])  # seconds of each product
    monkeypatch.setattr(ceiling, "seconds_of", lambda *ignored: next(taken))
    rates = ceiling.ceiling(LMConfig(dim=32, n_layers=2, n_heads=4), 10, torch.float32, CPU, 1)
    seconds = 3 * (4 * 1 + 4 * 2 + 4 * 3 + 2 * 4 + 5)
    assert rates["all"] == ceiling.operations(LMConfig(dim=32, n_layers=2, n_heads=4), 10) / seconds
    assert rates["q and o"] == 2 * 10 * 32 * 32 / 1


def test_an_epoch_of_ours_counts_the_file(bench, data):
    """Text bytes and tokens of one epoch are those of the file, however it is packed."""
    contents = [json.loads(line)["text"] for line in data.read_text("utf-8").splitlines()]
    run = training.PackedRun(bench, bench.args[48])
    done = [run.step() for _ in range(run.epoch_steps)]
    run.close()
    assert sum(counts.text_bytes for counts in done) == pytest.approx(
        sum(len(text.encode()) for text in contents))
    assert sum(counts.tokens for counts in done) == sum(
        len(bench.tokenizer.encode(text)) + 1 for text in contents)
    assert done[0].positions == 2 * 2 * 48


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


def test_training_figures_agree_with_each_other(bench):
    """MFU, ratio and shares are what their formulas make of the other lines of the table."""
    figures = training.section(bench)
    parameters = MiniMindLM(bench.args[48].config).num_parameters()
    rates = values(figures, "ceiling, float32")
    for name in ("ours", "classic float32"):
        tokens = values(figures, f"{name}: supervised tokens/s")
        wanted = [6 * parameters * each / (1e9 * rate) for each, rate in zip(tokens, rates)]
        assert values(figures, f"{name}: MFU, of the ceiling in float32") == pytest.approx(wanted)
        assert all(0 < fill <= 1 for fill in values(figures, f"{name}: fill"))
        assert all(0 <= wait < 1 for wait in values(figures, f"{name}: waiting for data"))
        assert values(figures, f"{name}: peak memory of a step")[0] * 2**20 > 12 * parameters
        shares = [f.values[0] for f in figures if f.name.startswith(f"{name}: kernels")]
        assert sum(shares) == pytest.approx(1, abs=0.02)
    ours, classic = (values(figures, f"{name}: text bytes/s")
                     for name in ("ours", "classic float32"))
    assert values(figures, "ours / classic float32") == pytest.approx(
        [a / b for a, b in zip(ours, classic)])
    shares = {f.name: f.values[0] for f in figures if "time in" in f.name}
    assert sum(shares.values()) == pytest.approx(1)
    assert len(shares) == len(breakdown.PARTS), shares  # the model's names are those it looks for


def test_memory_counts_weights_and_moments(tokenizer):
    """What a run holds between steps: three float32 numbers for each parameter, and step counts."""
    recipe = ClassicRecipe(TINY, ["a fox"] * 8, tokenizer, 8, CPU, torch.float32, num_workers=0)
    assert breakdown.at_rest(recipe) == 4 * recipe.model.num_parameters()
    recipe.step()
    counts = 4 * len(list(recipe.model.parameters()))
    assert breakdown.at_rest(recipe) == 12 * recipe.model.num_parameters() + counts


def test_a_part_is_charged_without_what_it_calls(monkeypatch):
    """Time inside an inner part is the inner part's; what the backward computes anew is its own."""
    now = [0.0]
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    watch = breakdown.Stopwatch(CPU)
    inner = watch.timed(breakdown.NORMS, lambda: spend(2))
    watch.timed(breakdown.ATTENTION, lambda: (spend(1), inner(), spend(4)))()
    watch.timed(breakdown.BACKWARD, lambda: (spend(10), inner()))()
    spend(100)
    watch.charge()
    assert watch.seconds == {breakdown.ATTENTION: 5, breakdown.NORMS: 2, breakdown.BACKWARD: 12,
                             breakdown.REST: 100}


@pytest.mark.parametrize(("operator", "kind"), [
    ("aten::mm", "matrix products"), ("aten::addmm", "matrix products"),
    ("aten::bmm", "attention, both ways"), ("aten::_softmax", "attention, both ways"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention, both ways"),
    ("aten::_log_softmax", "log-softmax of the loss"), ("aten::copy_", "copies"),
    ("aten::mul", "elementwise"), ("aten::add_", "elementwise"), ("aten::silu", "elementwise"),
    ("aten::_fused_adamw_", "optimizer"), ("aten::view", "other"),
])
def test_kernels_are_told_apart(operator, kind):
    assert breakdown.kind_of(operator) == kind


def test_both_ways_of_generating_agree(bench):
    """What is raced is the same work: greedy tokens with and without the cache are the same."""
    torch.manual_seed(0)
    model = MiniMindLM(TINY).eval()
    prompts = torch.randint(3, 6400, (3, 5)).tolist()
    outputs, first = generation.with_cache(model, prompts, 8)
    assert outputs == [generation.without_cache(model, prompt, 8) for prompt in prompts]
    assert first > 0
    figures = generation.section(bench)
    assert all(value > 0 for figure in figures for value in figure.values)


def test_the_table_shows_medians_and_spread():
    lines = table([Figure("s", "speed", (3.0, 1.0, 2000.0), "MB/s"), Figure("s", "none", ()),
                   Figure("t", "share", (0.25,), "%")]).splitlines()
    assert lines[2:] == ["| s | speed | 3.00 MB/s | 1.00 - 2,000 |", "|  | none | n/a |  |",
                         "| t | share | 25.0 % |  |"]


@pytest.mark.parametrize(("script", "flags", "message"), [
    (benchmark, ["--data_path", "no.jsonl"], "there is no such file"),
    (benchmark, ["--dim", "33"], "model shape"),
    (benchmark, ["--seconds", "0"], "--seconds 0.0: expected above 0"),
    (benchmark, ["--max_seq_len", "1"], "--max_seq_len 1: expected at least 2"),
    (benchmark, ["--sections", "cooking"], "invalid choice"),
    (benchmark, ["--batch_size", "0"], "--batch_size 0"),
    (benchmark, ["--no_such_flag", "0"], "--no_such_flag"),
    (benchmark, ["--out", "no/such/folder/x.md"], "no such folder"),
    (classic_recipe, ["--max_steps", "1", "--data_path", "no.jsonl"], "there is no such file"),
    (classic_recipe, ["--minutes", "1", "--max_steps", "1"], "one of --minutes and --max_steps"),
    (classic_recipe, ["--max_steps", "1", "--dim", "33"], "model shape"),
])
def test_bad_input_is_named(script, flags, message, data, monkeypatch, capsys):
    """Exit status 2 and what was wrong, before anything is measured."""
    given = flags if "--data_path" in flags else [*flags, "--data_path", str(data)]
    monkeypatch.setattr(sys, "argv", ["script", *given])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_faulty_line_is_named(write_jsonl, monkeypatch):
    """Both sides read data as the stage scripts do."""
    path = write_jsonl("bad.jsonl", [{"text": "a"}, {"txt": "b"}])
    monkeypatch.setattr(sys, "argv", ["x", "--data_path", str(path), "--max_steps", "1",
                                      "--device", "cpu"])
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        classic_recipe.main()


@pytest.mark.slow
def test_the_whole_command(run_script, data, tmp_path):
    """One command, one table: every section, with workers, two lengths, and the report in a file.
    """
    flags = [flag for flag in SHAPE if flag != "0"]
    flags.insert(flags.index("--num_workers") + 1, "1")
    done = run_script("scripts/benchmark.py", *flags, "--data_path", data, "--seconds", 0.05,
                      "--repeats", 1, "--new_tokens", 4, "--lengths", 48, 32,
                      "--gradient_checkpointing", 1, "--out", tmp_path / "report.md")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.md").read_text("utf-8") == done.stdout
    sections = set(re.findall(r"^\| ([\w-]+)", done.stdout, re.MULTILINE)) - {"section"}
    assert sections == {"ceiling", "training", "generation", "start-up"}
    assert re.search(r"ours to classic: [\d.]+ at 48 \(classic float32\).* at 32", done.stdout)
    assert re.search(r"commit \w+.*, 20\d\d-", done.stdout)
    seconds = re.search(r"tokenised before \| ([\d.]+) s", done.stdout)
    assert 0.1 < float(seconds[1]) < 200


@pytest.mark.slow
def test_the_classic_command(run_script, data, tmp_path):
    """It trains until the time is over, validates on packed rows, ends by itself, and logs."""
    done = run_script("scripts/classic_recipe.py", "--data_path", data, "--val_data_path", data,
                      "--dim", 32, "--n_layers", 1, "--max_seq_len", 48, "--minutes", 0.03,
                      "--num_workers", 1, "--device", "cpu", "--log", tmp_path / "log")
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert 1.8 <= last["seconds"] < 60 and 0 < last["fill"] < 1 and 0 < last["val_bpb"] < 10
