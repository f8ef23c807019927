"""The tokenizer: text to token ids and back, and conversations to ids with a loss mask.

Ids 0, 1, 2 are control tokens. They enter a sequence only here, by number: the same characters
inside anyone's text ("<|im_end|>" typed by a user, say) are encoded as the plain characters they
are. Training the vocabulary is `scripts/train_tokenizer.py`.
"""

import codecs
import hashlib
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from dataset.jsonl import DataError

SHIPPED = Path(__file__).resolve().parents[1] / "model" / "tokenizer.json"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
STOP_IDS = (PAD_ID, EOS_ID)  # generation ends at either


def byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for.

    The convention of GPT-2's vocabulary files: printable Latin-1 characters stand for themselves,
    the other 68 bytes for U+0100, U+0101, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """Byte-level BPE read from a `tokenizer.json`. Raises DataError if it is none, or if its
    control ids differ.
    """

    def __init__(self, path: Path = SHIPPED):
        try:
            content = Path(path).read_bytes()
            self._fast = FastTokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise DataError(f"{path}: not a tokenizer.json that can be read: {error}") from None
        found = tuple(self._fast.id_to_token(index) for index in range(3))
        if found != CONTROL_TOKENS:
            raise DataError(f"{path}: ids 0, 1, 2 are {found}, expected {CONTROL_TOKENS}")
        self._fast.encode_special_tokens = True  # control tokens in text stay text
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = self._fast.get_vocab_size()
        self.hash = hashlib.sha256(content).hexdigest()[:16]
        alphabet, added = byte_alphabet(), self._fast.get_added_tokens_decoder()
        self._token_bytes = [
            added[index].content.encode() if index in added
            else bytes(alphabet[character] for character in self._fast.id_to_token(index))
            for index in range(self.vocab_size)
        ]

    def encode(self, text: str) -> list[int]:
        """The ids of a text; never a control id. `decode` gives the text back unchanged."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of any ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._token_bytes[index] for index in ids).decode("utf-8", "replace")

    def streaming_decoder(self) -> "StreamingDecoder":
        """A decoder for ids that arrive one by one."""
        return StreamingDecoder(self._token_bytes)

    def render_chats(self, conversations: list[list[dict[str, str]]]
                     ) -> list[tuple[list[int], list[int]]]:
        """Each conversation's ids and loss mask, equally long, made in one pass on all cores.

        Each message {"role", "content"} becomes `<|im_start|>{role}\n{content}<|im_end|>\n`.
        The mask is 1 on the tokens of the assistant's contents and on the `<|im_end|>` after each,
        0 elsewhere.
        """
        pieces = [
            piece
            for messages in conversations
            for message in messages
            for piece in (message["role"] + "\n", message["content"])
        ]
        encoded = iter(self.encode_batch(pieces))
        newline = self.encode("\n")
        rendered = []
        for messages in conversations:
            ids: list[int] = []
            loss_mask: list[int] = []
            for message in messages:
                header, content = next(encoded), next(encoded)
                supervised = int(message["role"] == "assistant")
                ids += [BOS_ID, *header, *content, EOS_ID, *newline]
                loss_mask += [0] * (1 + len(header))
                loss_mask += [supervised] * (len(content) + 1)
                loss_mask += [0] * len(newline)
            rendered.append((ids, loss_mask))
        return rendered

    def render_chat(self, messages: list[dict[str, str]], reply_follows: bool = False
                    ) -> tuple[list[int], list[int]]:
        """`render_chats` for one conversation. With reply_follows the ids go on to where the
        assistant's next answer begins.
        """
        [(ids, loss_mask)] = self.render_chats([messages])
        header = [BOS_ID, *self.encode("assistant\n")] if reply_follows else []
        return ids + header, loss_mask + [0] * len(header)


class StreamingDecoder:
    """Decodes ids as they arrive, holding back only an incomplete UTF-8 character.

    A Chinese character or an emoji may be spread over several tokens; printing each token by
    itself would show U+FFFD marks.
    """

    def __init__(self, token_bytes: list[bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often the whole token, perhaps ''."""
        return self._decoder.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """What was held back, at the end of the sequence (U+FFFD if it is incomplete)."""
        return self._decoder.decode(b"", final=True)
