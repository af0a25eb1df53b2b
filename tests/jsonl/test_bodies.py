"""What lines ask for: which names are used, which change nothing, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.jsonl.bodies import understand
from pyggml_dflash.jsonl.problems import Refused
from pyggml_dflash.openai.asks import Ask, Defaults
from pyggml_dflash.openai.forms import Calls
from pyggml_dflash.options import MAX_SEED, SamplingOptions
from pyggml_dflash.requests import Constraint

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def enveloped(body: Any, url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def one(value: Any, defaults: Defaults | None = None) -> BatchRequest:
    (request,) = understand(value, defaults or Defaults()).requests
    return request


@pytest.mark.parametrize(
    "value",
    [
        "Hi",
        {"prompt": "Hi"},
        {"messages": [USER]},
        enveloped({"messages": [USER]}),
        {"prompt": "Hi", "n": None},
    ],
)
def test_every_form_of_a_line_is_the_same_turn(value: Any) -> None:
    assert understand(value, Defaults()) == Ask(
        kind="chat", model=None, requests=(BatchRequest(messages=[USER]),)
    )


@pytest.mark.parametrize("value", ["Hi", {"prompt": "Hi"}, enveloped({"prompt": "Hi"}, "/v1/completions")])
def test_a_raw_prompt_is_continued(value: Any) -> None:
    assert understand(value, Defaults(raw=True)) == Ask(
        kind="completion", model=None, requests=(BatchRequest(prompt="Hi"),)
    )


def test_a_system_message_stands_in_front_unless_the_line_has_one() -> None:
    brief = Defaults(system="Be brief.")
    for value in ("Hi", {"prompt": "Hi"}, {"messages": [USER]}, enveloped({"messages": [USER]})):
        assert one(value, brief).messages == [SYSTEM, USER]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be long."}, USER]
        assert one({"messages": own}, brief).messages == own


EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
    "logit_bias": {"5": -1, "198": 2.5},
    "seed": 3,
}
SAMPLED = SamplingOptions(**{**EVERYTHING, "logit_bias": {5: -1, 198: 2.5}})


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_what_a_line_says_wins_over_the_flags(url: str) -> None:
    flags = Defaults(sampling=SamplingOptions(seed=9, top_k=2), stop=("x",), max_tokens=5)
    asked = {"messages": [USER]} if "chat" in url else {"prompt": "Hi"}
    silent = one(enveloped(asked, url), flags)
    assert (silent.sampling, silent.stop, silent.max_tokens) == (flags.sampling, ("x",), 5)
    told = one(enveloped({**asked, **EVERYTHING, "stop": ["a", "b"], "max_tokens": 7}, url), flags)
    assert (told.sampling, told.stop, told.max_tokens) == (SAMPLED, ("a", "b"), 7)
    assert one(enveloped({**asked, "stop": "a", "spec": "off"}, url)).stop == ("a",)


def test_fields_of_a_conversation_reach_the_request() -> None:
    body = {
        "messages": [USER],
        "tools": [TOOL],
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    request = one(enveloped(body))
    assert (request.tools, request.max_tokens, request.logprobs) == ([TOOL], 4, 2)
    assert one({"messages": [USER], "logprobs": True}).logprobs == 0
    assert one({"messages": [USER], "logprobs": False}).logprobs is None
    for body, reasoning in [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "high"}, True),
        ({}, None),
    ]:
        assert one({"messages": [USER], **body}).reasoning is reasoning
    assert one({"prompt": "Hi"}, Defaults(reasoning=True)).reasoning is True


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, Calls(tools=[TOOL])),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, Calls(tools=[TOOL])),
        ({"parallel_tool_calls": False}, Calls(tools=[TOOL], one=True)),
        ({"tool_choice": "required"}, Calls(tools=[TOOL], demanded=True)),
        ({"tool_choice": NAMED}, Calls(tools=[TOOL], demanded=True, one=True, name="f")),
        ({"tool_choice": "none"}, Calls()),
        ({"tools": []}, Calls()),
    ],
)
def test_tools_are_shown_where_they_may_be_called(fields: dict[str, Any], calls: Calls) -> None:
    ask = understand({"messages": [USER], "tools": [TOOL], **fields}, Defaults())
    assert (ask.calls, ask.requests[0].tools) == (calls, calls.tools)


SCHEMA = {"type": "object"}
AS_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
REGEX = Constraint(kind="regex", text="[ab]")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": AS_FORMAT}, Constraint.json_schema(SCHEMA)),
        ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
        ({"regex": "[ab]"}, REGEX),
        ({"regex": "[ab]", "response_format": {"type": "text"}}, REGEX),
        ({"grammar": "start: /a/"}, Constraint(kind="grammar", text="start: /a/")),
    ],
)
def test_a_line_says_what_its_answer_must_be(fields: dict[str, Any], form: Constraint | None) -> None:
    assert one({"messages": [USER], **fields}).constraint == form
    if "response_format" not in fields:
        assert one(enveloped({"prompt": "a", **fields}, "/v1/completions")).constraint == form


def test_a_form_given_by_flags_holds_where_a_line_says_nothing() -> None:
    flags = Defaults(constraint=REGEX)
    asked = {"messages": [USER]}
    assert one(asked, flags).constraint == REGEX
    assert one(enveloped({"prompt": "a"}, "/v1/completions"), flags).constraint == REGEX
    assert one({**asked, "response_format": {"type": "text"}}, flags).constraint is None
    assert one({**asked, "json_schema": SCHEMA}, flags).constraint == Constraint.json_schema(SCHEMA)
    assert one({**asked, "tools": [TOOL], "tool_choice": "required"}, flags).constraint is None
    assert one({**asked, "tools": [TOOL], "tool_choice": "none"}, flags).constraint == REGEX


@pytest.mark.parametrize(
    ("fields", "flags", "expected"),
    [
        ({}, Defaults(), (None, -1)),
        ({}, Defaults(reasoning=True, reasoning_budget=9), (True, 9)),
        ({"reasoning_budget": 5}, Defaults(reasoning=True, reasoning_budget=9), (True, 5)),
        ({"reasoning_budget": 0}, Defaults(reasoning=True), (None, 0)),
        ({"reasoning_budget": 0}, Defaults(reasoning=False), (False, 0)),
        ({"reasoning_effort": "low"}, Defaults(reasoning_budget=0), (True, -1)),
        ({"reasoning_effort": "low"}, Defaults(reasoning=False, reasoning_budget=9), (True, 9)),
        ({"reasoning_effort": "none"}, Defaults(reasoning=True, reasoning_budget=9), (False, 9)),
    ],
)
def test_a_line_says_how_long_the_model_may_think(
    fields: dict[str, Any], flags: Defaults, expected: tuple[bool | None, int]
) -> None:
    request = one({"messages": [USER], **fields}, flags)
    assert (request.reasoning, request.reasoning_budget) == expected


def test_fields_of_a_completion_reach_the_request() -> None:
    for prompt, expected in [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], "b"], [[1], "b"]),
    ]:
        ask = understand(enveloped({"prompt": prompt, "logprobs": 3}, "/v1/completions"), Defaults())
        assert [request.prompt for request in ask.requests] == expected
        assert {request.logprobs for request in ask.requests} == {3}
    assert one(enveloped({"prompt": "a", "ignore_eos": True}, "/v1/completions")).ignore_eos


def test_several_answers_have_a_seed_each_where_one_was_given() -> None:
    ask = understand(
        enveloped({"prompt": ["a", "b"], "n": 2, "seed": MAX_SEED}, "/v1/completions"), Defaults()
    )
    found = [(request.prompt, request.sampling.seed) for request in ask.all_requests]
    assert found == [("a", MAX_SEED), ("a", 0), ("b", MAX_SEED), ("b", 0)]
    fresh = understand({"prompt": "a", "n": 3}, Defaults())
    assert [request.sampling.seed for request in fresh.all_requests] == [None] * 3


@pytest.mark.parametrize(
    "extra",
    [
        {
            "user": "me",
            "metadata": {"a": 1},
            "store": True,
            "service_tier": "auto",
            "parallel_tool_calls": False,  # there are no tools
        },
        {"stream": False, "n": 1, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"functions": None, "audio": None, "temperature": None, "stop": None, "tool_choice": "auto"},
    ],
)
def test_what_changes_nothing_is_accepted(extra: dict[str, Any]) -> None:
    assert one(enveloped({"messages": [USER], **extra})) == BatchRequest(messages=[USER])


CHAT_REFUSED = [
    ({"frobnicate": 1}, "frobnicate is not known here; it would be ignored, so it is refused"),
    ({"functions": []}, "functions is []; this is not supported here"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"seed": -1}, "seed is -1"),
    ({"logit_bias": [1]}, "logit_bias is [1]; it must be an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias key is 'a'"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias key is '05'; it must be token ids as in '198'"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5 is 'x'"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": "5"}, "max_tokens is '5'"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "differ"),
    ({"stop": 5}, "stop is 5"),
    ({"stop": [""]}, "stop[0] is ''"),
    ({"n": 0}, "n is 0"),
    ({"n": 1025}, "n is 1025"),
    ({"model": 5}, "model is 5"),
    ({"stream": True}, "stream is true; a batch has whole answers"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage is 1"),
    ({"logprobs": 5}, "logprobs is 5"),
    ({"top_logprobs": 2}, "top_logprobs is 2, but logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
    ({"reasoning_effort": "huge"}, "reasoning_effort is 'huge'"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x is not known here"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking is 1"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "contradict"),
    ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}"),
    ({"response_format": {**AS_FORMAT, "x": 1}}, "response_format.x is not known here"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema is missing",
    ),
    ({"response_format": "text"}, "response_format is 'text'"),
    ({"json_schema": "{}"}, "json_schema is '{}'; it must be an object"),
    ({"grammar": 5}, "grammar is 5; it must be text"),
    ({"regex": "a", "response_format": AS_FORMAT}, "response_format and regex each say"),
    ({"regex": "a", "tools": [TOOL]}, "regex leaves no room for calls of tools"),
    ({"regex": "a", "tools": [TOOL], "tool_choice": "required"}, "regex and tool_choice each say"),
    ({"reasoning_budget": -2}, "reasoning_budget is -2"),
    ({"reasoning_budget": True}, "reasoning_budget is True"),
    ({"cache_prompt": 0}, "cache_prompt is 0"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
    ({"tool_choice": "any"}, "tool_choice is 'any'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
    ({"modalities": ["audio"]}, "modalities[0] is 'audio'"),
    ({"tool_choice": "required"}, "tool_choice demands a call, but there are no tools"),
    ({"spec": "eagle"}, "spec is 'eagle'"),
    ({"messages": []}, "messages is []"),
    ({"messages": "Hi"}, "messages is 'Hi'"),
    ({"messages": None}, "messages is None"),
]


@pytest.mark.parametrize(("extra", "message"), CHAT_REFUSED)
def test_what_a_conversation_cannot_have_is_refused_by_its_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        understand(enveloped({"messages": [USER], **extra}), Defaults())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing"),
        ({"prompt": ""}, None),  # the engine's to refuse: another model may begin with a token of its own
        ({"prompt": []}, "prompt is []"),
        ({"prompt": [1, "a"]}, "prompt[1] is 'a'"),
        ({"prompt": {"a": 1}}, "prompt is {'a': 1}"),
        ({"prompt": ["a"] * 2049}, "prompt has 2049 items; it may have 2048"),
        ({"prompt": "a", "echo": True}, "echo is True"),
        ({"prompt": "a", "best_of": 2}, "best_of is 2"),
        ({"prompt": "a", "suffix": "b"}, "suffix is 'b'; this is not supported here"),
        ({"prompt": "a", "logprobs": True}, "logprobs is True"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is 1"),
        (
            {"prompt": "a", "ignore_eos": True, "regex": "a"},
            "ignore_eos is True; an answer with a constraint",
        ),
        ({"prompt": "a", "response_format": {"type": "text"}}, "response_format is not known here"),
        ({"prompt": "a", "reasoning_budget": 5}, "reasoning_budget is not known here"),
        ({"prompt": "a", "messages": [USER]}, "messages is not known here"),
    ],
)
def test_what_a_completion_cannot_have_is_refused(body: dict[str, Any], message: str | None) -> None:
    value = enveloped(body, "/v1/completions")
    if message is None:
        assert one(value).prompt == ""
        return
    with pytest.raises(UsageError) as refused:
        understand(value, Defaults())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "the line has nothing; a request has one of 'prompt', 'messages', or"),
        ({"text": "a"}, "the line has 'text'; a request has one of"),
        ({"prompt": "a", "messages": [USER]}, "the line has 'prompt', 'messages'; a request has one of"),
        ({"prompt": 5}, "prompt is 5; it must be text"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": ["a"]}, "prompt is ['a']; it must be text; tokens and lists need --raw"),
        ({"prompt": "a", "x": 1}, "x is not known here"),
        (enveloped([]), "body is []; it must be an object"),
        ({**enveloped({"messages": [USER]}), "x": 1}, "'x' is not known beside method, url, body"),
        (
            {**enveloped({"messages": [USER]}), "prompt": "a"},
            "'prompt' is not known beside method, url, body",
        ),
    ],
)
def test_what_is_no_form_of_a_line_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        understand(value, Defaults())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": None}, "invalid_url"),
        ({"url": 5}, "invalid_url"),
    ],
)
def test_another_method_or_url_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as refused:
        understand({**enveloped({"messages": [USER]}), **change}, Defaults())
    assert (refused.value.problem.status, refused.value.problem.code) == (400, code)
