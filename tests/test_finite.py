"""Numbers that stay finite: what a bad step costs, what is said of it, when the run gives up."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import WORDS
from torch.utils._python_dispatch import TorchDispatchMode

from model import transformer
from model.attention import Masked, attention_mask
from model.transformer import MiniMindLM
from trainer import train_pretrain
from trainer.common.engine import Engine
from trainer.common.errors import run
from trainer.common.finite import FiniteCheck
from trainer.common.state_file import read_newest_state, tensors_of

SCRIPT = SimpleNamespace(main=lambda: run(train_pretrain.main))  # as a user runs it: exits
FLAGS = ("--bad_lines", "skip", "--batch_size", 2, "--accumulation_steps", 2, "--epochs", 9,
         "--eval_interval", 0)
NOTE = re.compile(r"step (\d+): loss or gradient not finite, no weight changed \((\d+) in a row\) "
                  r"\| (\S+), lines ([\d, ]+)$", re.MULTILINE)


HOW = {
    "nan": lambda loss, model: loss * float("nan"),
    "inf": lambda loss, model: loss + float("inf"),  # its gradient is as it was
    # The loss stays; the square root's slope at 0 is infinite, and infinity times 0 is NaN.
    "gradient": lambda loss, model: loss + (model.model.norm.weight.sum() * 0).sqrt(),
}


@pytest.fixture
def corpus(write_jsonl):
    """Eighty different short texts between faulty lines; returns (path, text -> line number)."""
    lines, numbers = [], {}
    for number in range(80):
        if number % 7 == 3:
            lines.append("{broken")
        text = f"{WORDS[number % 13]} " * (number % 9) + f"number {number}"
        lines.append(f'{{"text": "{text}"}}')
        numbers[text] = len(lines)
    return write_jsonl("texts.jsonl", "\n".join(lines).encode() + b"\n"), numbers


@pytest.fixture
def spoil(monkeypatch, tokenizer):
    """spoil(bad steps, how) -> (step from 0 -> texts of its documents, weights after each step).

    Only the first micro-batch of a step is made bad. Steps count on over a test's launches.
    """
    forward, update = MiniMindLM.forward, Engine.update

    def spoil(bad_steps, how="nan"):
        seen, weights = {}, []

        def spoiled(model, input_ids, doc_ids, **others):
            step = len(weights)
            loss = forward(model, input_ids=input_ids, doc_ids=doc_ids, **others)
            if step in bad_steps and step not in seen:
                loss = HOW[how](loss, model)
            for row, documents in zip(input_ids, doc_ids):
                for document in range(int(documents.max()) + 1):
                    ids = row[documents == document].tolist()  # all but the end mark
                    seen.setdefault(step, set()).add(tokenizer.decode(ids[1:]))
            return loss

        def counted(engine, *arguments):
            norm = update(engine, *arguments)
            weights.append([parameter.clone() for parameter in engine.model.parameters()])
            return norm

        monkeypatch.setattr(MiniMindLM, "forward", spoiled)
        monkeypatch.setattr(Engine, "update", counted)
        return seen, weights

    return spoil


def numbers(text):
    """(step from 1, in a row) of each note."""
    return [(int(step), int(in_a_row)) for step, in_a_row, *_ in NOTE.findall(text)]


def test_a_nan_costs_its_step_and_names_its_documents(train, corpus, spoil, capsys):
    """The lines are those of the step's documents, no more and no fewer; all else goes on."""
    path, line_of = corpus
    flags = ("--data_path", path, *FLAGS, "--max_steps", 12)
    clean, _ = spoil([])
    clean_rows, _ = train(train_pretrain, *flags, name="clean")
    bad, _ = spoil([3, 9])
    capsys.readouterr()
    rows, weights = train(train_pretrain, *flags, name="bad")
    out = capsys.readouterr().out
    assert numbers(out) == [(4, 1), (10, 1)]
    for step, _, source, lines in NOTE.findall(out):
        expected = sorted(line_of[text] for text in bad[int(step) - 1])
        assert source == str(path) and list(map(int, lines.split(", "))) == expected
        assert len(expected) > 3
    assert bad == clean, "a skipped step keeps its rows, and so do those after it"
    assert [row["skipped_steps"] for row in rows] == [0] * 3 + [1] * 6 + [2] * 3
    assert [row["step"] for row in rows if row["loss"] is None] == [4, 10]
    same = ("step", "epoch", "lr", "tokens")
    assert [[row[key] for key in same] for row in rows] == [
        [row[key] for key in same] for row in clean_rows]
    assert [row["loss"] for row in rows[:3]] == [row["loss"] for row in clean_rows[:3]]
    assert rows[-1]["loss"] < rows[0]["loss"] and all(t.isfinite().all() for t in weights.values())


@pytest.mark.parametrize("bad, status", [(range(4, 13), 0), (range(4, 14), 2), (range(8, 18), 2)],
                         ids=["nine", "ten", "ten up to the last step"])
def test_ten_in_a_row_are_too_many(train, corpus, spoil, tmp_path, capsys, bad, status):
    """The run ends with advice; the last save stays, finite, as it was before the first of them."""
    _, weights = spoil(bad)
    with pytest.raises(SystemExit) as end:
        train(SCRIPT, "--data_path", corpus[0], *FLAGS, "--max_steps", 18,
              "--save_interval", 3)
    assert end.value.code == status
    printed = capsys.readouterr()
    assert numbers(printed.out) == [(step + 1, step - bad[0] + 1) for step in bad]
    state = read_newest_state(tmp_path / "out" / "run_32_resume.pth")
    assert all(tensor.isfinite().all() for _, tensor in tensors_of(state))
    if status == 0:
        assert state["step"] == 18
        return
    for words in ("10 steps in a row", "--learning_rate", "--from_resume 1 continues"):
        assert words in printed.err
    assert bad[0] <= state["step"] < bad[-1] + 1 and "Traceback" not in printed.err
    for saved, parameter in zip(state["engine"]["model"].values(), weights[bad[0] - 1]):
        assert torch.equal(saved, parameter), "no bad step may change a weight"
    assert len(weights) <= bad[-1] + 2, "the verdict is one step behind, no more"


def test_the_streak_survives_a_resume(train, corpus, spoil, monkeypatch, capsys):
    """Six bad steps, a signal, four more: ten in a row."""
    spoil(range(3, 99))
    flags = ("--data_path", corpus[0], *FLAGS, "--max_steps", 40)
    note = FiniteCheck.note

    def signalled(check, step, outcome):
        if step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        note(check, step, outcome)

    monkeypatch.setattr(FiniteCheck, "note", signalled)
    with pytest.raises(SystemExit) as end:
        train(SCRIPT, *flags)
    assert end.value.code == 130 and numbers(capsys.readouterr().out)[-1] == (9, 6)
    with pytest.raises(SystemExit) as end:
        train(SCRIPT, *flags, "--from_resume", 1)
    assert end.value.code == 2
    assert numbers(capsys.readouterr().out) == [(10, 7), (11, 8), (12, 9), (13, 10)]


@pytest.mark.parametrize("dtype, how, named", [
    ("float32", "gradient", True), ("bfloat16", "gradient", True), ("float16", "gradient", False),
    ("float32", "inf", True), ("float16", "inf", True)])
def test_what_is_named_in_which_dtype(train, corpus, spoil, capsys, dtype, how, named):
    """Under float16 a gradient may overflow while the scale is above 1: counted, and no fault,
    however often in a row. A loss may not, in any dtype.
    """
    bad = range(1, 10 if named else 14)
    spoil(bad, how)
    rows, weights = train(train_pretrain, "--data_path", corpus[0], *FLAGS, "--max_steps", 16,
                          "--dtype", dtype)
    assert numbers(capsys.readouterr().out) == [(step + 1, step) for step in bad if named]
    assert [row["skipped_steps"] for row in rows] == [min(step, len(bad)) for step in range(16)]
    assert [row["loss"] is None for row in rows] == [
        how == "inf" and step in bad for step in range(16)]
    assert all(tensor.isfinite().all() for tensor in weights.values())


class HostReads(TorchDispatchMode):
    """Notes every tensor whose value the host reads: item(), int(), bool(), in C++ too."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.events.append(("read", arguments[0].data_ptr()))
        return function(*arguments, **keywords or {})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_host_reads_one_flag_of_the_step_before(train, corpus, monkeypatch, optimizer):
    """Waiting for a step just queued would leave the GPU idle: between two steps the host reads
    one value, and that is the outcome of the step before. Attention goes the way it has there.
    """
    monkeypatch.setattr(transformer, "way_to_attend", lambda doc_ids, *_:
                        Masked(attention_mask(doc_ids, doc_ids)))
    reads, outcomes, update = HostReads(), [], Engine.update

    def noted(engine, *arguments):
        norm = update(engine, *arguments)
        outcomes.append(engine.outcome)  # kept, so that its memory is nobody else's
        reads.events.append(("updated", engine.outcome.data_ptr()))
        return norm

    monkeypatch.setattr(Engine, "update", noted)
    with reads:
        train(train_pretrain, "--data_path", corpus[0], *FLAGS,
              "--max_steps", 9, "--log_interval", 99, "--optimizer", optimizer)
    marks = [number for number, event in enumerate(reads.events) if event[0] == "updated"]
    assert len(marks) == 9
    for step in range(1, 8):
        between = reads.events[marks[step] + 1 : marks[step + 1]]
        assert between == [("read", outcomes[step - 1].data_ptr())], f"step {step + 1}"
