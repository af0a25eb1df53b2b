"""Anthropic's messages as the turns that chat templates know. Layer 8.

Blocks of one message become one turn, but for results of tools, which are turns of their own. Messages of
one role that follow each other are one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml_dflash.errors import UsageError
from pyggml_dflash.serve.bodies import json_bytes
from pyggml_dflash.serve.messages_bodies import (
    CountRequest,
    InputMessage,
    MessageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Turn = dict[str, Any]
_WHOSE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def turns_of(body: CountRequest) -> list[Turn]:
    """The turns of a request, its system text first; the answer that it begins is left out."""
    turns: list[Turn] = [] if body.system is None else [{"role": "system", "content": _texts(body.system)}]
    messages = body.messages[:-1] if is_begun(body) else body.messages
    for i, message in enumerate(messages):
        for j, block in enumerate(_blocks(message)):
            _check_role(message, block, f"messages[{i}].content[{j}]")
            _add(turns, message.role, block)
    return turns


def is_begun(body: CountRequest) -> bool:
    """True if the last message is the beginning of the answer."""
    return body.messages[-1].role == "assistant"


def beginning(body: CountRequest) -> str:
    """The text that the answer begins with, which the request gives and the answer does not repeat."""
    if not is_begun(body):
        return ""
    blocks = _blocks(body.messages[-1])
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if len(texts) < len(blocks):
        where = f"messages[{len(body.messages) - 1}]"
        raise UsageError(f"{where} is the beginning of the answer; it can have nothing but text")
    return "".join(texts)


def _texts(content: str | Sequence[TextBlock]) -> list[dict[str, str]]:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return [{"type": "text", "text": text} for text in texts]


def _blocks(message: InputMessage) -> list[MessageBlock]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _check_role(message: InputMessage, block: MessageBlock, where: str) -> None:
    if _WHOSE.get(block.type, message.role) != message.role:
        raise UsageError(f"{where} is a {block.type} block, which no message of the {message.role} has")


def _add(turns: list[Turn], role: str, block: MessageBlock) -> None:
    if isinstance(block, ToolResultBlock):
        content = _texts(block.content or "")
        turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turn = turns[-1]
    if isinstance(block, TextBlock):
        turn["content"] += _texts(block.text)
    elif isinstance(block, ThinkingBlock):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
    elif isinstance(block, ToolUseBlock):
        function = {"name": block.name, "arguments": json_bytes(block.input).decode()}
        turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
