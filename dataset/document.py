"""What a stage makes of a line: the two small types that the stages and the token cache share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dataset.tokenizer import Tokenizer


class Document(NamedTuple):
    """One training text or conversation, tokenised."""

    ids: list[int]
    loss_mask: list[int] | None  # 1 where the token counts as a target; None: all but the first do
    text_bytes: int  # UTF-8 bytes of the text that the counting tokens spell


@dataclass(frozen=True)
class Stage:
    """How one kind of training turns lines into documents, and documents into what fits a row."""

    name: str
    parse: Callable[[dict], Any]  # a JSON object -> an example; ValueError says what is wrong
    encode: Callable[[Tokenizer, list], list[Document]]  # many examples at once, on all cores
    cut: Callable[[Any, np.ndarray, int], np.ndarray]  # see `pretrain.cut` and `sft.cut`
