"""From pieces of text to the parts of an answer. Layer 8.

The one place where an answer's text is read: every protocol writes what comes out of a `Reader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyggml_dflash.requests import TextPiece, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta:
    """More of the answer's text; whole characters, never part of a stop string."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Part = ContentDelta


class Reader:
    """Reads one answer as it comes; all of it is content."""

    def push(self, piece: TextPiece) -> Iterator[Part]:
        """The parts that a piece makes certain."""
        if piece.text or piece.logprobs:
            yield ContentDelta(text=piece.text, logprobs=piece.logprobs)

    def finish(self) -> Iterator[Part]:
        """The parts that were held back."""
        return iter(())
