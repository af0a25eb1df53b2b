"""Chat messages as callers give them, checked and brought to the one form that templates read. Layer 2.

Templates differ in what they stand, so the rules are here and the same for every model:

- `developer` is `system`. System messages at the beginning are one, joined by an empty line; a later one
  stays where it is, and the template takes it or refuses it.
- Text parts of a content list are joined by a line break; parts that are not text are refused.
- The content of an assistant message that only calls tools may be null; it is then the empty text.
- Arguments of tool calls may be JSON text; templates get the object. All other roles and keys are passed
  on as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml_dflash.errors import UsageError, quoted
from pyggml_dflash.model.tools import read_json

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message for a template, and the index of the caller's message it stands for."""

    message: dict[str, Any]
    index: int


def read_messages(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation; UsageError names the message that cannot be used by its index."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"messages is {quoted(messages)}; it must be a list of at least one message")
    turns = [Turn(_read_message(i, message), i) for i, message in enumerate(messages)]
    n_system = next((i for i, t in enumerate(turns) if t.message["role"] != "system"), len(turns))
    if n_system > 1:
        text = "\n\n".join(turn.message["content"] for turn in turns[:n_system])
        turns[:n_system] = [Turn({**turns[0].message, "content": text}, 0)]
    return turns


def _read_message(i: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"messages[{i}] is {quoted(message)}; it must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"messages[{i}].role is {quoted(role)}; it must be a name such as 'user'")
    read = dict(message)
    read["role"] = "system" if role == "developer" else role
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(f"messages[{i}].tool_calls", message["tool_calls"])
    content = message.get("content")
    calls_only = content is None and role == "assistant" and bool(message.get("tool_calls"))
    read["content"] = "" if calls_only else _read_content(f"messages[{i}].content", content)
    return read


def _read_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{where} is {quoted(content)}; it must be text or a list of text parts")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UsageError(f"{where}[{j}] is of type {quoted(kind)}; only 'text' can be used")
        if not isinstance(text, str):
            raise UsageError(f"{where}[{j}].text is {quoted(text)}; it must be text")
        texts.append(text)
    return "\n".join(texts)


def _read_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(f"{where} is {quoted(calls)}; it must be a list of objects")
    return [_read_call(f"{where}[{j}]", call) for j, call in enumerate(calls)]


def _read_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _read_call(f"{where}.function", function)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    parsed = read_json(arguments or "{}")
    if parsed is None or not isinstance(parsed[0], dict):
        raise UsageError(f"{where}.arguments is {quoted(arguments)}; it must be a JSON object")
    return {**call, "arguments": parsed[0]}
