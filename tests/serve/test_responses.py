"""OpenAI's responses as its own client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import OpenAI

from pyggml_dflash import Engine
from tests.serve.live import STORY, Live, events
from tests.serve.told import cut, telling

TELL: Final = str(STORY[0]["content"])
WEATHER: Final = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Final = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Look.",
        "parameters": WEATHER,
        "strict": False,
    },
    {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": True},
]
CALL: Final = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>"
)
LOGPROBS: Final = {"include": ["message.output_text.logprobs"]}
ANSWER: Final = f"<think>\nWhich city? 😀\n</think>\n\nLooking:\n{CALL}"


def official(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "pico", "input": TELL, "max_output_tokens": 24, **fields})


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    with official(server) as client:
        yield client


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model that thinks, says something and calls a tool."""
    with telling(tmp_path_factory.mktemp("told"), ANSWER) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(told: Live) -> Iterator[OpenAI]:
    with official(told) as client:
        yield client


def test_an_answer_is_the_engines(client: OpenAI, pico: Engine) -> None:
    expected = pico.chat(STORY, max_tokens=24)
    answer = ask(client)
    assert answer.output_text == expected.text
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.total_tokens == expected.usage.prompt_tokens + 24
    whole = ask(client, max_output_tokens=400)
    assert (whole.status, whole.incomplete_details, whole.error) == ("completed", None, None)
    assert whole.output[0].status == "completed"


def test_forms_of_an_input_that_mean_the_same_get_the_same_answer(client: OpenAI, pico: Engine) -> None:
    expected = pico.chat([{"role": "system", "content": "Be kind."}, *STORY], max_tokens=8).text
    part = {"type": "input_text", "text": TELL}
    for fields in (
        {"instructions": "Be kind.", "input": TELL},
        {"instructions": "Be kind.", "input": STORY},
        {"input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": [part]}]},
        {
            "input": [
                {"type": "message", "role": "system", "content": "Be kind."},
                {"role": "user", "content": [part]},
            ]
        },
    ):
        assert ask(client, **fields, max_output_tokens=8).output_text == expected


@pytest.mark.parametrize("n", [1, 7, 18, 400])
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_stream_tells_what_the_body_tells(thinker: OpenAI, n: int, with_tools: bool) -> None:
    fields: dict[str, Any] = {"tools": TOOLS} if with_tools else {**LOGPROBS, "top_logprobs": 1}
    whole = ask(thinker, model="told", max_output_tokens=n, **fields)
    found = list(ask(thinker, model="told", max_output_tokens=n, stream=True, **fields))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1].type == f"response.{whole.status}"
    assert without_ids(found[-1].response) == without_ids(whole)
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == found[-1].response.output
    for name, item_type in (("output_text", "message"), ("reasoning_text", "reasoning")):
        text = "".join(event.delta for event in found if event.type == f"response.{name}.delta")
        assert text == "".join(item.content[0].text for item in done if item.type == item_type)
    arguments = [e.delta for e in found if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(item.arguments for item in done if item.type == "function_call")


def without_ids(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.model_dump(exclude={"id", "created_at"})
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found


def test_log_probabilities_are_the_engines(client: OpenAI, pico: Engine) -> None:
    expected = pico.chat(STORY, max_tokens=8, logprobs=3)
    answer = ask(client, max_output_tokens=8, **LOGPROBS, top_logprobs=3)
    (text,) = answer.output[0].content
    assert [token.logprob for token in text.logprobs] == [token.logprob for token in expected.logprobs]
    assert "".join(token.token for token in text.logprobs) == text.text == expected.text
    tops = [[(bytes(top.bytes), top.logprob) for top in token.top_logprobs] for token in text.logprobs]
    assert tops == [[(pico.token_bytes(t), p) for t, p in token.top] for token in expected.logprobs]
    assert answer.top_logprobs == 3
    (bare,) = ask(client, max_output_tokens=8, **LOGPROBS).output[0].content
    assert [token.logprob for token in bare.logprobs] == [token.logprob for token in text.logprobs]
    assert not any(token.top_logprobs for token in bare.logprobs)
    assert ask(client, max_output_tokens=8).output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("thought", "told_text", "call"),
    [
        ("", "Looking 😀 here, \n there:  ", ""),
        ("<think>\nWhich city? 🌧\n</think>\n\n", "Looking:", f"\n{CALL}"),
        ("<think>\nWhich city?\n</think> ", "😀 here, \n there:  ", CALL),
        ("<think>\nWhich city\n</think> ", "😀", ""),
        ("<think>\nWhich town\n</think>", "😀", f" {CALL}"),
        ("<think>\nWhich place\n</think> ", "😀😁", f"  {CALL}"),
    ],
)
def test_a_text_has_the_tokens_that_it_stands_in(
    tmp_path: Path, thought: str, told_text: str, call: str
) -> None:
    text = told_text.rstrip() if call else told_text
    answer = thought + told_text + call
    pieces = cut(answer.encode())
    ends = list(accumulate(map(len, pieces)))
    start = len(thought.encode())
    end = start + len(text.encode())
    expected = [p for p, at in zip(pieces, ends, strict=True) if at > start and at - len(p) < end]
    fields: dict[str, Any] = {"model": "told", "max_output_tokens": None, "tools": TOOLS, **LOGPROBS}
    with telling(tmp_path, answer) as server, official(server) as client:
        whole, streamed = ask(client, **fields), list(ask(client, **fields, stream=True))
    (said,) = (item.content[0] for item in whole.output if item.type == "message")
    assert said.text == text
    assert [bytes(token.bytes) for token in said.logprobs] == expected
    deltas = [event for event in streamed if event.type == "response.output_text.delta"]
    (done,) = (event for event in streamed if event.type == "response.output_text.done")
    tokens = [token.token for token in said.logprobs]
    assert [token.token for event in deltas for token in event.logprobs] == tokens
    assert [token.token for token in done.logprobs] == tokens


def test_the_clients_own_gathering_of_a_stream_works(thinker: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "told", "input": TELL, "tools": TOOLS, **LOGPROBS}
    with thinker.responses.stream(**fields) as stream:
        response: Any = stream.get_final_response()
    assert response.output_text == "Looking:"
    assert "Looking:" in "".join(token.token for token in response.output[1].content[0].logprobs)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


def test_an_answer_is_taken_apart(thinker: OpenAI) -> None:
    answer = ask(thinker, model="told", max_output_tokens=None, tools=TOOLS)
    thought, said, called = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Which city? 😀")
    assert (said.type, said.content[0].text) == ("message", "Looking:")
    assert (called.type, called.name) == ("function_call", "get_weather")
    assert json.loads(called.arguments) == {"city": "Köln", "days": 5}
    assert answer.status == "completed"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_results_of_calls_reach_the_model(thinker: OpenAI, told: Live) -> None:
    answer = ask(thinker, model="told", max_output_tokens=None, tools=TOOLS)
    called = answer.output[2]
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "Rain"}
    items = [{"role": "user", "content": TELL}, *answer.output, result, {"role": "user", "content": "So?"}]
    follow = ask(thinker, model="told", max_output_tokens=1, tools=TOOLS, input=items)
    call = {
        "id": called.call_id,
        "type": "function",
        "function": {"name": called.name, "arguments": called.arguments},
    }
    chat = [
        *STORY,
        {
            "role": "assistant",
            "content": "Looking:",
            "reasoning_content": "Which city? 😀",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": called.call_id, "content": "Rain"},
        {"role": "user", "content": "So?"},
    ]
    shown = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}
        for tool in TOOLS
    ]
    prompt = told.post("/apply-template", {"messages": chat, "tools": shown}).json()["prompt"]
    n_tokens = len(told.post("/tokenize", {"content": prompt}).json()["tokens"])
    assert follow.usage.input_tokens == n_tokens


def test_without_parallel_calls_the_answer_ends_with_the_first(tmp_path: Path) -> None:
    second = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    fields: dict[str, Any] = {"model": "told", "tools": TOOLS, "max_output_tokens": None}
    with telling(tmp_path, CALL + second) as server, official(server) as client:
        both, first = ask(client, **fields), ask(client, **fields, parallel_tool_calls=False)
    assert [item.name for item in both.output] == ["get_weather", "stop"]
    assert [item.name for item in first.output] == ["get_weather"]
    assert (first.status, first.parallel_tool_calls) == ("completed", False)


def test_reasoning_is_switched(tmp_path: Path) -> None:
    with telling(tmp_path, "Hm.\n</think>\n\nYes.") as server, official(server) as client:
        for effort, types in (("high", ["reasoning", "message"]), ("none", ["message"])):
            answer = ask(
                client, model="told", reasoning={"effort": effort}, include=["reasoning.encrypted_content"]
            )
            assert [item.type for item in answer.output] == types
            assert answer.reasoning.effort == effort


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input is []"),
        (
            {"input": [{"type": "web_search_call"}]},
            "input[0] is {'type': 'web_search_call'}; its type must be",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood is not known here"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is 'resp_1'; this is not supported here",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice demands a call"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"background": True}, "background is True"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs is 2, but include has no 'message.output_text.logprobs'"),
        ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs is 21"),
        ({"truncation": "auto"}, "truncation is 'auto'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(
    client: OpenAI, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert says in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"two\nlines": "x\x85y", "": "z"}},
        {
            "tools": [{"type": "function", "name": "f", "parameters": {"\ud800": "\ud800"}}],
            "tool_choice": "none",
        },
    ],
)
def test_what_a_request_named_comes_back_as_it_was(server: Live, fields: dict[str, Any]) -> None:
    body = {"input": TELL, "max_output_tokens": 1, **fields}
    whole = server.post_ascii("/v1/responses", body).json()
    last = events(server.post_ascii("/v1/responses", {**body, "stream": True}).text)[-1]
    streamed = json.loads(last)["response"]
    for name, value in fields.items():
        found = whole[name][0] if name == "tools" else whole[name]
        sent = {**value[0], "description": None, "strict": None} if name == "tools" else value
        assert found == sent
        assert streamed[name] == whole[name]


def test_a_name_that_is_no_unicode_is_refused(server: Live) -> None:
    answer = server.post_ascii("/v1/responses", {"input": TELL, "metadata": {"\ud800": "x"}})
    assert answer.status_code == 400
    assert "lone surrogate" in answer.json()["error"]["message"]


def test_alternatives_of_log_probabilities_need_these(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, top_logprobs=2, include=["reasoning.encrypted_content"])
    assert caught.value.param == "top_logprobs"


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, input="fox " * 1000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_stream_needs_no_last_word(server: Live) -> None:
    answer = server.post("/v1/responses", {"input": TELL, "max_output_tokens": 2, "stream": True})
    assert json.loads(events(answer.text)[-1])["type"] == "response.incomplete"
