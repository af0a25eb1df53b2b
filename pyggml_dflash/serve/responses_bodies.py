"""OpenAI's responses: what a request may have, and what an answer looks like. Layer 8."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pyggml_dflash.serve.bodies import Ignored, RequestBody, ResponseBody, Unsupported, by_type, tag
from pyggml_dflash.serve.fields import Count, ReasoningBudget, StreamOptions, Temperature, TopP
from pyggml_dflash.serve.forms import ResponsesFormat
from pyggml_dflash.serve.openai_bodies import Effort
from pyggml_dflash.serve.tool_fields import Choice, ResponsesTool, ResponsesToolChoice

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestBody):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class AnswerText(RequestBody):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


TextPiece = Annotated[
    Annotated[InputText, tag("input_text")] | Annotated[AnswerText, tag("output_text")],
    by_type("input_text", "output_text"),
]


class Item(RequestBody):
    """What items of earlier answers have, and nobody here reads."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(Item):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPiece]
    phase: Ignored = None


class CallItem(Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON text of an object.")
    caller: Ignored = None


class CallOutputItem(Item):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningText(RequestBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """What the model thought in an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Ignored = None
    encrypted_content: Unsupported = None


InputItem = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CallOutputItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    by_type("message", "function_call", "function_call_output", "reasoning"),
]


class Reasoning(RequestBody):
    """How the model thinks."""

    effort: Effort | None = Field(None, description="'none': no thinking; other levels are not told apart.")
    summary: Ignored = None
    generate_summary: Ignored = None


class TextOptions(RequestBody):
    """The form of the answer's text."""

    format: ResponsesFormat | None = None
    verbosity: Unsupported = None


class ResponsesRequest(RequestBody):
    """POST /v1/responses. Nothing is stored: each request brings the whole conversation."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    model: str | None = Field(None, description="A name that /v1/models lists; absent: the model there is.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Choice | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    reasoning: Reasoning | None = None
    reasoning_budget: ReasoningBudget | None = None
    cache_prompt: bool | None = Field(
        None, description="false: no stored state is continued, none is stored."
    )
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="Accepted; reasoning is never encrypted here."
    )
    store: Ignored = None
    user: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    top_logprobs: Unsupported = None
    context_management: Unsupported = None


class OutputText(ResponseBody):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(ResponseBody):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoningText(ResponseBody):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseBody):
    """What the model thought before it answered; nothing is summed up."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputCall(ResponseBody):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedDetails(ResponseBody):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int
    cache_write_tokens: int = Field(description="Always 0.")


class ReasoningDetails(ResponseBody):
    """Of the answer's tokens, those of reasoning."""

    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class FailureBody(ResponseBody):
    """Why there is no whole answer."""

    code: str
    message: str


class IncompleteDetails(ResponseBody):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseBody):
    """A response; in a stream's first events its output is empty."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: FailureBody | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any] | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
