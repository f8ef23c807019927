"""Trains the tokenizer, a byte-level BPE of 6,400 tokens, and measures how far its tokens stretch.

Byte-pair encoding (arXiv 1508.07909) over bytes, as in GPT-2, starts from the 256 bytes, so that
every string has an encoding and decodes back unchanged. Then it joins, 6,141 times, the most
frequent pair of neighbours. With so few merges the design lies in two things: what may become one
token (`PATTERN`), and on which text the pairs are counted (the mix).

The mix: every text counts `--weight_{text,chat}_{zh,en}` times (a document of {"text"} / a message
of a conversation; Chinese / English), and only the first `--max_messages` messages of a
conversation count, because the long ones are counselling dialogues that all sound alike. Every
`--take_every`th line is read: 6,141 frequent pairs are known long before 150 MB are counted. The
held-out files are for `--report_path` only. The shipped file was made, with the default mix, by

    mkdir -p dataset/raw
    for name in pretrain sft; do
        xz -dkc ../shared/data/$name.jsonl.xz > dataset/raw/$name.jsonl
    done
    python scripts/train_tokenizer.py --overwrite 1 \\
        --data_path dataset/raw/pretrain.jsonl dataset/raw/sft.jsonl

on tokenizers 0.23; the same input gives the same file. Characters and bytes per token:

    python scripts/train_tokenizer.py --report_path FILE [FILE ...]

Not here: a normalizer (it would change the text), a chat template (see dataset/tokenizer.py).
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dataset.jsonl import DataError, JsonlReader
from dataset.pretrain import PRETRAIN
from dataset.stage_data import parse_any
from dataset.tokenizer import CONTROL_TOKENS
from model.files import ROOT, find_path, write_atomically

DEFAULT_MIX = {("text", "zh"): 1.25, ("text", "en"): 1, ("chat", "zh"): 3, ("chat", "en"): 5}
MIN_VOCAB_SIZE = len(CONTROL_TOKENS) + 256

# A token never crosses the border between two pieces of this pattern; the first alternative that
# fits wins.
LETTER = r"[\p{L}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join([
    # The commonest pairs of small words (" of the") may become one token.
    r" (?:of|in|to|on|for|at|by|from|with|and|that|is|was|as|all|into) (?:the|a)(?!\p{L})",
    # A run of Chinese, in which BPE finds the words, or one word of another script ("don't" too).
    # Either may take along a mark before it, as in " word", ", and", "(x", "，但是", ".txt", yet
    # not one that ends a Chinese sentence. (After an English sentence comes a space.)
    r"(?:, |[^\r\n\p{L}\p{N}。！？；])?(?:\p{Han}+|" + rf"{LETTER}+(?:['’]{LETTER}+)*)",
    # One digit at a time: each keeps its own meaning, and sums can be learned digit by digit.
    r" ?\p{N}",
    # Punctuation with the line breaks after it; line breaks with the blanks before them; blanks
    # up to the one that belongs to the next word.
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def read_texts(path, max_messages=0, take_every=1):
    """Yields (kind, text) for each document ("text") or message ("chat") of a JSONL file.

    Takes lines 1, 1 + `take_every`, ... and of a conversation only the first `max_messages`
    messages (0: all). Raises DataError that lists the faulty lines, if there are any.
    """
    for number, (stage, example) in JsonlReader(path, parse_any):
        if (number - 1) % take_every:
            continue
        if stage is PRETRAIN:
            yield "text", example
        else:
            for message in example[: max_messages or None]:
                yield "chat", message["content"]


def language_of(text):
    """"zh" if more than 30 % of the characters are in U+4E00-9FFF, else "en"."""
    return "zh" if len(re.findall("[\u4e00-\u9fff]", text)) > 0.3 * len(text) else "en"


def mix_texts(paths, weights, max_messages=0, take_every=1):
    """Yields each text `weights[kind, language]` times on average, by counting, not by chance.

    Weight 1.5 gives 1, 2, 1, 2, ... copies of the texts of that class, the same in every run.
    """
    owed = Counter()
    for path in paths:
        for kind, text in read_texts(path, max_messages, take_every):
            group = (kind, language_of(text))
            owed[group] += weights[group]
            while owed[group] >= 1:
                owed[group] -= 1
                yield text


def train(texts, vocab_size, max_token_length, show_progress=False):
    """Trains on an iterable of strings and returns a `Tokenizer` of exactly `vocab_size` tokens.

    Raises DataError if the texts hold too few distinct pairs for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, seen or not
        max_token_length=max_token_length or None,
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(f"the data yields {tokenizer.get_vocab_size():,} tokens, expected "
                        f"{vocab_size:,}; give more text or a smaller --vocab_size")
    return tokenizer


def measure(tokenizer, texts, batch_size=1000):
    """Returns {language: (characters per token, UTF-8 bytes per token)}, sums over all texts."""
    characters, num_bytes, tokens = Counter(), Counter(), Counter()
    tokenizer.encode_special_tokens = True  # a control token written in a text is text
    texts = iter(texts)
    while batch := [text for _, text in zip(range(batch_size), texts, strict=False)]:
        for text, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            language = language_of(text)
            characters[language] += len(text)
            num_bytes[language] += len(text.encode("utf-8"))
            tokens[language] += len(encoding.ids)
    return {lang: (characters[lang] / n, num_bytes[lang] / n) for lang, n in tokens.items() if n}


def print_report(tokenizer, paths):
    """Prints a Markdown table with one row per file; a language that does not occur has dashes."""
    print("| file | zh chars/token | zh bytes/token | en chars/token | en bytes/token |")
    print("|---|--:|--:|--:|--:|")
    for path in paths:
        result = measure(tokenizer, (text for _, text in read_texts(path)))
        cells = [f"{x:.3f}" for lang in ("zh", "en") for x in result.get(lang, ())] or ["-"] * 4
        if len(cells) == 2:
            cells = [*cells, "-", "-"] if "zh" in result else ["-", "-", *cells]
        print(f"| {Path(path).stem} | {' | '.join(cells)} |", flush=True)


def parse_args():
    """Returns the flags. Wrong ones are all reported together, with exit status 2."""
    parser = argparse.ArgumentParser(description="Trains or measures the byte-level BPE tokenizer.")
    train_group = parser.add_argument_group("train")
    add = train_group.add_argument
    add("--data_path", nargs="+", default=[], metavar="FILE",
        help='JSONL files to train on: {"text"} or {"conversations"} records')
    add("--vocab_size", type=int, default=6400,
        help=f"size in tokens, at least {MIN_VOCAB_SIZE} (special tokens and bytes)")
    add("--output", type=Path, default=ROOT / "model" / "tokenizer.json", help="file to write")
    add("--overwrite", type=int, choices=(0, 1), default=0,
        help="1: replace --output if it exists; 0: stop instead")
    for (kind, lang), weight in DEFAULT_MIX.items():
        unit = "document" if kind == "text" else "message"
        add(f"--weight_{kind}_{lang}", type=float, default=weight, metavar="W",
            help=f"copies of each {lang} {unit} (0: leave them out; default {weight})")
    add("--max_messages", type=int, default=6,
        help="messages taken from the start of each conversation (0: all)")
    add("--take_every", type=int, default=4, help="read every n-th line of each file (1: all)")
    add("--max_token_length", type=int, default=12,
        help="length limit of a token in bytes; a Chinese character has 3 (0: no limit)")
    report_group = parser.add_argument_group("report (instead of training)")
    report_group.add_argument("--report_path", nargs="+", default=[], metavar="FILE",
                              help="JSONL files: characters and bytes per token, by language")
    report_group.add_argument("--tokenizer", default=str(ROOT / "model" / "tokenizer.json"),
                              help="tokenizer file to measure")
    args = parser.parse_args()

    problems = []
    if bool(args.data_path) == bool(args.report_path):
        problems.append("expected either --data_path (to train) or --report_path (to measure)")
    if args.vocab_size < MIN_VOCAB_SIZE:
        problems.append(f"--vocab_size {args.vocab_size}: expected at least {MIN_VOCAB_SIZE}")
    if args.take_every < 1:
        problems.append(f"--take_every {args.take_every}: expected at least 1")
    for name, value in vars(args).items():
        if name.startswith(("weight_", "max_")) and not 0 <= value < float("inf"):
            problems.append(f"--{name} {value}: expected a finite number, 0 or above")
    if args.data_path and args.output.exists() and not args.overwrite:
        problems.append(f"--output {args.output}: exists already, expected a new file name; "
                        f"choose another --output, or --overwrite 1 to replace it")
    if problems:
        parser.error("; ".join(problems))
    return args


def main():
    args = parse_args()
    try:
        if args.report_path:
            tokenizer = Tokenizer.from_file(str(find_path(args.tokenizer)))
            print_report(tokenizer, map(find_path, args.report_path))
            return
        args.data_path = [find_path(path) for path in args.data_path]
        for path in args.data_path:
            if not path.is_file():  # a missing second file is found before the first is read
                raise DataError(f"{path}: there is no such file; unpack .xz files first (xz -dk)")
        weights = {group: getattr(args, "weight_" + "_".join(group)) for group in DEFAULT_MIX}
        texts = mix_texts(args.data_path, weights, args.max_messages, args.take_every)
        tokenizer = train(texts, args.vocab_size, args.max_token_length, sys.stderr.isatty())
        args.output.parent.mkdir(parents=True, exist_ok=True)
        content = (tokenizer.to_str(pretty=True) + "\n").encode()
        write_atomically(args.output, lambda file: file.write(content))
        print(f"wrote {args.output}: {tokenizer.get_vocab_size():,} tokens")
    except DataError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
