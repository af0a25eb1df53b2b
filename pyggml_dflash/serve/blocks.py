"""An answer as a list of blocks: Anthropic's content and OpenAI's output items. Layer 8.

Whole answers and streams come out of the same `Blocks`, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pyggml_dflash.api import CallArguments, CallEnd, CallStart, ReasoningDelta
from pyggml_dflash.requests import TokenLogprob
from pyggml_dflash.serve.parts import Ending, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of reasoning or of text, or one call of a tool."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call: JSON text of its arguments
    id: str = ""  # of a call
    name: str = ""  # of the tool that is called
    logprobs: tuple[TokenLogprob, ...] = ()  # of a text's tokens, if they are wanted
    is_cut: bool = False  # the answer reached its length before the block was complete


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block begins; its text is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of the text of the block that began last."""

    block: Block  # as it began
    text: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The block that began last has all of its text."""

    block: Block


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockEnd


class Blocks:
    """Makes blocks of the events of one answer; `done` has those that have ended, in order."""

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._open: Block | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, part: Part) -> Iterator[BlockEvent]:
        """What a part begins, adds and ends."""
        event = part.event
        if isinstance(event, CallStart):
            yield from self._begin(Block(index=0, kind="call", id=event.id, name=event.name))
        elif isinstance(event, CallEnd):
            yield from self._end()
        elif event.text:
            kind: Literal["reasoning", "text"] = "reasoning" if isinstance(event, ReasoningDelta) else "text"
            if not isinstance(event, CallArguments) and (self._open is None or self._open.kind != kind):
                yield from self._begin(Block(index=0, kind=kind))
            assert self._open is not None
            self._texts.append(event.text)
            self._logprobs += part.content_logprobs
            yield BlockDelta(self._open, event.text, part.content_logprobs)

    def finish(self, ending: Ending) -> Iterator[BlockEvent]:
        """End the block that is open, with the answer."""
        yield from self._end(is_cut=ending.reason == "length")

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = replace(block, index=len(self.done))
        yield BlockStart(self._open)

    def _end(self, *, is_cut: bool = False) -> Iterator[BlockEvent]:
        if self._open is not None:
            text, logprobs = "".join(self._texts), tuple(self._logprobs)
            block = replace(self._open, text=text, logprobs=logprobs, is_cut=is_cut)
            self.done.append(block)
            self._open, self._texts, self._logprobs = None, [], []
            yield BlockEnd(block)


def blocks_of(parts: Iterable[Part], ending: Ending) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for part in parts:
        for _ in blocks.push(part):
            pass
    for _ in blocks.finish(ending):
        pass
    return blocks.done
