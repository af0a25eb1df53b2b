"""Anthropic's messages as the turns that chat templates know. Layer 8.

Blocks of one message become one turn, but for results of tools, which are turns of their own. Messages of
one role that follow each other are one turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.asks import Body, Turn, with_reasoning
from pyggml_dflash.serve.bodies import json_bytes

_WHOSE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def turns_of(body: Body) -> list[Turn]:
    """The turns of a request, its system text first; the answer that it begins is left out."""
    system = body.get("system")
    turns: list[Turn] = [] if system is None else [{"role": "system", "content": _texts(system)}]
    messages = body["messages"][:-1] if is_begun(body) else body["messages"]
    for i, message in enumerate(messages):
        for j, block in enumerate(_blocks(message)):
            _check_role(message["role"], block, f"messages[{i}].content[{j}]")
            _add(turns, message["role"], block)
    return [with_reasoning(turn) for turn in turns]


def is_begun(body: Body) -> bool:
    """True if the last message is the beginning of the answer."""
    return bool(body["messages"][-1]["role"] == "assistant")


def beginning(body: Body) -> str:
    """The text that the answer begins with, which the request gives and the answer does not repeat."""
    if not is_begun(body):
        return ""
    blocks = _blocks(body["messages"][-1])
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if len(texts) < len(blocks):
        where = f"messages[{len(body['messages']) - 1}]"
        raise UsageError(f"{where} is the beginning of the answer; it can have nothing but text", param=where)
    return "".join(texts)


def _texts(content: str | Sequence[Body]) -> list[dict[str, str]]:
    texts = [content] if isinstance(content, str) else [block["text"] for block in content]
    return [{"type": "text", "text": text} for text in texts]


def _blocks(message: Body) -> Sequence[Body]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_role(role: str, block: Body, where: str) -> None:
    if _WHOSE.get(block["type"], role) != role:
        raise UsageError(
            f"{where} is a {block['type']} block, which no message of the {role} has", param=where
        )


def _add(turns: list[Turn], role: str, block: Body) -> None:
    if block["type"] == "tool_result":
        content = _texts(block.get("content") or "")
        turns.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turn = turns[-1]
    if block["type"] == "text":
        turn["content"] += _texts(block["text"])
    elif block["type"] == "thinking":
        turn.setdefault("reasoning_content", []).append(block["thinking"])
    else:
        function = {"name": block["name"], "arguments": json_bytes(block["input"]).decode()}
        turn.setdefault("tool_calls", []).append(
            {"id": block["id"], "type": "function", "function": function}
        )
