"""The sample data: what its test file promises about its training files."""

import json
import operator
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter, defaultdict

import pytest

from scripts.make_sample_data import (
    ROOT,
    heldout_questions,
    main,
    training_questions,
)
from scripts.sample_facts import FRAMES, RELATIONS, TEST_FRAMES

NAMES = ("sample_pretrain.jsonl", "sample_sft.jsonl", "sample_test.jsonl")


def normalise(text: str) -> str:
    """Only letters and digits (of any script) and signs such as + remain, in lower case.

    Of the punctuation only the minus sign stays, since it is all that tells 7 - 3 from 73.
    """
    kept = (c for c in text.lower() if c == "-" or unicodedata.category(c)[0] not in "PZC")
    return "".join(kept)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample")
    main(["--output_dir", str(path), "--seed", "42"])
    return path


@pytest.fixture(scope="module")
def texts(folder) -> list[str]:
    return [record["text"] for record in read(folder / NAMES[0])]


@pytest.fixture(scope="module")
def trained(folder) -> list[tuple[str, str]]:
    """(question, answer) of every turn of the SFT file."""
    pairs = []
    for record in read(folder / NAMES[1]):
        turns = record["conversations"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        contents = [turn["content"] for turn in turns]
        pairs += zip(contents[::2], contents[1::2], strict=True)
    return pairs


@pytest.fixture(scope="module")
def asked(folder) -> list[dict]:
    return read(folder / NAMES[2])


def test_same_seed_same_bytes_and_runs_from_any_directory(folder, tmp_path):
    # A process of its own has another hash seed, so an order taken from a set would show.
    script = ROOT / "scripts" / "make_sample_data.py"
    command = [sys.executable, str(script), "--output_dir", str(tmp_path / "new")]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / "new" / name).read_bytes() == (folder / name).read_bytes()
    main(["--output_dir", str(tmp_path), "--seed", "43"])
    assert (tmp_path / NAMES[1]).read_bytes() != (folder / NAMES[1]).read_bytes()


def test_enough_topics_questions_and_both_languages(asked, texts, trained):
    counts = Counter(record["topic"] for record in asked)
    assert len(counts) >= 12
    assert min(counts.values()) >= 20
    assert len(asked) >= 300
    questions = [record["question"] for record in asked]
    assert len(set(map(normalise, questions))) == len(questions)
    for lines in (questions, texts, [question for question, _ in trained]):
        chinese = sum(bool(re.search("[\u4e00-\u9fff]", line)) for line in lines) / len(lines)
        assert 0.4 < chinese < 0.6
    for topic in counts:
        assert {r.language for r in RELATIONS if r.topic == topic} == {"en", "zh"}


def test_no_test_question_occurs_in_training(asked, texts, trained):
    turns = [question for question, _ in trained]
    corpus = "\n".join(normalise(line) for line in (*turns, *texts))
    exact = "\n".join((*turns, *texts))
    for record in asked:
        assert record["question"] not in exact
        assert normalise(record["question"]) not in corpus, record["question"]


def test_no_test_template_is_a_training_template():
    asked_in_training = {normalise(template) for r in RELATIONS for template in r.ask}
    for relation in RELATIONS:
        for template in relation.ask_test:
            assert normalise(template) not in asked_in_training
    for language, frames in TEST_FRAMES.items():
        assert not set(frames) & set(FRAMES[language])


def test_frame_removed_no_test_question_is_a_training_question():
    """A held-out greeting around a training question would not make it a held-out question."""
    core = {
        normalise(relation.fill(template, fact))
        for relation in RELATIONS
        for fact in relation.facts
        for template in relation.ask
    }
    for relation in RELATIONS:
        for fact in relation.unseen_facts or relation.facts:
            for template in relation.ask_test:
                assert normalise(relation.fill(template, fact)) not in core


def test_every_tested_fact_was_taught_with_the_same_answer():
    rng = random.Random(42)
    taught = defaultdict(set)
    for example in training_questions(rng):
        taught[example.relation, example.fact].add((example.question, example.answer))
    for example in heldout_questions(rng):
        if example.relation.topic == "arithmetic":
            assert (example.relation, example.fact) not in taught
        else:
            pairs = taught[example.relation, example.fact]
            assert {answer for _, answer in pairs} == {example.answer}
            assert 10 <= len({question for question, _ in pairs}) <= 20


def test_one_question_has_one_answer(asked, trained):
    answers = defaultdict(set)
    for question, answer in (*trained, *((r["question"], r["answer"]) for r in asked)):
        assert question == question.strip() != ""
        assert answer == answer.strip() != ""
        answers[normalise(question)].add(answer)
    assert [question for question, found in answers.items() if len(found) > 1] == []


def test_arithmetic_is_right_and_its_test_pairs_are_unseen(asked, texts, trained):
    operators = {"+": operator.add, "-": operator.sub, "×": operator.mul}
    pattern = re.compile(r"(\d+) ([-+×]) (\d+)")

    def pairs(text: str) -> set[tuple[str, tuple[int, ...]]]:
        return {(sign, tuple(sorted((int(a), int(b))))) for a, sign, b in pattern.findall(text)}

    sums = [(r["question"], r["answer"]) for r in asked if r["topic"] == "arithmetic"]
    assert len(sums) >= 24
    for question, answer in sums + [pair for pair in trained if pattern.search(pair[0])]:
        ((a, sign, b),) = pattern.findall(question)
        assert operators[sign](int(a), int(b)) == int(answer)
    for text in texts:
        for a, sign, b, result in re.findall(r"(\d+) ([-+×]) (\d+) (?:=|等于) (\d+)", text):
            assert operators[sign](int(a), int(b)) == int(result)
    seen = set().union(*(pairs(line) for line in (*texts, *(question for question, _ in trained))))
    tested = set().union(*(pairs(question) for question, _ in sums))
    assert len(tested) == len(sums)
    assert not tested & seen


def test_counted_letters_and_sorted_things_are_right():
    """Facts that can be computed are computed here once more."""
    for relation in RELATIONS:
        for fact in map(dict, (zip(relation.columns, f, strict=True) for f in relation.facts)):
            if relation.topic == "counting" and "word" in fact:
                number = fact["number"]
                expected = int(number) if number.isdigit() else "零一两三四五六".index(number)
                assert len(fact["word"]) == expected
            if relation.topic == "sorting":
                mixed = re.split(", |、", fact["mixed"])
                ordered = re.split(", |、", fact["ordered"])
                assert sorted(mixed) == sorted(ordered)
                assert mixed != ordered
                if mixed[0].isdigit():
                    assert ordered == sorted(mixed, key=int)
                elif relation.language == "en":
                    assert ordered == sorted(mixed)


def test_templates_name_their_columns_and_held_out_wordings_are_ample():
    for relation in RELATIONS:
        assert all(len(fact) == len(relation.columns) for fact in relation.facts)
        assert len(set(relation.facts)) == len(relation.facts)
        if relation.topic != "arithmetic":
            assert 10 <= len(set(relation.ask)) <= 20
            assert len(set(relation.ask_test)) >= 2
            assert len(set(relation.statements)) >= 2
