"""Writes the sample data set: a small world of facts, told, asked and tested.

    python scripts/make_sample_data.py            # writes into dataset/

Three files come out, all from the relations in `sample_facts/` (Chinese and English, about half
each), all written for this project:

    sample_pretrain.jsonl  {"text": ...}           the facts in running prose
    sample_sft.jsonl       {"conversations": ...}  the same facts as questions with answers
    sample_test.jsonl      {"question", "answer", "topic"}

The test asks about facts that training told, in phrasings that training does not contain. Only
arithmetic goes further: its test pairs of numbers never occur in training. The same seed gives the
same bytes. Not here: tokenisation, and anything downloaded.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.files import ROOT, write_atomically
from scripts.sample_facts import FRAMES, RELATIONS, TEST_FRAMES, Relation

STATEMENT_ROUNDS = 6  # how often pretraining tells each fact in prose
TRAIN_FRAME_RATE = 0.2  # share of training questions with a greeting or thanks around them
TEST_FRAME_RATE = 0.25
TWO_TURN_CONVERSATIONS = 60


class Example(NamedTuple):
    """One question with its answer, and the fact that it asks about."""

    question: str
    answer: str
    relation: Relation
    fact: tuple[str, ...]


def make_example(
    relation: Relation,
    fact: tuple[str, ...],
    template: str,
    frames: tuple[str, ...],
    frame_rate: float,
    rng: random.Random,
) -> Example:
    """Asks about one fact with one template, sometimes inside a frame such as "Hello! ..."."""
    question = relation.fill(template, fact)
    if relation.framed and rng.random() < frame_rate:
        question = rng.choice(frames).format(question=question)
    return Example(question, relation.fill(relation.answer, fact), relation, fact)


def training_questions(rng: random.Random) -> list[Example]:
    """Asks about every fact in up to `relation.phrasings` different training phrasings."""
    return [
        make_example(relation, fact, template, FRAMES[relation.language], TRAIN_FRAME_RATE, rng)
        for relation in RELATIONS
        for fact in relation.facts
        for template in rng.sample(relation.ask, min(relation.phrasings, len(relation.ask)))
    ]


def heldout_questions(rng: random.Random) -> list[Example]:
    """Asks about every fact once, in one of the phrasings kept out of training."""
    examples = []
    for relation in RELATIONS:
        for index, fact in enumerate(relation.unseen_facts or relation.facts):
            template = relation.ask_test[index % len(relation.ask_test)]
            frames = TEST_FRAMES[relation.language]
            examples.append(make_example(relation, fact, template, frames, TEST_FRAME_RATE, rng))
    return examples


def conversations(examples: list[Example], rng: random.Random) -> list[list[dict[str, str]]]:
    """Makes each example a conversation of its own, and some pairs a conversation of two turns."""
    turns = [[example] for example in examples]
    for _ in range(TWO_TURN_CONVERSATIONS):
        first = rng.choice(examples)
        language = first.relation.language
        turns.append([first, rng.choice([e for e in examples if e.relation.language == language])])
    rng.shuffle(turns)
    return [
        [
            {"role": role, "content": content}
            for example in turn
            for role, content in (("user", example.question), ("assistant", example.answer))
        ]
        for turn in turns
    ]


def paragraphs(sentences: list[str], language: str, rng: random.Random) -> list[str]:
    """Joins sentences, in order, into paragraphs of two to five."""
    texts, start = [], 0
    while start < len(sentences):
        length = rng.randint(2, 5)
        texts.append((" " if language == "en" else "").join(sentences[start : start + length]))
        start += length
    return texts


def pretrain_texts(rng: random.Random) -> list[str]:
    """Tells the facts in prose: paragraphs on one subject or on many, and questions answered."""
    texts = []
    for number in range(STATEMENT_ROUNDS):
        for language in ("en", "zh"):
            mixed = []
            for relation in (r for r in RELATIONS if r.language == language):
                template = relation.statements[number % len(relation.statements)]
                sentences = [relation.fill(template, fact) for fact in relation.facts]
                rng.shuffle(sentences)
                if number % 2:
                    mixed += sentences
                else:
                    texts += paragraphs(sentences, language, rng)
            rng.shuffle(mixed)
            texts += paragraphs(mixed, language, rng)
    asked = {"en": 'Question: "{0}" Answer: {1}', "zh": "问题：{0}回答：{1}"}
    texts += [
        asked[relation.language].format(
            relation.fill(rng.choice(relation.ask), fact), relation.fill(relation.answer, fact)
        )
        for relation in RELATIONS
        for fact in relation.facts
    ]
    texts = list(dict.fromkeys(texts))
    rng.shuffle(texts)
    return texts


def write_jsonl(path: Path, records: list[dict]) -> None:
    """Writes one JSON object per line; a reader sees the old file or the whole new one."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    write_atomically(path, lambda file: file.write("".join(lines).encode()))


def print_counts(train: list[Example], test: list[Example]) -> None:
    """Prints facts, training questions and test questions per topic."""
    facts = dict.fromkeys((e.relation, e.fact) for e in train)
    columns = (
        Counter(relation.topic for relation, _ in facts),
        Counter(e.relation.topic for e in train),
        Counter(e.relation.topic for e in test),
    )
    print(f"{'topic':<18}{'facts':>8}{'train':>8}{'test':>8}")
    for topic in columns[0]:
        print(f"{topic:<18}" + "".join(f"{column[topic]:>8}" for column in columns))
    print(f"{'total':<18}" + "".join(f"{column.total():>8}" for column in columns))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=ROOT / "dataset",
        help="folder for the three files, made if missing (default: dataset/ of the repository)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=42,
        help="seed of all random choices; the same seed writes the same bytes (default: 42)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    rng = random.Random(args.seed)
    train = training_questions(rng)
    test = heldout_questions(random.Random(args.seed))  # the same test, however training changes
    files = {
        "sample_pretrain.jsonl": [{"text": text} for text in pretrain_texts(rng)],
        "sample_sft.jsonl": [{"conversations": turns} for turns in conversations(train, rng)],
        "sample_test.jsonl": [
            {"question": e.question, "answer": e.answer, "topic": e.relation.topic} for e in test
        ],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    print_counts(train, test)
    for name, records in files.items():
        write_jsonl(args.output_dir / name, records)
        print(f"wrote {len(records):,} lines to {args.output_dir / name}")


if __name__ == "__main__":
    main()
