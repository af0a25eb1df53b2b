"""Chat completions as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from pyggml_dflash import Engine, SamplingOptions
from tests.serve.live import STORY, Live, comments, events

DRAWN = {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(client: OpenAI, messages: Any = STORY, **fields: Any) -> Any:
    return client.chat.completions.create(model="pico", messages=messages, **{"max_tokens": 24, **fields})


def test_an_answer_is_the_engines(client: OpenAI, pico: Engine) -> None:
    expected = pico.chat(STORY, max_tokens=24)
    answer = chat(client)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == expected.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.cached_tokens <= expected.usage.prompt_tokens
    assert answer.model == "pico"


def test_an_answer_goes_on_to_its_own_end(client: OpenAI, pico: Engine) -> None:
    answer = chat(client, max_tokens=None)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == pico.chat(STORY).text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**DRAWN, "seed": 7},
        {"stop": [" named", " fox"]},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3, **DRAWN, "seed": 5, "max_tokens": 8},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {"5": -100, "263": 3}},
        {"max_tokens": 1},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_a_stream_tells_what_the_body_tells(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = chat(client, **fields)
    chunks = list(chat(client, **fields, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        logprobs = [token for c in own if c.logprobs for token in c.logprobs.content]
        assert logprobs == (choice.logprobs.content if choice.logprobs else [])
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert chunks[-1].choices == []


def test_counts_come_only_when_asked_for(client: OpenAI) -> None:
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


def test_of_several_answers_each_has_the_next_seed(client: OpenAI, pico: Engine) -> None:
    answer = chat(client, n=3, seed=40, **DRAWN)
    for i, choice in enumerate(answer.choices):
        sampling = SamplingOptions(**DRAWN, seed=40 + i)
        assert choice.message.content == pico.chat(STORY, max_tokens=24, sampling=sampling).text
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_logprobs_are_the_engines(client: OpenAI, pico: Engine) -> None:
    expected = pico.chat(STORY, max_tokens=5, logprobs=3).logprobs
    content = chat(client, max_tokens=5, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [bytes(token.bytes) for token in content] == [pico.token_bytes(t.token) for t in expected]
    assert [token.logprob for token in content] == [t.logprob for t in expected]
    tops = [[(bytes(top.bytes), top.logprob) for top in token.top_logprobs] for token in content]
    assert tops == [[(pico.token_bytes(other), value) for other, value in t.top] for t in expected]


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    word = whole.split()[4]
    choice = chat(client, stop=word).choices[0]
    assert choice.message.content == whole[: whole.index(word)]
    assert choice.finish_reason == "stop"


def test_answers_at_once_are_those_of_requests_alone(server: Live, client: OpenAI) -> None:
    prompts = [
        [{"role": "user", "content": f"Tell me a story about a {who}."}] for who in ("cat", "dog", "owl")
    ]
    alone = [chat(client, messages).choices[0].message.content for messages in prompts]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as together:
            calls = [
                together.chat.completions.create(model="pico", messages=messages, max_tokens=24)
                for messages in prompts * 3
            ]
            return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]

    assert asyncio.run(all_of_them()) == alone * 3


# messages: what templates differ in is settled before they see it (B40)


@pytest.mark.parametrize(
    ("messages", "same_as"),
    [
        ([("developer", "Be kind."), ("user", "Hi")], [("system", "Be kind."), ("user", "Hi")]),
        (
            [("system", "Be kind."), ("developer", "Be brief."), ("user", "Hi")],
            [("system", "Be kind.\n\nBe brief."), ("user", "Hi")],
        ),
        ([("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], [("user", "a\nb")]),
    ],
)
def test_forms_of_a_message_that_mean_the_same_get_the_same_answer(
    client: OpenAI, messages: list[tuple[str, Any]], same_as: list[tuple[str, Any]]
) -> None:
    answers = [
        chat(client, [{"role": role, "content": content} for role, content in given], max_tokens=8)
        for given in (messages, same_as)
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message
    assert answers[0].usage == answers[1].usage


def test_a_late_system_message_stays_where_it_is(client: OpenAI, pico: Engine) -> None:
    roles = ("system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
    prompt = pico.render_chat(messages)
    assert prompt.index("assistant 2") < prompt.index("system 3") < prompt.index("user 4")
    assert chat(client, messages, max_tokens=8).usage.prompt_tokens == len(pico.tokenize(prompt))


# errors


def refused(client: OpenAI, **fields: Any) -> dict[str, Any]:
    """The error that OpenAI's client raises for a request."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body=fields)
    assert caught.value.type == "invalid_request_error"
    body = caught.value.body
    assert isinstance(body, dict)
    return body


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"temperature": 101},
            "temperature",
            "temperature is 101; it must be a number from 0 up to 100",
        ),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        ({"max_tokens": 0}, "max_tokens", "of at least 1"),
        ({"n": 0}, "n", "of at least 1"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
        ({"stop": [""]}, "stop[0]", "must not be empty"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role", "'bard'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "it must be text or a list"),
        ({"tool": 1}, "tool", "is not known here"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood", "not known"),
        ({"audio": {"voice": "alloy"}}, "audio", "is not supported here"),
        ({"seed": -1}, "seed", "of at least 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_name(
    client: OpenAI, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client, **fields)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_logprobs": 2}, "top_logprobs is 2, but logprobs is not true"),
        ({"max_completion_tokens": 3}, "max_tokens and max_completion_tokens differ"),
        ({"n": 17}, "17 answers are asked for; this server gives at most 16"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "contradict each other"),
        (
            {"logit_bias": {"4096": 1}},
            "logit_bias token 4096 is not in the vocabulary; ids go from 0 to 4095",
        ),
        ({"spec": "mtp"}, "this engine has no drafter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(
    client: OpenAI, fields: dict[str, Any], says: str
) -> None:
    assert says in refused(client, **fields)["message"]


def test_a_part_that_is_no_text_is_refused_with_its_place(client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    error = refused(client, messages=messages)
    assert error["param"].startswith("messages[0].content[1]")


def test_another_models_name_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=STORY)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    assert "there is 'pico'" in caught.value.message


def test_names_of_the_file_work_as_well(server: Live) -> None:
    for name in ("pico", "pico-q8_0", "pico-q8_0.gguf"):
        body = {"model": name, "messages": STORY, "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).json()["model"] == "pico"


# the context (B41)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "fox " * 1000}], max_tokens=7, stream=stream)
    body = caught.value.body
    assert isinstance(body, dict)
    assert caught.value.code == "context_length_exceeded"
    assert body["n_ctx"] == 512
    assert body["n_prompt"] > 1000
    assert body["max_tokens"] == 7
    assert all(str(body[name]) in body["message"] for name in ("n_ctx", "n_prompt", "max_tokens"))
    assert f"shorten the prompt by at least {body['n_prompt'] - 512} tokens" in body["message"]
    assert "--max-ctx" not in body["message"]  # a client did not start the server


def test_prompt_and_answer_must_fit_together(client: OpenAI, pico: Engine) -> None:
    n_prompt = pico.chat(STORY, max_tokens=1).usage.prompt_tokens
    most = 512 - n_prompt + 1  # the last token is not computed again
    with pytest.raises(openai.BadRequestError, match=f"ask for at most {most}, or shorten the prompt"):
        chat(client, max_tokens=most + 1)
    full = chat(client, max_tokens=most, extra_body={"ignore_eos": True})
    assert full.choices[0].finish_reason == "length"
    assert full.usage.completion_tokens == most
    open_end = chat(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert open_end.choices[0].finish_reason == "length"
    assert open_end.choices[0].message == full.choices[0].message


# the wire


def test_a_stream_ends_with_done_and_shows_how_the_prompt_is_read(server: Live) -> None:
    answer = server.post("/v1/chat/completions", {"messages": STORY, "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in found[:-1])
    n_prompt = json.loads(found[-2])["timings"]["prefilled_tokens"]
    assert comments(answer.text)[-2:] == [f"prefill 0/{n_prompt}", f"prefill {n_prompt}/{n_prompt}"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b"1" * 10_000],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_request_is_refused(server: Live, body: bytes) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\xff{}", "it is not UTF-8: byte 0 is 0xff"),
        (b'\xef\xbb\xbf{"a": "\xfe"}', "it is not UTF-8: byte 10 is 0xfe"),
        ('{"messages": "\u00e4"}'.encode("utf-16"), "it is not UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"temperature": NaN}', "NaN is no number of JSON"),
        (b'{"metadata": {"x": 1e999}}', "1e999 is larger than a number can be here"),
        (b'{"seed": 1, "seed": 2}', "'seed' stands twice in one object"),
        (b'{"seed": 1} x', "Extra data: line 1 column 13 (char 12)"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "a number has 5000 digits; at most 4300 are read"),
    ],
    ids=lambda given: repr(given[:20]),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
def test_a_body_that_is_no_json_is_told_why(server: Live, path: str, body: bytes, says: str) -> None:
    with server.client() as client:
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert f"the body is no JSON: {says}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["{" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, '{"x": NaN}'])
def test_a_call_whose_arguments_are_no_json_is_refused(server: Live, arguments: str) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    turns = [*STORY, {"role": "assistant", "tool_calls": [call]}]
    answer = server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1})
    assert answer.status_code == 400
    assert "tool_calls[0].function.arguments is" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800"])
def test_a_strange_name_is_quoted(server: Live, name: str) -> None:
    answer = server.post_ascii("/v1/chat/completions", {"messages": STORY, name: 1})
    assert answer.json()["error"]["message"].startswith(f"{name!a} is not known here")


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ('"messages": [{"role": "user", "content": "\\ud800"}]', 400),
        ('"messages": [{"role": "\\ud800", "content": "x"}]', 400),
        ('"\\ud800": 1', 400),
        ('"model": "\\ud800"', 400),
        ('"user": "\\ud800"', 200),
        ('"stop": "\\ud800"', 400),
    ],
)
def test_text_that_is_no_unicode_is_refused_where_the_model_would_read_it(
    server: Live, field: str, status: int
) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, {field}}}'
    with server.client() as client:
        headers = {"content-type": "application/json"}
        assert client.post("/v1/chat/completions", content=body, headers=headers).status_code == status


def test_a_body_must_say_that_it_is_json(server: Live) -> None:
    with server.client() as client:
        body = json.dumps({"messages": STORY})
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
