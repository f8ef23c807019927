"""What the tests of the token cache compare with."""

from pathlib import Path

from dataset.token_cache import TokenCache
from dataset.tokenizer import BOS_ID, EOS_ID

TEXTS = [f"text number {number}, 第{number}篇文章。" * (1 + number % 7) for number in range(40)]


def folders(cache_dir) -> list[Path]:
    """What a reader could take for a cache, or what was left behind."""
    return [path for path in cache_dir.iterdir() if path.suffix != ".lock"]


def check_content(cache: TokenCache, texts, tokenizer) -> None:
    """Compares a pretraining cache with the texts, tokenised one at a time."""
    assert len(cache.lengths) == len(cache.text_bytes) == len(texts)
    assert cache.offsets[0] == 0 and cache.offsets[-1] == len(cache.tokens)
    for index, text in enumerate(texts):
        ids = [BOS_ID, *tokenizer.encode(text), EOS_ID]
        begin, end = cache.offsets[index : index + 2]
        assert cache.tokens[begin:end].tolist() == ids and cache.lengths[index] == len(ids)
        assert cache.text_bytes[index] == len(text.encode())
