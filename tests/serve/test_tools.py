"""Reasoning and calls of tools in chat completions (B46), as OpenAI's client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import OpenAI

from tests.serve.live import STORY, Live
from tests.serve.told import telling

WEATHER: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "at": {"type": "object"},
    },
    "required": ["city"],
}
TOOLS: Final = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]


def call(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    """A call as the templates of Qwen3.5 write it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return envelope(f"<function={name}>\n{inner}</function>")


def envelope(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


THOUGHT: Final = f"<think>\nWhich city? 😀\n</think>\n\nLooking:\n{call(('city', 'Köln'), ('days', '5'))}"
TWO_CALLS: Final = call(("city", "Rome")) + "\n" + call(name="stop") + "\nDone."


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "told", "messages": STORY, "tools": TOOLS, **fields})


def official(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model that thinks, says something and calls a tool."""
    with telling(tmp_path_factory.mktemp("told"), THOUGHT) as server, official(server) as client:
        yield client


def test_an_answer_is_taken_apart(thinker: OpenAI) -> None:
    answer = ask(thinker)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Which city? 😀"
    assert choice.message.content == "Looking:"
    (called,) = choice.message.tool_calls
    assert (called.type, called.function.name) == ("function", "get_weather")
    assert json.loads(called.function.arguments) == {"city": "Köln", "days": 5}
    assert called.id.startswith("call_")
    n_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert 5 <= n_reasoning <= 8 < answer.usage.completion_tokens  # of 18 bytes; most tokens have three


def streamed(client: OpenAI, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The message that a stream's deltas make, without ids, and its usage."""
    message: dict[str, Any] = {}
    usage = None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            for name in ("content", "reasoning_content"):
                message[name] = message.get(name, "") + (delta.get(name) or "")
            for found in delta.get("tool_calls") or ():
                if "id" in found:
                    assert found["index"] == len(message.setdefault("calls", []))
                    message["calls"].append([found["function"]["name"], ""])
                message["calls"][found["index"]][1] += found["function"]["arguments"]
            message["finish_reason"] = choice.finish_reason or message.get("finish_reason")
    return message, usage


def whole(client: OpenAI, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The same of a body."""
    answer = ask(client, **fields)
    (choice,) = answer.choices
    found = {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", ""),
        "finish_reason": choice.finish_reason,
    }
    if choice.message.tool_calls:
        found["calls"] = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls]
    return found, answer.usage


ANSWERS: Final = {
    "thought": THOUGHT,
    "two calls": TWO_CALLS,
    "text behind": f"{call(name='stop')}\n\nSo it is.",
    "no call": 'Just <b>text</b>, {"name": "stop"} and <tool_ca',
    "only thought": "<think>On and on",
    "json": envelope('{"name": "get_weather", "arguments": {"city": "Oslo", "at": {"x": [1, 2]}}}'),
    "open parameter": envelope("<function=get_weather>\n<parameter=city\nBonn\n</parameter>\n</function>"),
    "broken name": envelope("<function=get_weather>\n<parameter=\ncity>Bonn</parameter>\n</function>"),
    "close in a value": call(("city", "a </parameter b")),
    "cut short": call(("city", "Bonn"))[:-14],
    "unknown": call(("city", "Bonn"), name="get_wether"),
    "wrong type": call(("days", "many")),
    "types": call(("city", "5"), ("days", "5"), ("metric", "True"), ("at", '{"x": null}')),
}
IS_TEXT: Final = {"no call", "open parameter", "broken name", "cut short", "unknown", "wrong type"}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_tells_what_the_body_tells(name: str, tmp_path: Path) -> None:
    with telling(tmp_path, ANSWERS[name]) as server, official(server) as client:
        found, usage = whole(client)
        assert streamed(client) == (found, usage)
        for n in (5, 20):
            assert streamed(client, max_tokens=n) == whole(client, max_tokens=n)
        assert whole(client, tools=openai.omit)[0].keys() == {"content", "reasoning_content", "finish_reason"}
    for _, arguments in found.get("calls", ()):
        assert isinstance(json.loads(arguments), dict)
    if name in IS_TEXT:
        assert (found["content"], found["finish_reason"]) == (ANSWERS[name], "stop")
    if name == "types":
        values = {"city": "5", "days": 5, "metric": True, "at": {"x": None}}
        assert json.loads(found["calls"][0][1]) == values
    if name == "close in a value":
        assert json.loads(found["calls"][0][1]) == {"city": "a </parameter b"}


def test_a_call_without_an_envelope_is_one_where_the_template_knows_none(tmp_path: Path) -> None:
    answer = '{"name": "stop", "arguments": {}}'
    with telling(tmp_path, answer, calls="bare") as server, official(server) as client:
        found, usage = whole(client)
        assert found["calls"] == [["stop", "{}"]]
        assert streamed(client) == (found, usage)


def test_of_several_answers_each_has_its_own_calls(thinker: OpenAI) -> None:
    answer = ask(thinker, n=3)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({c.id for c in calls}) == 3
    assert len({c.function.arguments for c in calls}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_with_the_first(stream: bool, tmp_path: Path) -> None:
    read = streamed if stream else whole
    with telling(tmp_path, TWO_CALLS) as server, official(server) as client:
        both, all_of_it = read(client, parallel_tool_calls=True)
        first, part_of_it = read(client, parallel_tool_calls=False)
        assert [name for name, _ in both["calls"]] == ["get_weather", "stop"]
        assert first["calls"] == both["calls"][:1]
        assert (first["content"], first["finish_reason"]) == ("", "tool_calls")
        assert part_of_it.completion_tokens < all_of_it.completion_tokens
        n_tokens = part_of_it.completion_tokens
        assert (
            n_tokens
            == (whole if stream else streamed)(client, parallel_tool_calls=False)[1].completion_tokens
        )


def test_tools_that_must_not_be_called_are_not_shown(thinker: OpenAI) -> None:
    with_none, usage = whole(thinker, tool_choice="none")
    without, same_usage = whole(thinker, tools=openai.omit)
    assert with_none == without
    assert usage == same_usage
    assert "calls" not in without
    assert without["content"].endswith("</tool_call>")
    assert usage.prompt_tokens < whole(thinker)[1].prompt_tokens


def test_results_of_calls_reach_the_model(thinker: OpenAI, tmp_path: Path) -> None:
    message = ask(thinker).choices[0].message
    follow = [*STORY, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain"}]
    assert ask(thinker, messages=follow).choices[0].message.content == "Looking:"
    with telling(tmp_path, THOUGHT) as server:
        plain = [m if isinstance(m, dict) else m.model_dump(exclude_unset=True) for m in follow]
        prompt = server.post("/apply-template", {"messages": plain, "tools": TOOLS}).json()["prompt"]
    shown = (
        '[assistant thought Which city? 😀 Looking: calls get_weather {"city": "Köln", "days": 5}][tool Rain]'
    )
    assert shown in prompt
    assert prompt.startswith(f"[tools {json.dumps(TOOLS)}]")


def test_the_prompt_may_open_the_reasoning_block(tmp_path: Path) -> None:
    with telling(tmp_path, "Hm.\n</think>\n\nYes.") as server, official(server) as client:
        for fields in (
            {"reasoning_effort": "high"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        ):
            found, usage = whole(client, **fields)
            assert (found["reasoning_content"], found["content"]) == ("Hm.", "Yes.")
            assert streamed(client, **fields) == (found, usage)
            assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
        closed, usage = whole(client, reasoning_effort="none")
        assert closed["content"] == "Hm.\n</think>\n\nYes."
        assert usage.completion_tokens_details.reasoning_tokens == 0


def test_logprobs_are_those_of_all_tokens(thinker: OpenAI) -> None:
    answer = ask(thinker, logprobs=True)
    tokens = answer.choices[0].logprobs.content
    chunks = list(ask(thinker, logprobs=True, stream=True))
    found = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    assert found == tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith(THOUGHT)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is 'a b'"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1] is named 'stop', as tools[0] is"),
        ({"tool_choice": "required", "tools": []}, "tool_choice demands a call, but there are no tools"),
        ({"tool_choice": "maybe"}, "tool_choice is 'maybe'"),
        ({"functions": [{"name": "f"}]}, "functions is [{'name': 'f'}]; this is not supported here"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(thinker: OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(thinker, extra_body=fields)
    assert says in caught.value.message


def test_tools_are_refused_where_the_template_has_no_place_for_them(server: Live) -> None:
    answer = server.post("/v1/chat/completions", {"messages": STORY, "tools": TOOLS, "max_tokens": 1})
    assert answer.status_code == 400
    assert "chat template has no place for them" in answer.json()["error"]["message"]
