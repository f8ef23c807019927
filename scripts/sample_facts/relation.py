"""The one data structure of the sample data: a relation, its facts, and the ways to speak of it.

A relation such as "capital of" holds many facts (France, Paris) and several templates. Training
questions are made from `ask`, test questions from `ask_test`. The two have words in common, those
that carry the meaning (the country, "capital") and everyday ones ("Could you tell me"), but share
no template and no sentence: a model that answers the test has learned the fact, not the sentence.

Templates differ in shape on purpose (the country first or last, a question, a request, an "if"),
and many openings recur across the topics, so that the opening does not give away what is asked.
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
    phrasings: int = 10  # training questions per fact at most, drawn from `ask`
    unseen_facts: tuple[tuple[str, ...], ...] = ()  # asked in the test instead of `facts`

    def fill(self, template: str, fact: tuple[str, ...]) -> str:
        """Puts one fact into one template; the first letter becomes a capital."""
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
    """Makes a relation of one fact: what MiniMind answers on one occasion ("says goodbye")."""
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
    )
