"""Anthropic's messages: what a request may have, and what an answer looks like. Layer 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from pyggml_dflash.openai.fields import CACHE_PROMPT, COUNT, MAX_STOPS, MODEL, SAMPLING, TOOL_NAME
from pyggml_dflash.openai.values import (
    FLAG,
    IGNORED,
    OBJECT,
    TEXT,
    UNSUPPORTED,
    Value,
    by_type,
    choice,
    either,
    items,
    record,
    text,
    typed,
)
from pyggml_dflash.serve.bodies import FreeBody, ResponseBody

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_CACHED: Final = {"cache_control": IGNORED}
_TEXT: Final = typed("text", {"text": TEXT}, {**_CACHED, "citations": IGNORED})
_TEXTS: Final = either(TEXT, items(_TEXT))
_BLOCK: Final = by_type(
    text=_TEXT,
    thinking=typed("thinking", {"thinking": TEXT}, {"signature": IGNORED}),
    tool_use=typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}, {**_CACHED, "caller": IGNORED}),
    tool_result=typed(
        "tool_result",
        {"tool_use_id": TEXT},
        {
            **_CACHED,
            "content": _TEXTS,
            "is_error": FLAG.about("Accepted; the model reads the content alone."),
        },
    ),
)
_MESSAGE: Final = record(
    {"role": choice("user", "assistant"), "content": either(TEXT, items(_BLOCK))},
    required=("role", "content"),
)
_TOOL: Final = record(
    {
        "type": choice("custom"),  # those that a server would run are not known here
        "name": TOOL_NAME,
        "description": TEXT,
        "input_schema": OBJECT.about("JSON schema of the arguments, an object."),
        "strict": IGNORED,
        **_CACHED,
    },
    required=("name", "input_schema"),
)
_TOOL_CHOICE: Final = record(
    {
        "type": choice("auto", "any", "tool", "none"),
        "name": TOOL_NAME.about("With 'tool': the one that must be called."),
        "disable_parallel_tool_use": FLAG,
    },
    required=("type",),
)
_THINKING: Final = record(
    {
        "type": choice("enabled", "disabled", "adaptive"),
        "budget_tokens": COUNT.about("Tokens after which thinking is closed."),
        "display": choice("summarized").about("Thinking is shown as it is."),
    },
    required=("type",),
).about("Whether the model thinks first; 'adaptive' leaves it to the chat template.")

_COUNTED: Final[Mapping[str, Value]] = {
    "model": MODEL,
    "messages": items(_MESSAGE, least=1).about(
        "Where the last one is the assistant's, the answer goes on where it stops."
    ),
    "system": _TEXTS,
    "tools": items(_TOOL),
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": record({"format": typed("json_schema", {"schema": OBJECT}), "effort": IGNORED}).about(
        "The form of the answer."
    ),
    "cache_control": IGNORED,
    "speed": IGNORED,
    "context_management": UNSUPPORTED,
    "mcp_servers": UNSUPPORTED,
}
COUNTED: Final = record(_COUNTED, required=("messages",))
MESSAGES: Final = record(
    {
        **_COUNTED,
        "max_tokens": COUNT,
        "stream": FLAG,
        "stop_sequences": items(text(least=1), most=MAX_STOPS),
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
        "cache_prompt": CACHE_PROMPT,
        **dict.fromkeys(("metadata", "service_tier", "inference_geo"), IGNORED),
        **dict.fromkeys(("container", "diagnostics"), UNSUPPORTED),
    },
    required=("max_tokens", "messages"),
)


class TokenCount(ResponseBody):
    """How long a prompt is."""

    input_tokens: int


class TextOutput(ResponseBody):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class ThinkingOutput(ResponseBody):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Always empty: thinking is not signed here.")


class ToolUseOutput(ResponseBody):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingDetails(ResponseBody):
    """Of the tokens of an answer, those of thinking."""

    thinking_tokens: int


class MessageUsage(ResponseBody):
    """Token counts; the prompt's are those that were computed and those that were not."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class MessageBody(FreeBody):
    """A whole answer; in a stream's first event its content is empty."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOutput | ThinkingOutput | ToolUseOutput]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
