"""A body means the same in a request and on a line of a batch: the same answer, or the same refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings

from pyggml_dflash import Engine
from pyggml_dflash.batch import Streams
from pyggml_dflash.jsonl.lines import Task
from pyggml_dflash.jsonl.worker import LineWorker
from pyggml_dflash.openai.asks import Defaults
from pyggml_dflash.openai.fields import CHAT, COMPLETION
from tests.openai.drawn import damaged, few
from tests.serve.live import STORY, Live

TABLES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
MESSAGES = [
    [],
    [{"role": "user"}],
    [{"role": "bard", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "developer", "content": "Be kind."}, *STORY],
    [{"role": "user", "content": "fox " * 600}],
    [*STORY, {"role": "assistant", "content": None, "refusal": None, "annotations": []}],
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


def told(server: Live, path: str, body: Any) -> tuple[int, Any]:
    """Status and answer of a request, without what is new in each."""
    answer = server.post(path, body)
    return answer.status_code, essence(answer.json())


def written(engine: Engine, path: str, body: Any) -> tuple[int, Any]:
    """The same of a line."""
    value = {"method": "POST", "url": path, "body": body}
    task = Task(number=1, digest="0" * 16, custom_id="a", value=value)
    record = LineWorker(engine, Defaults(), "0" * 16).record(task, Streams())
    found = json.loads(record.data)["response"]
    return found["status_code"], essence(found["body"])


def essence(body: Mapping[str, Any]) -> Any:
    if "error" in body:
        error = dict(body["error"])  # of a batch the context may be changed
        return {**error, "message": error["message"].removesuffix(", or open with a larger --max-ctx")}
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return body["choices"], [body["usage"][name] for name in COUNTS]


def tame(body: Any) -> None:
    """Make answers short and repeatable; what is wrong stays wrong."""
    if not isinstance(body, dict):
        return
    body["stream"] = False
    for name, value in (("max_tokens", 2), ("seed", 1)):
        if body.get(name) is None or (type(body[name]) is int and body[name] > value):
            body[name] = value
    for name in ("n", "max_completion_tokens"):
        if type(body.get(name)) is int and body[name] > 2:
            body[name] = 2


@pytest.mark.parametrize("path", TABLES)
def test_a_body_that_is_drawn_gets_the_same_from_both(server: Live, pico: Engine, path: str) -> None:
    schema, statuses = TABLES[path].schema, set()

    @given(few(schema) | damaged(few(schema)))
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    def check(body: Any) -> None:
        tame(body)
        status, answer = told(server, path, body)
        assert written(pico, path, body) == (status, answer)
        statuses.add(status)

    check()
    assert statuses >= {200, 400}


@pytest.mark.parametrize(
    "fields",
    [
        *({"messages": messages} for messages in MESSAGES),
        {"max_tokens": 600},
        {"model": "gpt-4o"},
        {"model": "pico-q8_0.gguf"},
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["e"], "stream_options": {"include_usage": True}},
        {"ignore_eos": True, "logit_bias": {"5": 2}},
        {"logit_bias": {"4096": 1}},
        {"reasoning_effort": "high", "reasoning_budget": 1},
        {"reasoning_effort": "high", "reasoning_budget": 0},
        {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
        {"response_format": {"type": "json_object"}},
        {"regex": "a|b"},
        {"regex": "("},
        {"regex": "a", "tools": [TOOL]},
        {"regex": "a", "tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [TOOL, TOOL]},
        {"tool_choice": "required"},
        {"spec": "mtp"},
        {"max_tokens": 5, "max_completion_tokens": 6},
    ],
)
def test_a_conversation_gets_the_same_from_both(server: Live, pico: Engine, fields: dict[str, Any]) -> None:
    body = {"messages": STORY, "max_tokens": 4, **fields}
    path = "/v1/chat/completions"
    assert written(pico, path, body) == told(server, path, body)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": [1, 2], "logprobs": 1},
        {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": [[1], "b"]},
        {"prompt": [4096]},
        {"prompt": "a", "regex": "b", "ignore_eos": True},
        {"prompt": "a", "echo": False, "best_of": 1, "suffix": None},
    ],
)
def test_a_text_is_continued_the_same_by_both(server: Live, pico: Engine, fields: dict[str, Any]) -> None:
    body = {"max_tokens": 4, **fields}
    assert written(pico, "/v1/completions", body) == told(server, "/v1/completions", body)
