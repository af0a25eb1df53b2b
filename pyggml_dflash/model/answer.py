"""What an answer consists of: reasoning, content and tool calls, as a whole or as events. Layer 2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pyggml_dflash.requests import ReasoningBlock

# What opens and closes a reasoning block; a template that knows such blocks names one of these pairs.
REASONING_TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
CALL_TAGS: Final = ("<tool_call>", "</tool_call>")
# Part of an answer's text, though some vocabularies say that they are control tokens.
MARKS: Final = frozenset(tag for tags in (*REASONING_TAGS, CALL_TAGS) for tag in tags)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str
    start: int = field(default=0, compare=False)  # where it begins in the text of the answer, in characters


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the model says."""

    text: str
    start: int = field(default=0, compare=False)  # where it begins in the text of the answer, in characters


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called: the `index`-th call of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that was started last; all together they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call has all of its arguments."""

    index: int


AnswerEvent: TypeAlias = ReasoningDelta | ContentDelta | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of an answer; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer taken apart."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def gather(cls, events: Iterable[AnswerEvent]) -> ParsedAnswer:
        """What the events of one answer are together."""
        texts: dict[type, list[str]] = {ReasoningDelta: [], ContentDelta: []}
        starts: list[CallStart] = []
        arguments: list[str] = []
        for event in events:
            if isinstance(event, CallStart):
                starts.append(event)
                arguments.append("")
            elif isinstance(event, CallArguments):
                arguments[-1] += event.text
            elif not isinstance(event, CallEnd):
                texts[type(event)].append(event.text)
        return cls(
            reasoning="".join(texts[ReasoningDelta]),
            content="".join(texts[ContentDelta]),
            calls=tuple(
                ToolCall(id=start.id, name=start.name, arguments=text)
                for start, text in zip(starts, arguments, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a model writes its answers, as its template tells."""

    reasoning: tuple[str, str] | None = None  # what opens and closes a reasoning block; None: it has none
    bare_calls: bool = False  # a call is JSON without an envelope, and all of the answer
    xml_calls: bool = False  # inside of its envelope a call is XML, not JSON
    arguments_key: str = "arguments"  # what a call that is JSON names its arguments

    def is_open(self, prompt: str) -> bool:
        """True if the answer to `prompt` begins inside a reasoning block."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def block(self, prompt: str, budget: int = -1) -> ReasoningBlock | None:
        """The reasoning block that the answer to `prompt` may have; None if the prompt has closed it."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning[1]):
            return None
        opens, closes = self.reasoning
        return ReasoningBlock(opens=opens, closes=closes, is_open=self.is_open(prompt), budget=budget)
