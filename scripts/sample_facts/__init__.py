"""Facts and templates of the sample data, one module per topic."""

from . import (
    animals,
    arithmetic,
    body_and_tools,
    capitals,
    colours,
    counting,
    greetings,
    opposites,
    professions,
    reasoning,
    seasons_and_days,
    short_stories,
    small_talk,
    sorting,
    translation,
    units,
    who_am_i,
)
from .framing import FRAMES, TEST_FRAMES
from .relation import Relation

MODULES = (
    capitals,
    opposites,
    translation,
    units,
    animals,
    seasons_and_days,
    colours,
    body_and_tools,
    professions,
    who_am_i,
    small_talk,
    greetings,
    short_stories,
    reasoning,
    sorting,
    counting,
    arithmetic,
)
RELATIONS: tuple[Relation, ...] = sum((module.RELATIONS for module in MODULES), ())

__all__ = ["FRAMES", "RELATIONS", "TEST_FRAMES", "Relation"]
