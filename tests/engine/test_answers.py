"""Answers of an engine taken apart: the parser knows the model's template and the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggml_dflash import Engine, UsageError
from pyggml_dflash.api import ContentDelta, ParsedAnswer, ReasoningDelta

ASKED = [{"role": "user", "content": "Tell me a story."}]
TOOL = {"name": "stop", "parameters": {}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(max_ctx=256, device="CPU", threads=1) as engine:
        yield engine


@pytest.mark.parametrize("reasoning", [True, False, None])
def test_text_begins_in_the_block_that_the_prompt_opened(engine: Engine, reasoning: bool | None) -> None:
    parser = engine.answer_parser(engine.render_chat(ASKED, reasoning=reasoning))
    assert parser.push("Once") == [ReasoningDelta("Once") if reasoning else ContentDelta("Once")]


def test_a_stream_of_pieces_is_taken_apart_as_its_text_is(engine: Engine) -> None:
    prompt = engine.render_chat(ASKED, reasoning=True)
    parser, events = engine.answer_parser(prompt, tools=[TOOL]), []
    with engine.stream(prompt, max_tokens=48) as stream:
        for piece in stream:
            events += parser.push(piece.text)
    events += parser.finish()
    whole = engine.answer_parser(prompt, tools=[TOOL]).parse(stream.result.text)
    assert ParsedAnswer.gather(events) == whole
    reasoning, _, content = stream.result.text.partition("</think>")
    assert (whole.reasoning, whole.content) == (reasoning.strip(), content.lstrip())
    assert content.strip()  # it has thought, and begun to speak


def test_a_tool_that_cannot_be_used_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"tools\[0\]\.function\.name is None"):
        engine.answer_parser("", tools=[{"type": "function", "function": {}}])
