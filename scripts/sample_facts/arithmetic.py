"""Sums, differences and the times table: the test asks about pairs of numbers never seen.

Both orders of an unseen sum or product are kept out of training, in both languages and in the
pretraining text, so the right answer has to be worked out.
"""

import random
from collections.abc import Callable

from .relation import Relation

TOPIC = "arithmetic"
COLUMNS = ("a", "b", "result")
UNSEEN_PAIRS = 10  # per operation

Fact = tuple[str, ...]


def split(
    pairs: list[tuple[int, int]], result: Callable[[int, int], int]
) -> tuple[list[Fact], list[Fact]]:
    """Splits pairs into (seen, unseen) facts; a pair and its mirror image go the same way."""
    unordered = sorted({tuple(sorted(pair)) for pair in pairs})
    chosen = set(random.Random(7).sample(unordered, UNSEEN_PAIRS))
    seen, unseen = [], []
    for a, b in pairs:
        fact = (str(a), str(b), str(result(a, b)))
        (unseen if tuple(sorted((a, b))) in chosen else seen).append(fact)
    return seen, unseen


def one_order(facts: list[Fact]) -> list[Fact]:
    """Keeps one of 3 + 4 and 4 + 3, so that the test asks each pair once."""
    return [fact for fact in facts if int(fact[0]) >= int(fact[1])]


OPERATIONS = {
    "+": split([(a, b) for a in range(1, 11) for b in range(1, 11)], lambda a, b: a + b),
    "-": split([(a + b, b) for a in range(1, 11) for b in range(1, 11)], lambda a, b: a - b),
    "×": split([(a, b) for a in range(2, 10) for b in range(2, 10)], lambda a, b: a * b),
}

ENGLISH_ASK = (
    "What is {{a}} {sign} {{b}}?",
    "How much is {{a}} {sign} {{b}}?",
    "Calculate {{a}} {sign} {{b}}.",
    "{{a}} {sign} {{b}} = ?",
)
CHINESE_ASK = (
    "{{a}} {sign} {{b}} 等于多少？",
    "请计算 {{a}} {sign} {{b}}。",
    "{{a}} {sign} {{b}} 是多少？",
    "你知道 {{a}} {sign} {{b}} 等于几吗？",
)
ENGLISH_TEST = ("Could you tell me how much {{a}} {sign} {{b}} is?",)
CHINESE_TEST = ("我想知道 {{a}} {sign} {{b}} 得多少。",)
ENGLISH_TOLD = ("{{a}} {sign} {{b}} = {{result}}.",)
CHINESE_TOLD = ("{{a}} {sign} {{b}} 等于 {{result}}。",)


def signed(templates: tuple[str, ...], sign: str) -> tuple[str, ...]:
    """Writes the sign into templates that keep {a} and {b} open."""
    return tuple(template.format(sign=sign) for template in templates)


def operation(sign: str, language: str) -> Relation:
    """Makes the relation of an operation in one language; each language gets every second fact."""
    english = language == "en"
    turn = slice(0 if english else 1, None, 2)
    seen, unseen = OPERATIONS[sign]
    return Relation(
        topic=TOPIC,
        language=language,
        columns=COLUMNS,
        facts=tuple(seen[turn]),
        unseen_facts=tuple(one_order(unseen)[turn]),
        ask=signed(ENGLISH_ASK if english else CHINESE_ASK, sign),
        ask_test=signed(ENGLISH_TEST if english else CHINESE_TEST, sign),
        answer="{result}",
        statements=signed(ENGLISH_TOLD if english else CHINESE_TOLD, sign),
        phrasings=1,
    )


RELATIONS = tuple(operation(sign, language) for sign in OPERATIONS for language in ("en", "zh"))
