"""Tokens to the text of one request: whole characters, stop strings, log probabilities.

Layer 6; knows a decoder's two methods, no model and no sampler. Text is given out as soon as it is
certain. It is certain when it can no longer be part of a stop string, so what may be the beginning
of one is held back.

Which stop string ends an answer depends on the text alone, not on how tokens divide it: the one
that starts earliest, and of those that start together the one that completes first. A stop string
that is complete therefore still waits while a longer one that starts before it may complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyggml_dflash.requests import TextPiece, TokenLogprob


class Decoder(Protocol):
    """Turns tokens into text step by step and holds back bytes that are not yet a whole character."""

    def push(self, token: int) -> str:
        """The text that became certain with `token`, possibly none."""

    def flush(self) -> str:
        """The text of what is held back, with replacement characters for bytes that stay incomplete."""


class OutputAssembler:
    """The answer of one request as it grows. Owns its decoder.

    Every token pushed is in exactly one piece, those of the stop string included: `tokens` are what
    was decoded, `text` is what is shown. The same holds for log probabilities.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        """`stop`: strings that end the answer before them, none of them empty."""
        self.stopped: str | None = None  # the stop string that ended the answer
        self._decoder = decoder
        self._stop = tuple(stop)
        self._shown: list[str] = []
        self._held = ""  # decoded, not yet certain
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        assert all(self._stop), "an empty stop string"

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._shown)

    def push(self, token: int, logprob: TokenLogprob | None = None) -> TextPiece | None:
        """The piece that became certain, or None: then `token` goes with the next piece or `finish`.

        Look at `stopped` afterwards: once it is set the answer is complete and takes no more tokens.
        """
        assert self.stopped is None, "a token after the stop string"
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._certain(self._decoder.push(token), is_last=False)
        return self._piece(text) if text or self.stopped is not None else None

    def finish(self) -> TextPiece | None:
        """The rest of an answer that ends here, or None if there is none. Call it once, at the end.

        It may set `stopped`: a stop string may have waited for a longer one, or be completed by the
        decoder's last text.
        """
        text = "" if self.stopped is not None else self._certain(self._decoder.flush(), is_last=True)
        return self._piece(text) if text or self._tokens else None

    def _certain(self, new: str, *, is_last: bool) -> str:
        """Take `new` text; returns what is certain now and sets `stopped` if the answer ends."""
        if not self._stop:
            return new
        self._held += new
        match = min(((at, len(s), s) for s in self._stop if (at := self._held.find(s)) >= 0), default=None)
        keep_from = len(self._held) if is_last else min(_open_start(self._held, s) for s in self._stop)
        if match is not None and match[0] <= keep_from:
            keep_from, _, self.stopped = match
        text = self._held[:keep_from]
        self._held = "" if self.stopped is not None else self._held[keep_from:]
        return text

    def _piece(self, text: str) -> TextPiece:
        piece = TextPiece(text=text, tokens=tuple(self._tokens), logprobs=tuple(self._logprobs))
        self._tokens.clear()
        self._logprobs.clear()
        if text:
            self._shown.append(text)
        return piece


def _open_start(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that may grow into `stop`; the length of `text` if none."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return len(text) - n
    return len(text)
