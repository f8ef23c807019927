"""The benchmark: what is counted and compared is what the table says it is."""

import json
import re
import sys

import pytest
import torch
from conftest import texts

from model.LMConfig import LMConfig
from model.transformer import MiniMindLM
from scripts import benchmark, classic_recipe
from scripts.benchmark_parts import breakdown, ceiling, generation, training
from scripts.benchmark_parts.figures import Bench, Figure, table
from scripts.classic_recipe import ClassicRecipe
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
