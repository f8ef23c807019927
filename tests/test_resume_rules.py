"""Which runs are one: what --from_resume 1 refuses, prints, and what a new run does with an old."""

import pytest
from conftest import texts
from resume_checks import AGAIN, FLAGS

from dataset.tokenizer import Tokenizer
from trainer.common.schedule import warmup_cosine


@pytest.mark.parametrize("flag, value, was", [
    ("n_layers", 3, "2"), ("n_heads", 2, "4"), ("n_kv_heads", 4, "2"), ("dropout", 0.2, "0.1"),
    ("max_seq_len", 40, "48"), ("long_docs", "drop", "split"), ("bad_lines", "skip", "stop"),
    ("seed", 43, "42"), ("dtype", "bfloat16", "float32"),
])
def test_another_run_is_refused(runs, data, capsys, flag, value, was):
    """A42: what the run is must not change; both values are named, and nothing is touched."""
    flags = (*data, *FLAGS, "--max_steps", 2)
    assert runs.start(*flags) == 0
    before = {path: path.read_bytes() for path in runs.out.iterdir()}
    assert runs.start(*flags, f"--{flag}", value, *AGAIN) == 2
    assert f"--{flag} {value}: was {was}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in runs.out.iterdir()} == before


def other_tokenizer(self, make=Tokenizer.__init__):
    make(self)
    self.hash = "abc"


def test_other_data_is_refused_and_moved_data_is_not(runs, data, write_jsonl, monkeypatch, capsys):
    """A42: content counts, of training, validation and tokenizer; where a file lies does not."""
    (_, path, _, val_path), flags = data, (*FLAGS, "--max_steps", 2)
    assert runs.start("--data_path", path, "--val_data_path", val_path, *flags) == 0
    facts, other = runs.state()["facts"], write_jsonl("other.jsonl", texts(36, seed=2))
    for own, val, name in ((other, val_path, "the training data"),
                           (path, other, "the validation data")):
        assert runs.start("--data_path", own, "--val_data_path", val, *flags, *AGAIN) == 2
        refusal = capsys.readouterr().err
        assert refusal.count(f"{name} is ") == refusal.count(" is ") - 1  # "is of a run on"
        assert f"was {facts[name]}" in refusal
    assert runs.start("--data_path", path, *flags, *AGAIN) == 2
    assert "the validation data is none" in capsys.readouterr().err
    moved = path.rename(path.with_name("moved.jsonl"))
    flags = ("--data_path", moved, "--val_data_path", val_path, *flags, "--max_steps", 3, *AGAIN)
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "__init__", other_tokenizer)
        assert runs.start(*flags) == 2
        assert f"the tokenizer is abc, was {facts['the tokenizer']}" in capsys.readouterr().err
    assert runs.start(*flags) == 0 and runs.rows()[-1]["step"] == 3


def test_what_may_change_is_printed(runs, data, capsys):
    """A42: intervals, workers and the learning rate; a new length says that the curve changes.
    Starting weights are not looked for again.
    """
    flags = (*data, *FLAGS)
    assert runs.start(*flags, "--max_steps", 3) == 0
    changes = {"save_interval": (4, 5), "log_interval": (3, 1), "eval_interval": (5, 0),
               "num_workers": (0, 1), "learning_rate": (0.01, 0.02)}
    capsys.readouterr()
    assert runs.start(*flags, "--max_steps", 3, *AGAIN) == 0
    assert "changed" not in capsys.readouterr().out
    assert runs.start(*flags, *(f"--{name}={new}" for name, (_, new) in changes.items()),
                      "--epochs", 3, "--max_steps", 5, "--from_weight", "gone", *AGAIN) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("changed since the save: "))
    assert set(line.split(": ")[1].split(", ")) == {
        *(f"--{name} {old} -> {new}" for name, (old, new) in changes.items()),
        "--epochs 2 -> 3", "--max_steps 3 -> 5"}
    assert out.count("the run's length changed") == 1
    assert [row["step"] for row in runs.rows()] == [3, 3, 4, 5, 5]
    assert runs.rows()[2]["lr"] == pytest.approx(warmup_cosine(3, 5, 0, 0.02, 0.1))


@pytest.mark.parametrize("batch_size, accumulation_steps", [(4, 1), (1, 1)])
def test_the_global_batch_stays(runs, data, capsys, batch_size, accumulation_steps):
    """A42, P4: another cut into micro-batches is the same run, to rounding."""
    flags = (*data, *FLAGS, "--dropout", 0, "--max_steps", 6, "--log_interval", 1)
    assert runs.start(*flags, name="whole") == 0
    runs.killed("in a micro-batch", 4, *flags)
    assert runs.start(*flags, "--batch_size", batch_size, "--accumulation_steps",
                      accumulation_steps, *AGAIN) == 0
    said = "a step keeps its 4 rows, though the flags say 1"
    assert (said in capsys.readouterr().out) is (batch_size == 1)
    for row, expected in zip(runs.curve(), runs.curve("whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert (runs.state()["global_batch"], runs.state()["memory"]["rows"]) == (4, batch_size)


def test_a_finished_run(runs, data, capsys):
    """It says so, ends with status 0 and touches nothing; more epochs continue it."""
    flags = (*data, *FLAGS, "--epochs", 1)
    assert runs.start(*flags) == 0
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in runs.out.iterdir()}
    assert runs.start(*flags, *AGAIN) == 0
    assert "the run is finished: 7 of 7 steps are done" in capsys.readouterr().out
    assert {path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in runs.out.iterdir()} == before
    assert runs.start(*flags, "--epochs", 2, *AGAIN) == 0
    assert [row["step"] for row in runs.rows()] == [3, 5, 6, 7, 7, 9, 10, 12, 14, 14]
    tokens = [row["tokens"] for row in runs.rows() if "tokens" in row]
    assert tokens == sorted(tokens) and tokens[-1] == 2 * tokens[2]


def test_nothing_to_resume(runs, data, capsys):
    """--from_resume 1 before the first save begins anew, and says so."""
    assert runs.start(*data, *FLAGS, "--max_steps", 2, *AGAIN) == 0
    assert f"there is no {runs.path('_resume.pth')}; beginning anew" in capsys.readouterr().out
    assert runs.rows()[-1]["step"] == 2


def test_an_unfinished_run_is_moved_aside(runs, data, capsys):
    """P5: a new run overwrites no unfinished one, nor another shape's; it says so in one line."""
    flags, before = (*data, *FLAGS, "--save_interval", 2), {}
    names = {"_metrics.jsonl": "_metrics.old{}.jsonl", ".pth": ".old{}.pth", ".json": ".old{}.json",
             "_resume.prev.pth": "_resume.old{}.prev.pth", "_resume.pth": "_resume.old{}.pth"}
    for number in range(3):
        runs.killed("before a step", 5, *flags)
        line = ", ".join(f"run_32{name} -> run_32{aside.format(number)}"
                         for name, aside in names.items())
        assert (f"moved aside in {runs.out}: {line}\n" in capsys.readouterr().out) is (number > 0)
        for name, aside in names.items():
            assert not number or runs.path(aside.format(number)).read_bytes() == before[name]
            before[name] = runs.path(name).read_bytes()
    assert runs.start(*flags, "--max_steps", 6, *AGAIN) == 0, "the newest can still be resumed"
    assert runs.start(*flags, "--max_steps", 2, "--n_layers", 3) == 0
    assert runs.path(".old3.pth").read_bytes() != runs.path(".pth").read_bytes()
    assert runs.path("_resume.old3.pth").exists() and runs.state()["step"] == 2


def test_a_finished_run_is_replaced_at_the_first_save(runs, data, capsys):
    """Its weights serve until then; its state is gone, so that nobody mixes the two runs."""
    flags = (*data, *FLAGS)
    assert runs.start(*flags, "--max_steps", 5) == 0
    weights, curve = runs.path(".pth").read_bytes(), runs.path("_metrics.jsonl").read_bytes()
    runs.killed("in a micro-batch", 3, *flags)
    assert "will be replaced at the first save" in capsys.readouterr().out
    assert runs.path(".pth").read_bytes() == weights
    assert runs.path("_metrics.old1.jsonl").read_bytes() == curve
    assert not list(runs.out.glob("*resume*"))
    runs.killed("in a micro-batch", 4, *flags)
    assert runs.path(".pth").read_bytes() != weights and runs.state()["step"] == 4
