"""The vocabulary of a GGUF: its `tokenizer.ggml.` keys, read and checked as a whole. Layer 2.

Two kinds are known. `bpe` (the file says 'gpt2') spells bytes as printable characters and carries its
merges; `spm` (the file says 'llama') is SentencePiece's BPE, which carries scores instead, marks spaces
with U+2581 and spells what it lacks as <0xXX> bytes. Knows nothing of encoding and decoding.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.model.pretokenize import PreTokenizer, pre_tokenizer

log = logging.getLogger(__name__)

PREFIX: Final = "tokenizer.ggml."
BYTE_TEXT: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# An answer ends with these wherever a vocabulary has them as added tokens; a file often names one only.
STOP_TEXTS: Final = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)


class TokenType(enum.IntEnum):
    """What a GGUF says of a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """What a file says about its tokens. Every id in it is below `len(texts)`, texts differ."""

    kind: Literal["bpe", "spm"]
    texts: Sequence[str]
    types: bytes  # a TokenType per token
    ids: dict[str, int]  # text -> id
    scores: Sequence[float]  # spm: per token, the higher the earlier its merge
    merges: Sequence[str]  # bpe: 'left right', best first
    pre: PreTokenizer  # bpe
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool  # spm: a space goes before text that follows nothing or an added token
    stop_ids: frozenset[int]

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of the tokens of these types, ascending."""
        return [i for i, t in enumerate(self.types) if t in types]


class _Keys:
    """Typed access to the keys, by their name after the prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _damaged(self, key: str, value: object, wanted: str) -> DamagedFileError:
        return DamagedFileError(f"{PREFIX}{key} is {str(value)[:60]!r}; {wanted} is needed")

    def _missing(self, key: str, wanted: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"the metadata key '{PREFIX}{key}' ({wanted}) is missing")

    def text(self, key: str) -> str | None:
        value = self._metadata.get(PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise self._damaged(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self._damaged(key, value, "a bool")
        return bool(value)

    def token(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return default if default is not None and default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_vocab:
            raise self._damaged(key, value, f"a token id from 0 to {n_vocab - 1}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            raise self._missing(key, "an array of strings")
        items = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
        if items is None or not set(map(type, items)) <= {str}:
            raise self._damaged(key, type(value).__name__, "an array of strings")
        return items

    def numbers(self, key: str, n: int, *, kinds: str = "iu") -> list[Any]:
        """`n` numbers whose NumPy kind is one of `kinds`; NaN is not one."""
        wanted = f"an array of {n} {'numbers' if 'f' in kinds else 'integers'}"
        value = self._metadata.get(PREFIX + key)
        if value is None:
            raise self._missing(key, wanted)
        items = np.asarray(value)
        if items.shape != (n,) or items.dtype.kind not in kinds or (items != items).any():
            raise self._damaged(key, f"{items.dtype} {list(items.shape)}", wanted)
        return list(items.tolist())

    def __contains__(self, key: str) -> bool:
        return PREFIX + key in self._metadata


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary that a GGUF's metadata describes.

    UnsupportedModelError: another kind of tokenizer, a pre-tokenizer that is not known, a key that is
    needed and absent. DamagedFileError: keys that contradict each other. Both name the key.
    """
    keys = _Keys(metadata)
    kind = _kind(keys)
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(keys.strings("tokens"))]
    ids = _ids(texts)
    types = _types(keys, kind, texts)
    pre = _pre(keys) if kind == "bpe" else PreTokenizer(expressions=(), add_bos=True)
    spm = kind == "spm"
    bos_id = keys.token("bos_token_id", len(texts), 1 if spm else None)
    eos_id = keys.token("eos_token_id", len(texts), 2 if spm else None)
    return Vocab(
        kind=kind,
        texts=texts,
        types=types,
        ids=ids,
        scores=keys.numbers("scores", len(texts), kinds="iuf") if spm else (),
        merges=() if spm else keys.strings("merges"),
        pre=pre,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=keys.token("unknown_token_id", len(texts), 0 if types[0] == TokenType.UNKNOWN else None),
        add_bos=_adds(keys, "bos", bos_id, pre.add_bos),
        add_eos=_adds(keys, "eos", eos_id, False),
        add_space_prefix=keys.flag("add_space_prefix", spm) and spm,
        stop_ids=_stop_ids(keys, ids, types, eos_id),
    )


def _kind(keys: _Keys) -> Literal["bpe", "spm"]:
    model = keys.text("model")
    if model == "gpt2":
        return "bpe"
    if model == "llama":
        return "spm"
    raise UnsupportedModelError(
        f"{PREFIX}model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
    )


def _pre(keys: _Keys) -> PreTokenizer:
    name = keys.text("pre")
    if not name:
        log.warning("%spre is missing; 'default' is used, which may not be how the model was trained", PREFIX)
    return pre_tokenizer(name or "default")


def _ids(texts: Sequence[str]) -> dict[str, int]:
    if not texts:
        raise DamagedFileError(f"{PREFIX}tokens is empty")
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) < len(texts):
        i = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise DamagedFileError(f"{PREFIX}tokens has {texts[i][:60]!r} twice, as {i} and as {ids[texts[i]]}")
    return ids


def _types(keys: _Keys, kind: str, texts: Sequence[str]) -> bytes:
    if kind == "bpe" and "token_type" not in keys:
        return bytes([TokenType.NORMAL]) * len(texts)
    types = keys.numbers("token_type", len(texts))
    if unknown := set(types) - set(TokenType):
        i = next(i for i, number in enumerate(types) if number in unknown)
        raise DamagedFileError(f"{PREFIX}token_type[{i}] is {types[i]}; it must be from 0 to 6")
    for i in [i for i, number in enumerate(types) if number == TokenType.BYTE]:
        if not BYTE_TEXT.fullmatch(texts[i]):
            raise DamagedFileError(f"{PREFIX}token_type[{i}] is 6, but {texts[i][:60]!r} is no byte <0xXX>")
    return bytes(types)


def _adds(keys: _Keys, which: str, token: int | None, default: bool) -> bool:
    """Whether `token` goes around every text; a file that asks for a token it does not name is damaged."""
    if token is None and keys.flag(f"add_{which}_token", False):
        raise DamagedFileError(f"{PREFIX}add_{which}_token is true, but {PREFIX}{which}_token_id is missing")
    return token is not None and keys.flag(f"add_{which}_token", default)


def _stop_ids(keys: _Keys, ids: Mapping[str, int], types: bytes, eos_id: int | None) -> frozenset[int]:
    named = [
        keys.token(f"{key}_token_id", len(types)) for key in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ]
    added = (TokenType.CONTROL, TokenType.USER_DEFINED)
    by_text = {text: ids[text] for text in STOP_TEXTS if text in ids and types[ids[text]] in added}
    if "<|return|>" in by_text and "<|call|>" in by_text:
        by_text.pop("<|end|>", None)  # ends a message there, not the answer
    return frozenset(i for i in (eos_id, *named, *by_text.values()) if i is not None)
