"""Text to tokens and tokens to text, as a GGUF describes it. Layer 2.

Encoding runs in the `tokenizers` library; decoding is a table of bytes per token, so that a stream can be
cut at any token and still come out as whole characters. Knows no prompts and no roles: see `chat`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.model.answer import MARKS
from pyggml_dflash.model.bpe import SPACE_MARK, build
from pyggml_dflash.model.vocab import BYTE_TEXT, TokenType, Vocab, read_vocab


def _byte_spelling() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies: printable Latin-1 stands for itself, the other
    bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = _byte_spelling()
_NEVER_IN_UTF8: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# The regex engine below ends the call at 10 million backtracks, which a gap of that length takes.
MAX_TEXT_CHARS: Final = 1 << 23


class Tokenizer:
    """One model's tokens. Immutable to its users; every method may be called from any thread."""

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool  # `encode` puts `bos_id` first unless told otherwise
    add_eos: bool
    stop_ids: frozenset[int]  # an answer ends with any of these
    unused_ids: frozenset[int]  # padding of the vocabulary: never to be sampled

    def __init__(self, vocab: Vocab, *, nfc: bool = True) -> None:
        self.n_vocab = len(vocab.texts)
        self.bos_id, self.eos_id = vocab.bos_id, vocab.eos_id
        self.add_bos, self.add_eos = vocab.add_bos, vocab.add_eos
        self.stop_ids = vocab.stop_ids
        self.unused_ids = frozenset(vocab.of_type(TokenType.UNUSED))
        self._byte_level = vocab.kind == "bpe"
        self._space_prefix = vocab.add_space_prefix
        self._texts, self._types, self._ids = vocab.texts, vocab.types, vocab.ids
        hidden = vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        self._hidden = frozenset(i for i in hidden if vocab.texts[i] not in MARKS)
        self._bytes: list[bytes | None] = [None] * self.n_vocab  # filled when asked for
        self._unspellable = _unspellable(vocab)
        self._parsing, self._literal = build(vocab, nfc=nfc)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, nfc: bool = True) -> Tokenizer:
        """The tokenizer that a GGUF's metadata describes.

        `nfc` puts text into Unicode NFC first where the model was trained so; without it ids are those
        of llama.cpp, which does not. UnsupportedModelError, DamagedFileError: see `read_vocab`.
        """
        return cls(read_vocab(metadata), nfc=nfc)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special` adds BOS and EOS as the model wants them; a text that already begins with BOS gets
        no second one. `parse_special` takes the texts of control tokens as these tokens; without it they
        are ordinary text, which is how text from strangers is encoded. UsageError: lone surrogates, a
        character for which the vocabulary has no bytes, more than `MAX_TEXT_CHARS`.
        """
        self._check(text)
        encoder = self._parsing if parse_special else self._literal
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        SentencePiece models put a space before a text's first word, which is taken off again, unless the
        ids are the `continuation` of an earlier text.
        """
        data = b"".join([self._visible(token, skip_special) for token in ids])
        if self._space_prefix and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; of added tokens, their text; of unused ones, none."""
        self._check_id(token)
        data = self._bytes[token]
        if data is None:
            data = self._bytes[token] = self._spelled(token)
        return data

    def token_text(self, token: int) -> str:
        """What a token looks like on its own; bytes that are no character show as U+FFFD."""
        data = self.token_bytes(token)
        return self._texts[token] if token in self.unused_ids else data.decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """True for control tokens and the unknown token, which `decode` leaves out.

        The tags of reasoning and of calls are none, whatever the file says: an answer is read by them.
        """
        self._check_id(token)
        return token in self._hidden

    def find(self, text: str) -> int | None:
        """The id of the token that the vocabulary writes as `text`, if there is one."""
        return self._ids.get(text)

    def spell(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Ids whose bytes are exactly those of `text`, also where `encode` would put a space in front.

        UsageError: `text` cannot be written with the tokens of this model.
        """
        data = text.encode()
        for head in ("", "\n"):  # behind a line break there is a space in front of that, and none of the text
            ids = self.encode(head + text, add_special=False, parse_special=parse_special)
            n_bytes = sum(len(self.token_bytes(token)) for token in ids)
            while ids and n_bytes > len(data):
                n_bytes -= len(self.token_bytes(ids.pop(0)))
            if b"".join(map(self.token_bytes, ids)) == data:
                return ids
        if not self._singles.keys() >= set(data):
            raise UsageError(f"{text!r} cannot be written with the tokens of this model")
        return [self._singles[byte] for byte in data]

    @cached_property
    def _singles(self) -> dict[int, int]:
        """Byte -> a token that is this byte."""
        found = ((self.token_bytes(i), i) for i in range(self.n_vocab))
        return {data[0]: i for data, i in found if len(data) == 1}

    def answer_bytes(self, token: int) -> bytes:
        """What a token adds to the text of an answer: nothing if it is special."""
        return self._visible(token, True)

    def _visible(self, token: int, skip_special: bool) -> bytes:
        return b"" if skip_special and self.is_special(token) else self.token_bytes(token)

    def _spelled(self, token: int) -> bytes:
        text, kind = self._texts[token], self._types[token]
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE and (match := BYTE_TEXT.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind in (TokenType.NORMAL, TokenType.UNDEFINED):
            if not self._byte_level:
                return text.replace(SPACE_MARK, " ").encode()
            if all(c in _BYTE_OF for c in text):
                return bytes([_BYTE_OF[c] for c in text])
        return text.encode()

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is not in the vocabulary; ids go from 0 to {self.n_vocab - 1}")

    def _check(self, text: str) -> None:
        if not isinstance(text, str):
            raise UsageError(f"text is {type(text).__name__}; it must be a string")
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(f"text has {len(text)} characters; at most {MAX_TEXT_CHARS} are encoded at once")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text has the lone surrogate U+{ord(text[error.start]):04X} at index {error.start}, "
                f"which is no character"
            ) from None
        if self._unspellable and (match := self._unspellable.search(data)):
            index = len(data[: match.start()].decode())
            raise UsageError(f"text has {text[index]!r} at index {index}, for which this model has no tokens")


def _unspellable(vocab: Vocab) -> re.Pattern[bytes] | None:
    """Finds the bytes that occur in UTF-8 and that a byte-level vocabulary lacks: some were made
    from texts without them, and encoding would drop them in silence."""
    if vocab.kind != "bpe":
        return None
    lacking = sorted({byte for char, byte in _BYTE_OF.items() if char not in vocab.ids} - _NEVER_IN_UTF8)
    return re.compile(b"[" + b"".join(b"\\x%02x" % byte for byte in lacking) + b"]") if lacking else None


class TextDecoder:
    """Tokens in, text out, as they come; one per stream.

    Characters come out whole: bytes that may still become one are held back, at most three. All that was
    pushed and flushed, put together, is what `Tokenizer.decode` gives for all tokens at once.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continuation: bool = False
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._at_start = tokenizer._space_prefix and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became certain with `token`, often none."""
        data = self._tokenizer._visible(token, self._skip_special)
        if self._at_start and data:
            self._at_start, data = False, data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back, as U+FFFD: it will not become a character any more."""
        return self._utf8.decode(b"", final=True)
