"""The shipped tokenizer keeps its promises, and the script that trains it keeps its own."""

import json
import lzma
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dataset.tokenizer import CONTROL_TOKENS
from scripts.train_tokenizer import language_of, measure, mix_texts, read_texts

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train_tokenizer.py"
SHIPPED = ROOT / "model" / "tokenizer.json"
SHARED_DATA = ROOT.parent / "shared" / "data"
# Characters per token to reach: MiniMind's better tokenizer on each file, + 12 % zh, + 5 % en.
TARGETS = {
    "heldout_pretrain": {"zh": 1.279, "en": 3.218},
    "heldout_sft": {"zh": 1.341, "en": 2.720},
}
NASTY = [
    "", " ", "   ", "\n", "\r\n", "\t\t", "\n\n  \n", "a  b   c ", " trailing space ",
    "\x00", "NUL \x00 inside", "".join(map(chr, range(0x20))), "\x7f\x80\x85\x9f\xa0\xad",
    "def f(x):\r\n\treturn x**2  # CRLF\r\n", "    if a:\n        b = {'k': [1, 2]}\n\n\n",
    "literal \ufffd and \ufeff and \u2028\u2029\u200b", "\U0010ffff\U000e0001\ue000\uffff",
    # A family and a flag joined by U+200D, a skin tone, a pair of regional indicators.
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd \U0001f1e8\U0001f1f3 1\ufe0f\u20e3",
    "𠀀𠮷𪚥𰻞㐂", "䶮龘靐", "ｆｕｌｌ　ｗｉｄｔｈ１２３", "ﬁ ½ Ⅷ ² ①",
    "नमस्ते สวัสดี 한국어 العربية עברית",
    "e\u0301 vs \u00e9, a\u0308\u0323\u0301, \u0301alone", "Z\u0337\u031b\u0308\u0301a\u0334l",
    "don't can’t 'tis o'clock''", "1,234.56 + 7=? 0012 ٣٤", "of the of a in the theology  of the",
    "你好，世界。Hello！价格是¥12.5元；GPT模型（第3版）", "，，。。！！……——“”《》",
    "a" * 5000, "啊" * 2000, " " * 1000, "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|><|im_end|", "<|<|im_end|>|>",
    "C:\\path\\to\\$x^2 + \\frac{1}{2}$ https://a.b/c?d=e&f=%20",
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_file(str(SHIPPED))
    tokenizer.encode_special_tokens = True  # as the project always encodes: text is only text
    return tokenizer


def random_texts(count, seed):
    """Random Unicode strings: any code point but surrogates, half of them from crowded blocks."""
    rng = random.Random(seed)
    blocks = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x2000, 0x206F), (0x3000, 0x30FF),
              (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0x20000, 0x2FA1F), (0, 0x10FFFF)]
    for _ in range(count):
        points = [rng.randint(*rng.choice(blocks)) for _ in range(rng.randint(1, 60))]
        yield "".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF)


def run_script(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A small file of both kinds of records, with many pairs that are equally frequent."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(60)] + ["你好", "天气", "今天"]
    path = tmp_path_factory.mktemp("tokenizer") / "sample.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(200):
            text = " ".join(rng.choices(words, k=8))
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "42。"}]
            record = [{"text": text}, {"conversations": messages}, {"messages": messages}][i % 3]
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path


def test_shipped_vocabulary(tokenizer):
    """6,400 tokens, control tokens at 0-2, all 256 bytes, and nothing that alters text."""
    assert tokenizer.get_vocab_size() == 6400
    assert sorted(tokenizer.get_vocab().values()) == list(range(6400))
    assert [tokenizer.id_to_token(i) for i in range(3)] == list(CONTROL_TOKENS)
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == [0, 1, 2]
    assert all(token.special and not token.normalized for token in added.values())
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256
    assert tokenizer.normalizer is None and tokenizer.post_processor is None


def test_tokens_stay_inside_a_sentence_and_a_digit(tokenizer):
    """No token joins two digits, or a sentence's end and the next sentence's first letter."""
    for token_id in range(3, 6400):
        text = tokenizer.decode([token_id])
        assert sum(c.isdigit() for c in text) <= 1, text
        assert not any(a in "。！？；\n" and b.isalpha() for a, b in pairwise(text)), text
        assert not any(a + b in (". ", "! ", "? ") for a, b in pairwise(text)), text


def test_every_string_survives(tokenizer):
    """decode(encode(text)) == text, and text never becomes a control token."""
    for text in [*NASTY, "".join(NASTY), *random_texts(2000, seed=1)]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert not {0, 1, 2} & set(ids)


def test_every_id_sequence_decodes(tokenizer):
    """Also ids that no text encodes to, control tokens among them."""
    rng = random.Random(2)
    for _ in range(500):
        ids = [rng.randrange(6400) for _ in range(rng.randint(0, 80))] + [rng.randrange(3)]
        for skip in (True, False):
            assert isinstance(tokenizer.decode(ids, skip_special_tokens=skip), str)


@pytest.mark.slow
def test_training_is_deterministic(sample, tmp_path):
    """The same input gives the same bytes, in other processes too, and --overwrite 1 replaces."""
    output = tmp_path / "new" / "tokenizer.json"
    arguments = ("--data_path", sample, "--vocab_size", 340, "--output", output,
                 "--take_every", 2)
    contents = []
    for overwrite in (0, 1, 1):
        result = run_script(*arguments, "--overwrite", overwrite)
        assert result.returncode == 0, result.stderr
        contents.append(output.read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert [path.name for path in output.parent.iterdir()] == ["tokenizer.json"]
    trained = Tokenizer.from_file(str(output))
    assert trained.get_vocab_size() == 340
    assert [trained.id_to_token(i) for i in range(3)] == list(CONTROL_TOKENS)
    report = run_script("--report_path", sample, "--tokenizer", output)
    assert report.returncode == 0 and report.stdout.count("\n") == 3, report.stderr


def test_refuses_to_overwrite(sample, tmp_path):
    """Without --overwrite 1 an existing file keeps its bytes; the message says what to do."""
    output = tmp_path / "tokenizer.json"
    output.write_text("mine")
    result = run_script("--data_path", sample, "--vocab_size", 300, "--output", output)
    assert result.returncode == 2
    assert str(output) in result.stderr and "--overwrite 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert output.read_text() == "mine"


@pytest.mark.parametrize(("content", "expected"), [
    ('{"text": "a"}\n{"text": 3}\n', "data.jsonl:2:"),
    ('{"text": "a"}\nbroken\n', "data.jsonl:2:"),
    ('{"text": "too little"}\n', "--vocab_size"),
    (None, "no such file"),
])
def test_user_errors_are_named(tmp_path, content, expected):
    """Exit status 2, the place and the remedy, no traceback, no file left behind."""
    data, output = tmp_path / "data.jsonl", tmp_path / "tokenizer.json"
    if content:
        data.write_text(content)
    result = run_script("--data_path", data, "--output", output, "--take_every", 1)
    assert result.returncode == 2
    assert expected in result.stderr and "Traceback" not in result.stderr
    assert not output.exists()


def test_mix_counts_copies(tmp_path):
    """Weights are copies on average; only the first messages of a conversation are taken."""
    path = tmp_path / "data.jsonl"
    turns = [{"from": ("human", "gpt")[i % 2], "value": f"q{i}"} for i in range(5)]
    lines = [{"text": "你好"}] * 4 + [{"text": "hello"}] * 4 + [{"conversations": turns}]
    path.write_text("\n".join(map(json.dumps, lines)))
    weights = {("text", "zh"): 1.5, ("text", "en"): 0.5, ("chat", "zh"): 9, ("chat", "en"): 1}
    texts = list(mix_texts([path], weights, max_messages=3))
    assert texts == ["你好"] * 6 + ["hello"] * 2 + ["q0", "q1", "q2"]
    assert len(list(mix_texts([path], weights, take_every=4))) == 1 + 0 + 5
    assert language_of("三成abcdefg") == "en" and language_of("三三成成abcdef") == "zh"


@pytest.mark.parametrize("name", TARGETS)
def test_compression_targets(tokenizer, tmp_path, name):
    """On held-out text, more characters per token than MiniMind's tokenizers by the set margin."""
    source = SHARED_DATA / f"{name}.jsonl.xz"
    if not source.exists():
        pytest.skip("the held-out data (../shared/data) is not on this machine")
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(lzma.decompress(source.read_bytes()))
    result = measure(tokenizer, (text for _, text in read_texts(path)))
    for language, target in TARGETS[name].items():
        assert result[language][0] >= target
