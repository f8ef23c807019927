"""The one data structure of the sample data: a relation, its facts, and the ways to speak of it.

A relation such as "capital of" holds many facts (France, Paris) and several templates. Training
questions are made from `ask`, test questions from `ask_test`; the two share the words that carry
the meaning (the country, "capital") and nothing else, so a model that answers the test has learned
the fact and not the sentence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """Facts of one kind in one language. Templates name the columns: "capital of {country}"."""

    topic: str
    language: str  # "en" or "zh"
    columns: tuple[str, ...]
    facts: tuple[tuple[str, ...], ...]  # one value per column
    ask: tuple[str, ...]  # question templates for training
    ask_test: tuple[str, ...]  # question templates held out for the test
    answer: str  # one template: a fact has one answer, always worded the same
    statements: tuple[str, ...]  # running prose for pretraining
    framed: bool = True  # may "Hello!" or "Thank you!" stand around the question?
    phrasings: int = 7  # training questions per fact, drawn from `ask`
    unseen_facts: tuple[tuple[str, ...], ...] = ()  # asked in the test instead of `facts`

    def fill(self, template: str, fact: tuple[str, ...]) -> str:
        """Put one fact into one template; the first letter becomes a capital."""
        text = template.format(**dict(zip(self.columns, fact, strict=True)))
        return text[0].upper() + text[1:]


def reply(
    topic: str,
    language: str,
    answer: str,
    ask: tuple[str, ...],
    ask_test: tuple[str, ...],
    occasion: str,
) -> Relation:
    """A relation with a single fact: what MiniMind answers on one occasion ("says goodbye")."""
    told = {
        "en": (
            "When someone {occasion}, MiniMind answers: {answer}",
            "If a person {occasion}, a friendly answer is: {answer}",
        ),
        "zh": (
            "有人{occasion}的时候，MiniMind会回答：{answer}",
            "如果有人{occasion}，可以这样回答：{answer}",
        ),
    }
    return Relation(
        topic=topic,
        language=language,
        columns=("occasion", "answer"),
        facts=((occasion, answer),),
        ask=ask,
        ask_test=ask_test,
        answer="{answer}",
        statements=told[language],
        framed=False,
        phrasings=len(ask),
    )
