"""Anthropic's messages as its own client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anthropic
import pytest
from anthropic import Anthropic

from pyggml_dflash import Engine
from tests.serve.live import STORY, Live, comments, live
from tests.serve.told import telling

TOOLS: Final = [
    {
        "name": "get_weather",
        "description": "Look.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
    {"name": "stop", "input_schema": {"type": "object"}},
]
CALL: Final = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>"
)
ANSWER: Final = f"<think>\nWhich city? 😀\n</think>\n\nLooking:\n{CALL}"


def official(server: Live, key: str = "unused") -> Anthropic:
    return Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(client: Anthropic, model: str = "pico", **fields: Any) -> Any:
    return client.messages.create(**{"model": model, "messages": STORY, "max_tokens": 24, **fields})


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Anthropic]:
    with official(server) as client:
        yield client


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model that thinks, says something and calls a tool."""
    with telling(tmp_path_factory.mktemp("told"), ANSWER) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(told: Live) -> Iterator[Anthropic]:
    with official(told) as client:
        yield client


def test_an_answer_is_the_engines(client: Anthropic, pico: Engine) -> None:
    expected = pico.chat(STORY, max_tokens=24)
    answer = ask(client)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == expected.text
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "pico")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == 24
    assert ask(client, max_tokens=400).stop_reason == "end_turn"


def test_the_model_is_listed(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("pico", "model", "pico")
    assert client.models.retrieve("pico").created_at == model.created_at


def test_a_system_text_is_a_system_message(client: Anthropic, pico: Engine) -> None:
    messages = [{"role": "system", "content": "Be kind.\nBe brief."}, *STORY]
    expected = pico.chat(messages, max_tokens=8).text
    for system in ("Be kind.\nBe brief.", [{"type": "text", "text": t} for t in ("Be kind.", "Be brief.")]):
        assert ask(client, system=system, max_tokens=8).content[0].text == expected


def test_sampling_is_the_requests(client: Anthropic, pico: Engine) -> None:
    drawn = {ask(client, extra_body={"temperature": 1.0, "top_k": 50}).content[0].text for _ in range(4)}
    assert len(drawn) > 1
    assert (
        len({ask(client, extra_body={"temperature": 1.0, "top_k": 1}).content[0].text for _ in range(2)}) == 1
    )


def test_a_stop_sequence_ends_the_answer_before_it(client: Anthropic) -> None:
    whole = ask(client).content[0].text
    word = whole.split()[4]
    answer = ask(client, stop_sequences=[word, "never"])
    assert answer.content[0].text == whole[: whole.index(word)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)


def test_an_answer_goes_on_where_the_last_message_stops(client: Anthropic, pico: Engine) -> None:
    begun = "Once upon a time, there was a little fox named"
    prompt = pico.render_chat(STORY, reasoning=False) + begun
    expected = pico.generate(pico.tokenize(prompt, add_special=False), max_tokens=8)
    answer = ask(client, messages=[*STORY, {"role": "assistant", "content": begun}], max_tokens=8)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert answer.content[0].text == expected.text


# streams


@pytest.mark.parametrize("n", [1, 7, 18, 400])
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_stream_tells_what_the_body_tells(thinker: Anthropic, n: int, with_tools: bool) -> None:
    fields: dict[str, Any] = {"tools": TOOLS} if with_tools else {}
    whole = ask(thinker, "told", max_tokens=n, **fields)
    with thinker.messages.stream(model="told", messages=STORY, max_tokens=n, **fields) as stream:  # type: ignore[arg-type]
        gathered = stream.get_final_message()
    assert without_ids(gathered) == without_ids(whole)


def without_ids(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.model_dump(exclude={"id", "parsed_output"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
    return found


def test_blocks_of_a_stream_follow_each_other(told: Live) -> None:
    body = {"messages": STORY, "max_tokens": 400, "tools": TOOLS, "stream": True}
    answer = told.post("/v1/messages", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert any("prefill 0/" in comment for comment in comments(answer.text))
    blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    found = []
    for block in blocks:
        name, _, rest = block.partition("\n")
        event = json.loads(rest.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append((event["type"].removeprefix("content_block_"), event.get("index")))
    order = [item for i, item in enumerate(found) if item not in found[:i]]
    inner = [(kind, i) for i in range(3) for kind in ("start", "delta", "stop")]
    assert order == [("message_start", None), *inner, ("message_delta", None), ("message_stop", None)]
    assert [item for item in found if item[0] != "delta"] == [item for item in order if item[0] != "delta"]


# thinking and tools


def test_an_answer_is_taken_apart(thinker: Anthropic) -> None:
    answer = ask(thinker, "told", tools=TOOLS, max_tokens=400)
    thinking, text, called = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Which city? 😀")
    assert (text.type, text.text) == ("text", "Looking:")
    assert (called.type, called.name, called.input) == (
        "tool_use",
        "get_weather",
        {"city": "Köln", "days": 5},
    )
    assert answer.stop_reason == "tool_use"
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens


def test_results_of_calls_reach_the_model(thinker: Anthropic, told: Live) -> None:
    answer = ask(thinker, "told", tools=TOOLS, max_tokens=400)
    result = {
        "type": "tool_result",
        "tool_use_id": answer.content[2].id,
        "content": "Rain",
        "is_error": False,
    }
    messages = [
        *STORY,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        {"role": "user", "content": "Well?"},
    ]
    assert ask(thinker, "told", tools=TOOLS, messages=messages, max_tokens=400).stop_reason == "tool_use"
    chat = [
        *STORY,
        {
            "role": "assistant",
            "content": "Looking:",
            "reasoning_content": "Which city? 😀",
            "tool_calls": [
                {
                    "id": answer.content[2].id,
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 5}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": answer.content[2].id, "content": "Rain"},
        {"role": "user", "content": "So?\nWell?"},
    ]
    tools = [{"type": "function", "function": {**tool, "parameters": tool["input_schema"]}} for tool in TOOLS]
    for tool in tools:
        del tool["function"]["input_schema"]
    prompt = told.post("/apply-template", {"messages": chat, "tools": tools}).json()["prompt"]
    n_tokens = len(told.post("/tokenize", {"content": prompt}).json()["tokens"])
    assert (
        thinker.messages.count_tokens(model="told", messages=messages, tools=TOOLS).input_tokens == n_tokens
    )


def test_without_parallel_calls_the_answer_ends_with_the_first(tmp_path: Path) -> None:
    second = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    with telling(tmp_path, CALL + second) as server, official(server) as client:
        both = ask(client, "told", tools=TOOLS, max_tokens=400)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        first = ask(client, "told", tools=TOOLS, max_tokens=400, tool_choice=choice)
    assert [block.name for block in both.content] == ["get_weather", "stop"]
    assert [block.name for block in first.content] == ["get_weather"]
    assert first.stop_reason == "tool_use"


def test_thinking_is_switched(tmp_path: Path) -> None:
    with telling(tmp_path, "Hm.\n</think>\n\nYes.") as server, official(server) as client:
        on = ask(client, "told", thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in on.content] == ["thinking", "text"]
        off = ask(client, "told", thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]


# counts and errors


def test_tokens_are_counted_as_they_are_read(client: Anthropic) -> None:
    usage = ask(client, system="Be kind.", max_tokens=1).usage
    n = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(model="pico", messages=STORY, system="Be kind.").input_tokens == n  # type: ignore[arg-type]


def refused(client: Anthropic, model: str = "pico", **fields: Any) -> str:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, model, extra_body=fields)
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return str(body["error"]["message"])


def blocks(*found: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(found)}, *STORY]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role is 'system'"),
        (
            blocks({"type": "image", "source": {}}),
            "messages[0].content[0] is {'type': 'image', 'source': {}}; its",
        ),
        (blocks({"type": "text", "text": 5}), "messages[0].content[0].text is 5"),
        (blocks({"type": "text", "text": "x", "Mood": 1}), "messages[0].content[0].Mood is not known here"),
        (blocks({"type": "thinking", "thinking": "x"}), "messages[0].content[0] is a thinking block"),
        (
            blocks({"type": "tool_result", "tool_use_id": "x"}, role="assistant"),
            "messages[0].content[0] is a tool_result block, which no message of the assistant has",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type is 'web_search_20250305'",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice demands a call"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice has type 'tool' and name None"),
        ({"mcp_servers": [{}]}, "is not supported here"),
        ({"temperature": -1}, "temperature is -1"),
        ({"thinking": {"type": "often"}}, "thinking.type is 'often'"),
        (
            {"messages": [*STORY, {"role": "assistant", "content": "A"}], "thinking": {"type": "enabled"}},
            "thinking is enabled, but the last message begins the answer",
        ),
        (
            {
                "messages": [
                    *STORY,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "A", "signature": ""}],
                    },
                ]
            },
            "messages[1] is the beginning of the answer",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(
    client: Anthropic, fields: dict[str, Any], says: str
) -> None:
    assert says in refused(client, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(
    client: Anthropic, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "fox " * 1000}], stream=stream)
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["error"]["n_ctx"], body["error"]["max_tokens"]) == (512, 24)
    assert body["error"]["n_prompt"] > 1000


def test_errors_have_the_types_that_the_client_knows(pico: Engine) -> None:
    with live(pico, api_key="k3y") as server:
        with official(server, "k3y") as client, pytest.raises(anthropic.NotFoundError):
            ask(client, "another")
        with official(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client)
    assert caught.value.request_id is not None
    long = [{"role": "user", "content": "x" * 2000}]
    with (
        live(pico, max_body_bytes=1024) as server,
        official(server) as client,
        pytest.raises(anthropic.RequestTooLargeError),
    ):
        ask(client, messages=long)
