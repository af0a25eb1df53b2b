"""Anthropic's messages: what a request may have, and what an answer looks like. Layer 8."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pyggml_dflash.serve.bodies import Ignored, RequestBody, ResponseBody, Unsupported, by_type, tag
from pyggml_dflash.serve.fields import Count, StopText, Temperature, TopK, TopP
from pyggml_dflash.serve.forms import MessagesSchemaFormat
from pyggml_dflash.serve.tool_fields import MessagesTool, MessagesToolChoice

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(RequestBody):
    """Text of a message."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(RequestBody):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(RequestBody):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(RequestBody):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="Accepted; the model reads the content alone.")
    cache_control: Ignored = None


MessageBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")],
    by_type("text", "thinking", "tool_use", "tool_result"),
]


class InputMessage(RequestBody):
    """One message. Where the last one is the assistant's, the answer goes on where it stops."""

    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]


class Thinking(RequestBody):
    """Whether the model thinks first; 'adaptive' leaves it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = Field(None, description="Tokens after which thinking is closed.")
    display: Literal["summarized"] | None = Field(None, description="Thinking is shown as it is.")


class OutputConfig(RequestBody):
    """The form of the answer."""

    format: MessagesSchemaFormat | None = None
    effort: Ignored = None


class CountRequest(RequestBody):
    """POST /v1/messages/count_tokens."""

    model: str | None = Field(None, description="A name that /v1/models lists; absent: the model there is.")
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Ignored = None
    output_config: OutputConfig | None = None
    speed: Ignored = None
    context_management: Unsupported = None
    mcp_servers: Unsupported = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    cache_prompt: bool | None = Field(
        None, description="false: no stored state is continued, none is stored."
    )
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    container: Unsupported = None
    diagnostics: Unsupported = None


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


class MessageBody(ResponseBody):
    """A whole answer; in a stream's first event its content is empty."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOutput | ThinkingOutput | ToolUseOutput]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
