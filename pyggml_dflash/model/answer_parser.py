"""The text of an answer, as it comes, to reasoning, content and tool calls. Layer 2.

    <think>reasoning</think>content<tool_call>call</tool_call>more content

What comes out depends on the text alone, not on how it is cut into pieces. Reasoning and content are given
out as soon as they are certain. A call is certain when its envelope has closed, so it comes out whole, and
its arguments are a JSON object. What is no call of a tool that was offered is text: an envelope that is cut
short or breaks its form, a name that is not known, a value that is not of its parameter's type, and a call
in a reasoning block that goes on behind it. Space around calls and blocks is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from pyggml_dflash.model.answer import (
    AnswerEvent,
    AnswerForm,
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    ParsedAnswer,
    ReasoningDelta,
)
from pyggml_dflash.model.call_parser import CALL_OPEN, CallParser, FoundCall
from pyggml_dflash.model.growing_text import GrowingText, Steps
from pyggml_dflash.model.tools import Tool


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class AnswerParser:
    """Takes one answer apart. Used once: `push` every piece of its text, then `finish`."""

    def __init__(
        self,
        form: AnswerForm,
        tools: Sequence[Tool] = (),
        *,
        is_open: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`is_open`: the prompt has opened the reasoning block. Without `tools` nothing is a call."""
        self._form, self._is_open, self._new_id = form, is_open, new_id
        self._source = GrowingText()
        self._has_tools = bool(tools)
        self._calls = CallParser(self._source, {tool.name: tool for tool in tools})
        self._n_calls = 0
        self._events: list[AnswerEvent] = []
        self._steps = self._answer()

    def push(self, text: str) -> list[AnswerEvent]:
        """What became certain with `text`."""
        assert not self._source.ended, "text behind the end of an answer"
        self._source.text += text
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """The rest of an answer that ends here; call it once, at the end."""
        self._source.ended = True
        return self._advance()

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer at once, in place of `push` and `finish`."""
        return ParsedAnswer.gather([*self.push(text), *self.finish()])

    def _advance(self) -> list[AnswerEvent]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _answer(self) -> Steps[None]:
        if self._form.reasoning is not None:
            yield from self._reasoning(*self._form.reasoning)
        if self._form.bare_calls and self._has_tools:
            yield from self._bare_call()
        marks = (CALL_OPEN,) if self._has_tools else ()
        while True:
            mark, at = yield from self._prose(ContentDelta, marks)
            if mark is None:
                return
            call = yield from self._calls.envelope(at)
            if call is None:
                self._give(ContentDelta, at + len(mark))
            else:
                self._give_call(call)
                yield from self._drop(call.end)

    def _reasoning(self, opens: str, closes: str) -> Steps[None]:
        """The block before the content, if there is one."""
        at = yield from self._source.space(0)
        is_written = (yield from self._source.looking_at(at, opens)) is not None
        if not is_written and not self._is_open:
            return
        yield from self._drop(at + len(opens) if is_written else at)
        marks = (closes, CALL_OPEN) if self._has_tools else (closes,)
        while True:
            mark, at = yield from self._prose(ReasoningDelta, marks)
            if mark is None:
                return
            if mark == closes:
                yield from self._drop(at + len(closes))
                return
            yield from self._calls_without_close(at)

    def _calls_without_close(self, at: int) -> Steps[None]:
        """Calls that end the answer before its reasoning block was closed; anything else is reasoning."""
        calls: list[FoundCall] = []
        source, text_end = self._source, at + len(CALL_OPEN)
        while (yield from source.looking_at(at, CALL_OPEN)) is not None:
            call = yield from self._calls.envelope(at)
            if call is None:
                break
            calls.append(call)
            text_end = call.end
            at = yield from source.space(call.end)
        if not calls or at < len(source.text):
            self._give(ReasoningDelta, text_end)
            return
        for call in calls:
            self._give_call(call)
        source.take(at)

    def _bare_call(self) -> Steps[None]:
        source = self._source
        at = yield from source.space(0)
        if (yield from source.looking_at(at, "{")) is None:
            return
        call = yield from self._calls.json(at)
        end = None if call is None else (yield from source.space(call.end))
        if call is not None and end == len(source.text):
            self._give_call(call)
            source.take(end)

    def _prose(
        self, delta: type[ReasoningDelta] | type[ContentDelta], marks: Sequence[str]
    ) -> Steps[tuple[str | None, int]]:
        """Give text out until a mark: that, and where it stands; None at the end of the answer.

        Space before a mark is not given out, since it may belong to the mark.
        """
        source = self._source
        while True:
            found = min(((at, mark) for mark in marks if (at := source.text.find(mark)) >= 0), default=None)
            if found is not None:
                at, mark = found
                n_text = len(source.text[:at].rstrip())
                self._give(delta, n_text)
                return mark, at - n_text
            if source.ended:
                self._give(delta, len(source.text))
                return None, 0
            self._give(delta, len(source.text[: source.certain_before(*marks)].rstrip()))
            yield

    def _drop(self, at: int) -> Steps[None]:
        """Drop the text before `at`, and space behind it."""
        self._source.take((yield from self._source.space(at)))

    def _give(self, delta: type[ReasoningDelta] | type[ContentDelta], n: int) -> None:
        if n:
            start = self._source.n_taken
            self._events.append(delta(self._source.take(n), start))

    def _give_call(self, call: FoundCall) -> None:
        index, self._n_calls = self._n_calls, self._n_calls + 1
        self._events += [
            CallStart(index, self._new_id(), call.name),
            CallArguments(index, call.arguments),
            CallEnd(index),
        ]
