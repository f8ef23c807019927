"""The JSONL reader: every fault is named, every accepted oddity arrives, memory stays constant.

Cases A27-A31 and A33, promise P6. The lists here are those of `dataset/README.md`.
"""

import json
import tracemalloc

import pytest

from dataset.jsonl import DataError, JsonlReader
from dataset.pretrain import parse as parse_text
from dataset.sft import parse as parse_chat

GOOD_TEXT = b'{"text": "good"}\n'
GOOD_CHAT = (b'{"conversations": [{"role": "user", "content": "hi"}, '
             b'{"role": "assistant", "content": "hello"}]}\n')


def read(path, parse=parse_text, bad_lines="stop"):
    """All examples of a file, without their line numbers."""
    return [example for _, example in JsonlReader(path, parse, bad_lines)]


def error_of(path, parse=parse_text, bad_lines="stop") -> str:
    """The message of the DataError that reading the file raises."""
    with pytest.raises(DataError) as caught:
        read(path, parse, bad_lines)
    return str(caught.value)


def conversation(*turns, key="conversations") -> bytes:
    return json.dumps({key: list(turns)}).encode()


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}

TEXT_FAULTS = {
    "cut in the middle": (b'{"text": "cut in the mi', "broken JSON"),
    "single quotes": (b"{'text': 'x'}", "broken JSON"),
    "two objects": (b'{"text": "x"}{"text": "y"}', "broken JSON"),
    "not JSON": (b"once upon a time", "broken JSON"),
    "only NUL": (b"\x00\x00\x00", "broken JSON"),
    "deep nesting, open": (b'{"text": "x", "y": ' + b"[" * 100_000, "broken JSON"),
    "deep nesting, closed": (b'{"y":' * 50_000 + b"1" + b"}" * 50_000, "broken JSON"),
    "array": (b'["text", "x"]', "list, expected an object"),
    "string": (b'"text"', "str, expected an object"),
    "number": (b"17", "int, expected an object"),
    "null line": (b"null", "expected an object"),
    "no text (A28)": (b'{"txt": "y"}', "no \"text\" (its keys: 'txt')"),
    "no key at all": (b"{}", 'no "text"'),
    "null text (A28)": (b'{"text": null}', '"text" is NoneType, expected a string'),
    "number text (A29)": (b'{"text": 3.5}', '"text" is float, expected a string'),
    "list text": (b'{"text": ["x"]}', '"text" is list, expected a string'),
    "empty text": (b'{"text": ""}', '"text" is empty'),
    "blank text": (b'{"text": " \\n\\t"}', '"text" is empty'),
    "GBK (A29)": ('{"text": "中文"}'.encode("gbk"), "iconv -f GBK -t UTF-8"),
    "not UTF-8": (b'{"text": "caf\xff"}', "not UTF-8 (byte 0xff at column 14)"),
    "half a character": ('{"text": "中'.encode()[:-1], "not UTF-8 (byte 0xe4 at column 11)"),
    "surrogate as raw bytes": (b'{"text": "\xed\xa0\xbd"}', "not UTF-8"),
}

CHAT_FAULTS = {
    "no conversations": (b'{"text": "x"}', "no \"conversations\" (its keys: 'text')"),
    "null conversations": (b'{"conversations": null}', 'no "conversations"'),
    "empty conversations (A31)": (b'{"conversations": []}', '"conversations" is empty'),
    "conversations are a string": (b'{"conversations": "hi"}', "no list"),
    "conversations are an object": (b'{"conversations": {"role": "user"}}', "no list"),
    "message is a string": (conversation(USER, "hello"), "message 2 is str, expected an object"),
    "unknown role": (conversation(USER, {"role": "robot", "content": "x"}),
                     "message 2 has the role 'robot'"),
    "no role": (conversation({"content": "hi"}, ASSISTANT), "message 1 has the role None"),
    "role is a list": (conversation({"role": ["user"], "content": "hi"}), "message 1 has the role"),
    "no content": (conversation(USER, {"role": "assistant"}), "message 2 has no content"),
    "null content": (conversation(USER, {"role": "assistant", "content": None}),
                     "message 2 has no content"),
    "empty content": (conversation({"role": "user", "content": ""}, ASSISTANT),
                      "message 1 has no content"),
    "content is a number": (conversation(USER, {"role": "assistant", "content": 4}),
                            "message 2 has no content"),
    "no assistant (A20)": (conversation(USER, USER), "no assistant turn"),
    "only system": (conversation({"role": "system", "content": "be kind"}), "no assistant turn"),
    "broken JSON": (b'{"conversations": [', "broken JSON"),
}

FAULTS = [pytest.param(raw, what, parse, good, id=f"{stage}: {name}")
          for stage, parse, good, faults in (("text", parse_text, GOOD_TEXT, TEXT_FAULTS),
                                             ("chat", parse_chat, GOOD_CHAT, CHAT_FAULTS))
          for name, (raw, what) in faults.items()]


@pytest.mark.parametrize(("raw", "what", "parse", "good"), FAULTS)
def test_fault_is_named_with_file_and_line_or_skipped(raw, what, parse, good, write_jsonl):
    """A faulty line is fatal and named as file:line, or counted and left out (P6, A27-A31)."""
    path = write_jsonl("data.jsonl", good + raw + b"\n" + good)
    message = error_of(path, parse)
    assert f"{path}:2: " in message and what in message
    assert "1 faulty line(s), 2 good" in message and "--bad_lines skip" in message
    assert raw[:5].decode("utf-8", "backslashreplace").replace("\x00", "\\x00") in message

    reader = JsonlReader(path, parse, "skip")
    assert [number for number, _ in reader] == [1, 3]
    assert (reader.num_examples, reader.num_bad) == (2, 1)
    assert f"{path}:2: " in reader.summary() and what in reader.summary()


def test_invalid_utf8_that_is_not_gbk_is_not_called_gbk(write_jsonl):
    """GBK is named only where the bytes decode as GBK (A29)."""
    path = write_jsonl("data.jsonl", TEXT_FAULTS["not UTF-8"][0])
    assert "not UTF-8" in error_of(path) and "GBK" not in error_of(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_file_is_named(encoding, write_jsonl):
    """A file that some editor saved as UTF-16 is refused with the name of its encoding (A29)."""
    text = '{"text": "hello"}\n{"text": "中文"}\n'
    if encoding == "utf-16-be":
        text = "\ufeff" + text
    path = write_jsonl("data.jsonl", text.encode(encoding))
    message = error_of(path)
    assert f"{path}:1: not UTF-8" in message and "UTF-16" in message


@pytest.mark.parametrize(("raw", "texts"), [
    pytest.param(b'\n{"text": "a"}\n\n \t \n{"text": "b"}\n\n\n', ["a", "b"], id="blank lines"),
    pytest.param(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', ["a", "b"], id="BOM"),
    pytest.param(b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["a", "b"], id="CRLF"),
    pytest.param(b'{"text": "a\x00b"}\n', ["a\0b"], id="NUL, raw"),
    pytest.param(b'{"text": "a\\u0000b"}\n', ["a\0b"], id="NUL, escaped"),
    pytest.param(b'{"text": "a\tb\x1b\x0b\x0c\rc"}\n', ["a\tb\x1b\x0b\x0c\rc"], id="controls, raw"),
    pytest.param(b'{"id": 7, "text": "a", "meta": {"x": [null, NaN]}}\n', ["a"], id="extra keys"),
    pytest.param('{"text": "a\u2028b\u2029c\u0085d"}\n'.encode(), ["a\u2028b\u2029c\u0085d"],
                 id="U+2028 inside a line"),
    pytest.param(b'{"text": "a\\u2028b"}\n', ["a\u2028b"], id="U+2028, escaped"),
    pytest.param(b'{"text": "a"}\n{"text": "b"}', ["a", "b"], id="no final newline"),
    pytest.param(b'{"text": "\\ud83d"}\n', ["\ufffd"], id="lone high surrogate"),
    pytest.param(b'{"text": "a\\ude00b"}\n', ["a\ufffdb"], id="lone low surrogate"),
    pytest.param(b'{"text": "\\ude00\\ud83d!"}\n', ["\ufffd\ufffd!"], id="surrogates, reversed"),
    pytest.param(b'{"text": "\\ud83d\\ud83d\\ude00"}\n', ["\ufffd\U0001f600"],
                 id="lone surrogate before a pair"),
    pytest.param(b'{"text": "\\ud83d\\ude00"}\n', ["\U0001f600"], id="surrogate pair"),
    pytest.param(b'  {"text": " a "} \n', [" a "], id="spaces around"),
    pytest.param(b'{"text": "None"}\n', ["None"], id="the word None"),
])
def test_accepted_oddities_of_text(raw, texts, write_jsonl):
    """What a text file may contain without being refused, and that it arrives unchanged (A29)."""
    assert read(write_jsonl("data.jsonl", raw)) == texts


def test_line_of_ten_megabytes_is_accepted(write_jsonl):
    """No line is too long."""
    text = "长" * (10 << 20)  # 30 MB of UTF-8
    path = write_jsonl("data.jsonl", [{"text": text}, {"text": "after"}])
    assert read(path) == [text, "after"]


def test_line_numbers_count_blank_lines(write_jsonl):
    """A line number is that of an editor: blank and faulty lines count too."""
    path = write_jsonl("data.jsonl", b'\n{"text": "a"}\n\n[]\r\n{"text": "b"}')
    assert list(JsonlReader(path, parse_text, "skip")) == [(2, "a"), (5, "b")]


EXPECTED_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(("record", "expected"), [
    ({"conversations": [USER, ASSISTANT]}, EXPECTED_CHAT),
    ({"messages": [USER, ASSISTANT]}, EXPECTED_CHAT),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
     EXPECTED_CHAT),
    ({"messages": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}]},
     EXPECTED_CHAT),
    ({"id": 1, "conversations": [USER | {"weight": 0}, ASSISTANT | {"tools": []}], "tools": "[]"},
     EXPECTED_CHAT),
    ({"conversations": [{"role": "system", "content": "be kind"}, USER, ASSISTANT]},
     [{"role": "system", "content": "be kind"}, *EXPECTED_CHAT]),
    ({"conversations": [{"from": "system", "value": "be kind"}, USER, ASSISTANT]},
     [{"role": "system", "content": "be kind"}, *EXPECTED_CHAT]),
    ({"conversations": [USER, USER, ASSISTANT]}, [EXPECTED_CHAT[0], *EXPECTED_CHAT]),
    ({"conversations": [ASSISTANT, USER]}, EXPECTED_CHAT[::-1]),
    ({"conversations": [USER, {"role": "assistant", "content": "a\ud83d"}]},
     [EXPECTED_CHAT[0], {"role": "assistant", "content": "a\ufffd"}]),
], ids=["standard", "messages", "ShareGPT", "messages with from", "extra keys (A30)",
        "system first", "ShareGPT system", "two user turns", "assistant first", "lone surrogate"])
def test_accepted_spellings_of_conversations(record, expected, write_jsonl):
    """Every accepted spelling becomes the same messages; unknown keys are ignored (A30)."""
    path = write_jsonl("chat.jsonl", json.dumps(record).encode())
    assert read(path, parse_chat) == [expected]


@pytest.mark.parametrize("raw", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"],
                         ids=["empty", "blank lines", "BOM alone"])
@pytest.mark.parametrize("bad_lines", ["stop", "skip"])
def test_empty_file_is_an_error(raw, bad_lines, write_jsonl):
    """A file without data is refused under both policies (A29)."""
    assert "no data at all" in error_of(write_jsonl("data.jsonl", raw), bad_lines=bad_lines)


def test_file_of_faults_alone_is_an_error_even_when_skipping(write_jsonl):
    """Skipping everything would train on nothing: the faults are listed instead."""
    message = error_of(write_jsonl("data.jsonl", b"[]\n{}\n"), bad_lines="skip")
    assert "only faulty lines" in message and ":1: " in message and ":2: " in message


def test_unreadable_file_is_an_error(tmp_path):
    """A missing file and a folder are named, without a traceback of another kind."""
    for path in (tmp_path / "absent.jsonl", tmp_path):
        assert str(path) in error_of(path) and "cannot be read" in error_of(path)


@pytest.mark.parametrize("num_bad", [20, 21, 57])
def test_first_twenty_faults_in_full_then_a_count(num_bad, write_jsonl):
    """All faults of a file are counted in one pass, of which the first twenty are shown in full."""
    path = write_jsonl("data.jsonl", GOOD_TEXT + b'{"txt": 1}\n' * num_bad + GOOD_TEXT)
    message = error_of(path)
    assert f"{num_bad} faulty line(s), 2 good" in message
    shown = [line for line in message.splitlines() if f"{path}:" in line and "no \"text\"" in line]
    assert [f"{path}:{number}: " in line for number, line in enumerate(shown, 2)] == [True] * 20
    assert ("more" in message) == (num_bad > 20)
    assert num_bad == 20 or f"... and {num_bad - 20} more" in message


def test_stop_yields_nothing_after_the_first_fault(write_jsonl):
    """With "stop" no example after a fault is used, though the rest of the file is checked."""
    path = write_jsonl("data.jsonl", GOOD_TEXT + b"[]\n" + GOOD_TEXT + b"{}\n")
    reader, used = JsonlReader(path, parse_text), []
    with pytest.raises(DataError):
        used.extend(number for number, _ in reader)
    assert used == [1] and (reader.num_bad, reader.num_examples) == (2, 2)


def test_message_shows_at_most_eighty_characters_of_a_line_in_one_line(write_jsonl):
    """The preview is 80 characters of the line, with what would upset a terminal escaped (P6)."""
    raw = '[ "中文'.encode() + b"\x1b[31m\x07" + "字".encode() * 5000
    path = write_jsonl("data.jsonl", raw)
    fault = error_of(path).splitlines()[1]
    shown = fault.split("): ", 1)[1]
    assert shown.startswith('[ "中文\\x1b[31m\\x07字') and len(shown) == 80
    assert fault.isprintable()


def test_preview_leaves_the_line_end_out(write_jsonl):
    """What is shown of a line is its text; its newline is not printed as two characters."""
    for end in (b"\n", b"\r\n", b""):
        message = error_of(write_jsonl("data.jsonl", b'{"text": "cut' + end))
        assert message.splitlines()[1].endswith('{"text": "cut')


@pytest.mark.parametrize(("parse", "record"), [
    (parse_text, {"k" * 10_000: 1}),
    (parse_chat, {"k" * 10_000: 1}),
    (parse_chat, {"conversations": [{"role": "long question " * 1000, "content": "user"}]}),
], ids=["text key", "chat key", "role and content swapped"])
def test_message_stays_short_whatever_the_line_holds(parse, record, write_jsonl):
    """A fault takes a screen line or a few, not the whole of a long faulty line (P6)."""
    message = error_of(write_jsonl("data.jsonl", [record]), parse)
    assert len(message) < 1000


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Reading takes the memory of a line, not of the file (A33)."""
    peaks = []
    for count in (1_000, 10_000):  # 1 MB and 10 MB
        path = tmp_path / f"{count}.jsonl"
        with open(path, "wb") as file:
            for _ in range(count):
                file.write(b'{"text": "' + b"x" * 1000 + b'"}\n')
        tracemalloc.start()
        assert sum(1 for _ in JsonlReader(path, parse_text)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 1 << 20 and peaks[1] < peaks[0] + (64 << 10)


def test_reading_is_lazy(write_jsonl):
    """An example is there before the file has been read to its end."""
    path = write_jsonl("data.jsonl", GOOD_TEXT * 100_000)
    reader = JsonlReader(path, parse_text)
    next(iter(reader))
    assert reader.bytes_read == len(GOOD_TEXT)
