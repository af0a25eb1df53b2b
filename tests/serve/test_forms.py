"""Answers that are held to a form (B43), to a call of a tool, or to a budget of reasoning (B44)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from pyggml_dflash import Engine
from pyggml_dflash.engine import constraint
from pyggml_dflash.requests import Constraint
from tests.engine.hostile import edited
from tests.engine.tiny import opened
from tests.serve.live import CHAT, PATIENCE_S, STORY, Live, events, live
from tests.serve.told import telling

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA, "strict": True}}
# ChatML with a place for tools, whose calls are JSON in an envelope.
TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}
<tool_call>\n{"name": 1, "arguments": 2}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n
{%- if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"""
PARAMETERS: Final = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
FUNCTIONS: Final = [
    {"name": "get_weather", "parameters": PARAMETERS},
    {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
TOOLS: Final = [{"type": "function", "function": function} for function in FUNCTIONS]


class Fox(BaseModel):
    """What a typed client asks for."""

    kind: Literal["red", "grey"]
    age: int


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Live) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def caller(pico: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The shipped model with a template that has a place for tools."""
    path = tmp_path_factory.mktemp("tools") / "pico.gguf"
    edited(pico.info.model, path, keys={"tokenizer.chat_template": TEMPLATE})
    with opened(path, max_ctx=1024) as engine, live(engine) as server:
        yield server


def chat(server: Live, **fields: Any) -> dict[str, Any]:
    """The message of an answer with how it ended and its counts; the same as a stream's."""
    body = {"messages": STORY, "max_tokens": 60, **fields}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    (choice,) = whole["choices"]
    found = {"content": "", "reasoning_content": "", **choice["message"]}
    found["finish_reason"], found["usage"] = choice["finish_reason"], whole["usage"]
    streamed = {"content": "", "reasoning_content": ""}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    for event in events(server.post(CHAT, {**body, **stream}).text)[:-1]:
        chunk = json.loads(event)
        for part in chunk["choices"]:
            for name in streamed:
                streamed[name] += part["delta"].get(name) or ""
            assert part["finish_reason"] in (None, found["finish_reason"])
        usage = chunk["usage"]
    assert streamed == {name: found[name] or "" for name in streamed}
    details = ("completion_tokens", "completion_tokens_details")
    assert [usage[name] for name in details] == [found["usage"][name] for name in details]
    return found


def is_fox(text: str) -> bool:
    """True for JSON of the schema."""
    found = json.loads(text)
    return (
        set(found) == {"name", "age"}
        and bool(re.fullmatch("[A-Z][a-z]{1,8}", found["name"]))
        and 0 < found["age"] < 10
    )


# forms (B43)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_schema_holds_behind_the_reasoning(server: Live, thinking: bool | None) -> None:
    found = chat(server, response_format=FORMAT, chat_template_kwargs={"enable_thinking": thinking})
    assert is_fox(found["content"])
    assert found["finish_reason"] == "stop"
    assert bool(found["reasoning_content"]) is bool(thinking)
    free = chat(server, chat_template_kwargs={"enable_thinking": thinking})
    assert found["reasoning_content"] == free["reasoning_content"]


def test_forms_of_every_kind_hold(server: Live) -> None:
    assert isinstance(json.loads(chat(server, response_format={"type": "json_object"})["content"]), dict)
    assert is_fox(chat(server, json_schema=SCHEMA)["content"])
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", chat(server, regex="[0-9]{3}-[a-f]{2}")["content"])
    gbnf = 'root ::= ("yes" | "no") "!"'
    lark = 'start: ("yes" | "no") "!"'
    assert chat(server, grammar=gbnf)["content"] == chat(server, grammar=lark)["content"]
    assert chat(server, grammar=gbnf)["content"] in ("yes!", "no!")
    assert chat(server, response_format={"type": "text"}) == chat(server)
    text = server.post("/v1/completions", {"prompt": "Once", "regex": " [a-z]{3}", "n": 2}).json()["choices"]
    assert all(re.fullmatch(" [a-z]{3}", choice["text"]) for choice in text)


def test_drafts_change_nothing(pico: Engine) -> None:
    with opened(None, max_ctx=512, spec="dflash", spec_width=4) as engine, live(engine) as server:
        fields = {"response_format": FORMAT, "reasoning_effort": "high"}
        drafted, plain = chat(server, **fields), chat(server, **fields, spec="off")
        assert drafted == plain
        assert server.metric("dflash_drafted_tokens_total") > 0


def test_typed_answers_of_the_official_clients(client: OpenAI, claude: Anthropic) -> None:
    said = client.chat.completions.parse(model="pico", messages=STORY, response_format=Fox)  # type: ignore[arg-type]
    assert isinstance(said.choices[0].message.parsed, Fox)
    response = client.responses.parse(model="pico", input="A fox.", text_format=Fox)
    assert isinstance(response.output_parsed, Fox)
    assert response.text.format.type == "json_schema"
    message = claude.messages.parse(model="pico", messages=STORY, max_tokens=99, output_format=Fox)  # type: ignore[arg-type]
    assert isinstance(message.parsed_output, Fox)


def test_an_answer_that_is_cut_says_so(server: Live) -> None:
    assert chat(server, response_format=FORMAT, max_tokens=3)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "yaml"}}, "its type must be 'text' or 'json_object' or 'json_schema'"),
        ({"json_schema": {"type": "object", "if": {}}}, "json_schema"),
        ({"json_schema": {"type": "thing"}}, "json_schema"),
        ({"json_schema": {"$ref": "https://example.org/x"}}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"grammar": ""}, "grammar is ''"),
        (
            {"regex": "a", "response_format": FORMAT},
            "response_format and regex each say what the answer must be",
        ),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is True"),
    ],
)
def test_forms_that_no_answer_can_have_are_refused(server: Live, fields: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        answer = server.post(CHAT, {"messages": STORY, "max_tokens": 9, "stream": stream, **fields})
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


# calls that must come


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_where_it_is_demanded(caller: Live, thinking: bool, stream: bool) -> None:
    with OpenAI(base_url=f"{caller.url}/v1", api_key="unused", max_retries=0) as client:
        switch = {"chat_template_kwargs": {"enable_thinking": thinking}}

        def ask(**fields: Any) -> Any:
            body: Any = {"model": "pico", "messages": STORY, "tools": TOOLS, "extra_body": switch, **fields}
            if not stream:
                return client.chat.completions.create(**body).choices[0]
            with client.chat.completions.stream(**body) as found:
                return found.get_final_completion().choices[0]

        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            answer = ask(tool_choice=choice, parallel_tool_calls=False)
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert not answer.message.content
            assert bool(getattr(answer.message, "reasoning_content", "")) is thinking
            arguments = json.loads(call.function.arguments)
            if isinstance(choice, dict) or call.function.name == "get_weather":
                assert arguments["unit"] in ("C", "F")
                assert 1 <= arguments["days"] <= 9
        named = ask(tool_choice={"type": "function", "function": {"name": "stop"}})
        assert [c.function.name for c in named.message.tool_calls] == ["stop"]
        assert "tool_calls" not in ask(tool_choice="none").message.model_dump(exclude_none=True)


def test_a_call_comes_where_the_other_protocols_demand_it(caller: Live) -> None:
    tools: Any = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    with Anthropic(base_url=caller.url, api_key="unused", max_retries=0) as claude:
        for choice in ({"type": "any"}, {"type": "tool", "name": "stop"}):
            ask: Any = {"model": "pico", "messages": STORY, "max_tokens": 99, "tools": tools}
            answer = claude.messages.create(**ask, tool_choice=choice)
            assert {block.type for block in answer.content} == {"tool_use"}
            assert answer.stop_reason == "tool_use"
        assert [block.name for block in answer.content] == ["stop"]
    flat: Any = [{"type": "function", **f} for f in FUNCTIONS]
    with OpenAI(base_url=f"{caller.url}/v1", api_key="unused", max_retries=0) as client:
        called: Any = {"type": "function", "name": "stop"}
        response = client.responses.create(model="pico", input="Stop.", tools=flat, tool_choice=called)
        assert [(item.type, item.name) for item in response.output] == [("function_call", "stop")]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice demands a call, but there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "there is no tool 'go'; there are get_weather, stop",
        ),
        ({"tools": TOOLS, "response_format": FORMAT}, "response_format leaves no room for calls of tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "regex": "a"},
            "regex and tool_choice each say what the answer must be",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
                "tool_choice": "required",
            },
            "tool 'f'",
        ),
    ],
)
def test_calls_that_cannot_come_are_refused(caller: Live, fields: dict[str, Any], says: str) -> None:
    answer = caller.post(CHAT, {"messages": STORY, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


NAMED: Final = {"type": "json_schema", "name": "fox", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (CHAT, {"response_format": FORMAT}),
        (CHAT, {"json_schema": SCHEMA}),
        (CHAT, {"grammar": 'start: "yes"'}),
        (CHAT, {"regex": "[0-9]{3}"}),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}),
        ("/v1/completions", {"json_schema": SCHEMA}),
        ("/v1/responses", {"text": {"format": NAMED}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_every_form_is_compiled_where_nobody_else_waits(
    caller: Live, path: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    check = caller.engine.check_constraint

    def checked(constraint: Constraint) -> None:
        threads.append(threading.current_thread().name)
        check(constraint)

    monkeypatch.setattr(caller.engine, "check_constraint", checked)
    asked = {
        "/v1/completions": {"prompt": "Once", "max_tokens": 2},
        "/v1/responses": {"input": STORY, "max_output_tokens": 2},
    }.get(path, {"messages": STORY, "max_tokens": 2})
    answer = caller.post(path, {**asked, **form})
    assert answer.status_code == 200, answer.text
    assert threads
    assert all(name.startswith("dflash-forms") for name in threads)


def test_requests_without_a_form_do_not_wait_for_those_with_one(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(constraint, "survives", lambda *_: compiled.wait(PATIENCE_S))

    def ask(i: int) -> int:
        body = {"messages": STORY, "max_tokens": 4, "regex": f"[a-z]{{{i + 1}}}"}
        return server.post(CHAT, body).status_code

    with ThreadPoolExecutor(40) as clients:  # more than there are threads to read requests
        statuses = clients.map(ask, range(40))
        try:
            assert server.post(CHAT, {"messages": STORY, "max_tokens": 4}).status_code == 200
            assert server.post("/tokenize", {"content": "a fox"}).status_code == 200
        finally:
            compiled.set()
        assert set(statuses) <= {200, 429}


# budgets of reasoning (B44)


FOREVER: Final = "".join(f"{i}, " for i in range(200)) + "so"


@pytest.fixture(scope="module")
def ponderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model that never closes a reasoning block."""
    with telling(tmp_path_factory.mktemp("told"), FOREVER) as server:
        yield server


def test_a_budget_closes_the_reasoning_and_the_answer_goes_on(ponderer: Live) -> None:
    think = {"reasoning_effort": "high"}
    free = chat(ponderer, **think, reasoning_budget=-1)
    assert free == chat(ponderer, **think) == chat(ponderer, **think, reasoning_budget=10_000)
    assert (free["content"], free["finish_reason"]) == ("", "length")
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60
    cut = chat(ponderer, **think, reasoning_budget=5)
    assert free["reasoning_content"].startswith(cut["reasoning_content"])
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert cut["content"] != ""
    held = chat(ponderer, **think, reasoning_budget=5, regex="ab")
    assert (held["content"], held["reasoning_content"]) == ("ab", cut["reasoning_content"])


@pytest.mark.parametrize("budget", [5, 10_000])
def test_the_shipped_model_thinks_within_its_budget(server: Live, budget: int) -> None:
    found = chat(server, reasoning_effort="high", reasoning_budget=budget)
    n = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (n == 5) if budget == 5 else (5 < n < 100)
    assert found["content"]
    assert found["usage"]["completion_tokens"] > n


def test_a_budget_of_nothing_is_no_thinking(server: Live, client: OpenAI) -> None:
    assert chat(server, reasoning_budget=0) == chat(server, reasoning_effort="none")
    with pytest.raises(openai.BadRequestError, match="reasoning is True, but reasoning_budget is 0"):
        client.chat.completions.create(
            model="pico",
            messages=STORY,
            reasoning_effort="high",
            extra_body={"reasoning_budget": 0},  # type: ignore[arg-type]
        )


def test_forms_that_no_answer_can_have_are_refused_in_other_protocols(
    client: OpenAI, claude: Anthropic
) -> None:
    form: Any = {"type": "json_schema", "schema": {"type": "thing"}}
    ask: Any = {"model": "pico", "messages": STORY, "max_tokens": 9}
    with pytest.raises(anthropic.BadRequestError, match="json_schema"):
        claude.messages.create(**ask, output_config={"format": form})
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        client.responses.create(model="pico", input="A fox.", text={"format": {"name": "fox", **form}})


def test_the_other_protocols_have_budgets_too(server: Live, claude: Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 5}
    message = claude.messages.create(model="pico", messages=STORY, max_tokens=99, thinking=thinking)  # type: ignore[arg-type]
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == 5
    body = {"input": "A fox.", "reasoning": {"effort": "low"}, "reasoning_budget": 5}
    usage = server.post("/v1/responses", body).json()["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 5


def test_the_servers_budget_is_for_requests_that_do_not_say(pico: Engine) -> None:
    def n_reasoning(server: Live, **fields: Any) -> int:
        found = chat(server, **fields)["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert isinstance(found, int)
        return found

    with live(pico, reasoning_budget=5) as server:
        assert n_reasoning(server, reasoning_effort="high") == 5
        assert n_reasoning(server, reasoning_effort="high", reasoning_budget=7) == 7
        assert n_reasoning(server, reasoning_effort="high", reasoning_budget=-1) > 7
    with live(pico, reasoning_budget=0) as server:
        assert n_reasoning(server) == 0
        assert n_reasoning(server, reasoning_effort="high") > 7
