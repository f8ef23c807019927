"""Fine-tuning examples: conversations, of which only the assistant's answers are targets."""

import numpy as np

from dataset.document import Document, Stage
from dataset.jsonl import clean_surrogates, list_keys, shorten
from dataset.tokenizer import EOS_ID, Tokenizer

ROLES = {"system": "system", "user": "user", "assistant": "assistant",
         "human": "user", "gpt": "assistant"}  # the last two are ShareGPT's words


def parse(record: dict) -> list[dict[str, str]]:
    """The messages of a record, as {"role", "content"}. Raises ValueError: what is wrong with it.

    Read are `conversations` or `messages`, with `role`/`content` or ShareGPT's `from`/`value`.
    """
    turns = record.get("conversations")
    if turns is None:
        turns = record.get("messages")
    if turns is None:
        raise ValueError(f'no "conversations" (its keys: {list_keys(record)})')
    if not isinstance(turns, list) or not turns:
        raise ValueError('"conversations" is empty, or no list')
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise ValueError(f"message {number} is {type(turn).__name__}, expected an object")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"message {number} has the role {shorten(role)}, expected one of "
                             f"{', '.join(ROLES)}")
        if not isinstance(content, str) or not content:
            raise ValueError(f"message {number} has no content (a non-empty string)")
        messages.append({"role": ROLES[role], "content": clean_surrogates(content)})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant turn, so nothing to learn from")
    return messages


def encode(tokenizer: Tokenizer, conversations: list[list[dict[str, str]]]) -> list[Document]:
    """The chat template, up to the last `<|im_end|>` that is a target: nothing is learned after."""
    documents = []
    for messages, (ids, mask) in zip(conversations, tokenizer.render_chats(conversations)):
        end = len(mask) - mask[::-1].index(1)
        answer_bytes = sum(len(message["content"].encode("utf-8"))
                           for message in messages if message["role"] == "assistant")
        documents.append(Document(ids[:end], mask[:end], answer_bytes))
    return documents


def cut(cache, documents: np.ndarray, max_seq_len: int) -> np.ndarray:
    """How many tokens of each conversation to keep so that it fits a row of max_seq_len positions.

    One too long is cut after the last answer that ends inside the row; if not even the first does,
    at the row's end, without its end mark. 0 drops one that has no target inside the row.
    documents are indices; returns int64 of the same length.
    """
    lengths = cache.lengths[documents]
    for index in np.flatnonzero(lengths > max_seq_len + 1):
        start = cache.offsets[documents[index]]
        ids = cache.tokens[start : start + max_seq_len + 1]
        mask = cache.loss_mask[start : start + max_seq_len + 1]
        answer_ends = np.flatnonzero((ids == EOS_ID) & (mask == 1))
        if answer_ends.size:
            lengths[index] = answer_ends[-1] + 1
        else:
            lengths[index] = max_seq_len + 1 if mask.any() else 0
    return lengths


def show_sample(cache, tokenizer: Tokenizer, count: int) -> str:
    """The first conversations token by token: id, `+` where the token is a target, its text."""
    lines = []
    for index in range(min(count, len(cache.lengths))):
        start, end = cache.offsets[index : index + 2]
        lines.append(f"--- {cache.source}:{cache.line_numbers[index]} (+ counts in the loss)")
        for token, supervised in zip(cache.tokens[start:end], cache.loss_mask[start:end]):
            mark = "+" if supervised else " "
            lines.append(f"{token:6d} {mark} {tokenizer.decode([int(token)])!r}")
    return "\n".join(lines)


SFT = Stage("full_sft", parse, encode, cut)
