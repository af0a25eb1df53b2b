"""From pieces of text to the parts of an answer. Layer 8.

The one place where an answer's text is read: every protocol writes what comes out of a `Reader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pyggml_dflash.api import AnswerEvent, AnswerParser, CallEnd, CallStart, ContentDelta, ReasoningDelta
from pyggml_dflash.requests import GenerationResult, TextPiece, TokenLogprob

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What became certain of an answer; `logprobs` are those of tokens read since the last part."""

    event: AnswerEvent
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended, and what its tokens were for."""

    result: GenerationResult
    reasoning_tokens: int  # up to the end of the reasoning block, its marks included
    has_calls: bool

    @property
    def reason(self) -> EndReason:
        """Why an answer that was not cancelled ended: 'tool_calls' if it is over and calls tools."""
        if self.result.finish_reason == "length":
            return "length"
        return "tool_calls" if self.has_calls else "stop"


class Reader:
    """Reads one answer as it comes."""

    is_over: bool  # nothing more is wanted of the answer

    def __init__(self, parser: AnswerParser | None = None, *, one_call: bool = False) -> None:
        """Without a parser all of it is content. `one_call`: the answer ends with its first call."""
        self._parser, self._one_call = parser, one_call
        self.is_over = self._has_calls = self._in_reasoning = False
        self._n_tokens = self._n_reasoning = 0

    def push(self, piece: TextPiece) -> Iterator[Part]:
        """The parts that a piece makes certain."""
        before, self._n_tokens = self._n_tokens, self._n_tokens + len(piece.tokens)
        if self._parser is None:
            events: Sequence[AnswerEvent] = [ContentDelta(piece.text)] if piece.text else []
        else:
            events = self._parser.push(piece.text)
        return self._parts(events, before, piece.logprobs)

    def finish(self) -> Iterator[Part]:
        """The parts that were held back."""
        events = [] if self._parser is None else self._parser.finish()
        return self._parts(events, self._n_tokens, ())

    def ending(self, result: GenerationResult) -> Ending:
        """The end of the answer; of one that ended with its first call, as if the model had ended it."""
        if self._in_reasoning:
            self._n_reasoning = self._n_tokens
        if self.is_over:
            n = self._n_tokens
            result = replace(
                result,
                tokens=result.tokens[:n],
                logprobs=result.logprobs[:n],
                usage=replace(result.usage, completion_tokens=n),
                finish_reason="stop",
            )
        return Ending(result=result, reasoning_tokens=self._n_reasoning, has_calls=self._has_calls)

    def _parts(
        self, events: Sequence[AnswerEvent], n_before: int, logprobs: tuple[TokenLogprob, ...]
    ) -> Iterator[Part]:
        """`n_before`: tokens of the pieces before the one that brought the events."""
        if logprobs and not events:
            events = [ContentDelta("")]
        for event in events:
            self._count(event, n_before)
            yield Part(event=event, logprobs=logprobs)
            logprobs = ()
            if self._one_call and isinstance(event, CallEnd):
                self.is_over = True
                return

    def _count(self, event: AnswerEvent, n_before: int) -> None:
        if isinstance(event, ReasoningDelta):
            self._in_reasoning, self._n_reasoning = True, self._n_tokens
        elif event != ContentDelta("") and self._in_reasoning:
            self._in_reasoning, self._n_reasoning = False, max(self._n_reasoning, n_before)
        self._has_calls = self._has_calls or isinstance(event, CallStart)
