"""From pieces of text to the parts of an answer. Layer 8.

The one place where an answer's text is read: every protocol writes what comes out of a `Reader`.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pyggml_dflash.api import AnswerEvent, AnswerParser, CallEnd, CallStart, ContentDelta
from pyggml_dflash.requests import GenerationResult, TextPiece, TokenLogprob

_UTF8: Final = codecs.getincrementaldecoder("utf-8")
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What became certain of an answer; `logprobs` are those of tokens read since the last part.

    `content_logprobs` are those of tokens that have some of the event's content, and none of earlier content.
    """

    event: AnswerEvent
    logprobs: tuple[TokenLogprob, ...] = ()
    content_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended."""

    result: GenerationResult
    has_calls: bool

    @property
    def reason(self) -> EndReason:
        """Why an answer that was not cancelled ended: 'tool_calls' if it is over and calls tools."""
        if self.result.finish_reason == "length":
            return "length"
        return "tool_calls" if self.has_calls else "stop"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A token's log-probability, and between which characters of the answer it stands, or others with it."""

    start: int
    end: int
    logprob: TokenLogprob


class Reader:
    """Reads one answer as it comes."""

    is_over: bool  # nothing more is wanted of the answer

    def __init__(
        self, parser: AnswerParser | None, *, token_bytes: Callable[[int], bytes], one_call: bool = False
    ) -> None:
        """Without a parser all of it is content. `one_call`: the answer ends with its first call."""
        self._parser, self._token_bytes, self._one_call = parser, token_bytes, one_call
        self.is_over = self._has_calls = False
        self._n_tokens = self._n_chars = 0
        self._placed: deque[_Placed] = deque()  # of tokens that are not part of content yet

    def push(self, piece: TextPiece) -> Iterator[Part]:
        """The parts that a piece makes certain."""
        start, end = self._n_chars, self._n_chars + len(piece.text)
        self._n_tokens, self._n_chars = self._n_tokens + len(piece.tokens), end
        for logprob in piece.logprobs:
            reach = end + _is_cut(self._token_bytes(logprob.token))
            self._placed.append(_Placed(start, reach, logprob))
        if self._parser is None:
            events: Sequence[AnswerEvent] = [ContentDelta(piece.text, start)] if piece.text else []
        else:
            events = self._parser.push(piece.text)
        return self._parts(events, piece.logprobs)

    def finish(self) -> Iterator[Part]:
        """The parts that were held back."""
        events = [] if self._parser is None else self._parser.finish()
        return self._parts(events, ())

    def ending(self, result: GenerationResult) -> Ending:
        """The end of the answer; of one that ended with its first call, as if the model had ended it."""
        if self.is_over:
            n, usage = self._n_tokens, result.usage
            result = replace(
                result,
                tokens=result.tokens[:n],
                logprobs=result.logprobs[:n],
                usage=replace(usage, completion_tokens=n, reasoning_tokens=min(n, usage.reasoning_tokens)),
                finish_reason="stop",
            )
        return Ending(result=result, has_calls=self._has_calls)

    def _parts(self, events: Sequence[AnswerEvent], logprobs: tuple[TokenLogprob, ...]) -> Iterator[Part]:
        if logprobs and not events:
            events = [ContentDelta("")]
        for event in events:
            self._has_calls = self._has_calls or isinstance(event, CallStart)
            yield Part(event=event, logprobs=logprobs, content_logprobs=tuple(self._content(event)))
            logprobs = ()
            if self._one_call and isinstance(event, CallEnd):
                self.is_over = True
                return

    def _content(self, event: AnswerEvent) -> Iterator[TokenLogprob]:
        """Those of the tokens of content; what stands before it was reasoning, a mark, space or a call."""
        if not isinstance(event, ContentDelta):
            return
        while self._placed and self._placed[0].start < event.start + len(event.text):
            placed = self._placed.popleft()
            if placed.end > event.start:
                yield placed.logprob


def _is_cut(text: bytes) -> bool:
    """True if a token with this text ends inside of a character."""
    decoder = _UTF8("replace")
    decoder.decode(text)
    return decoder.getstate()[0] != b""
