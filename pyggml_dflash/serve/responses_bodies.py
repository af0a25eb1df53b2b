"""OpenAI's responses: what a request may have, and what an answer looks like. Layer 8."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from pyggml_dflash.openai.fields import (
    BUDGET,
    CACHE_PROMPT,
    COUNT,
    EFFORT,
    FUNCTION,
    MAX_TOP_LOGPROBS,
    MODEL,
    NAMED_SCHEMA,
    PARALLEL,
    SAMPLING,
    STREAM_OPTIONS,
    TOOL_NAME,
)
from pyggml_dflash.openai.values import (
    FLAG,
    IGNORED,
    TEXT,
    UNSUPPORTED,
    Value,
    by_type,
    choice,
    either,
    items,
    mapping,
    only,
    record,
    typed,
    whole,
)
from pyggml_dflash.serve.bodies import FreeBody, ResponseBody
from pyggml_dflash.serve.openai_bodies import TokenBody

LOGPROBS: Final = "message.output_text.logprobs"  # of `include`

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_INPUT_TEXT: Final = typed("input_text", {"text": TEXT})
_ANSWER_TEXT: Final = typed("output_text", {"text": TEXT}, {"annotations": IGNORED, "logprobs": IGNORED})
_UNREAD: Final = {"id": IGNORED, "status": IGNORED}  # what items of earlier answers have
_MESSAGE: Final = record(
    {
        "type": choice("message"),
        "role": choice("user", "assistant", "system", "developer"),
        "content": either(TEXT, items(by_type(input_text=_INPUT_TEXT, output_text=_ANSWER_TEXT))),
        "phase": IGNORED,
        **_UNREAD,
    },
    required=("role", "content"),
)
_ITEM: Final = by_type(
    default="message",
    message=_MESSAGE,
    function_call=typed(
        "function_call",
        {"call_id": TEXT, "name": TEXT, "arguments": TEXT.about("JSON text of an object.")},
        {"caller": IGNORED, **_UNREAD},
    ),
    function_call_output=typed(
        "function_call_output", {"call_id": TEXT, "output": either(TEXT, items(_INPUT_TEXT))}, _UNREAD
    ),
    reasoning=typed(
        "reasoning",
        {},
        {
            "content": items(typed("reasoning_text", {"text": TEXT})),
            "summary": IGNORED,
            "encrypted_content": UNSUPPORTED,
            **_UNREAD,
        },
    ),
)
_FORMAT: Final = by_type(
    text=typed("text", {}),
    json_object=typed("json_object", {}),
    json_schema=typed("json_schema", *NAMED_SCHEMA),
)
_TOOL: Final = typed("function", {"name": TOOL_NAME}, FUNCTION)

RESPONSES: Final[Value] = record(
    {
        "input": either(TEXT, items(_ITEM, least=1)),
        "model": MODEL,
        "instructions": TEXT.about("A system message before the input."),
        "max_output_tokens": COUNT,
        "temperature": SAMPLING["temperature"],
        "top_p": SAMPLING["top_p"],
        "tools": items(_TOOL),
        "tool_choice": either(choice("none", "auto", "required"), typed("function", {"name": TOOL_NAME})),
        "parallel_tool_calls": PARALLEL,
        "reasoning": record({"effort": EFFORT, "summary": IGNORED, "generate_summary": IGNORED}),
        "reasoning_budget": BUDGET,
        "cache_prompt": CACHE_PROMPT,
        "text": record({"format": _FORMAT, "verbosity": UNSUPPORTED}),
        "stream": FLAG,
        "stream_options": STREAM_OPTIONS,
        "truncation": choice("disabled"),
        "background": only(False, "answers are not kept"),
        "metadata": mapping(r"[\s\S]*", "texts", TEXT),
        "include": items(choice(LOGPROBS, "reasoning.encrypted_content")).about(
            "Log-probabilities of the tokens of text. Reasoning is never encrypted here."
        ),
        "top_logprobs": whole(0, MAX_TOP_LOGPROBS).about(
            f"Alternatives of each token, where `include` has '{LOGPROBS}'."
        ),
        **dict.fromkeys(
            (
                "store",
                "user",
                "service_tier",
                "safety_identifier",
                "prompt_cache_key",
                "prompt_cache_retention",
            ),
            IGNORED,
        ),
        **dict.fromkeys(
            (
                "previous_response_id",
                "conversation",
                "prompt",
                "max_tool_calls",
                "context_management",
            ),
            UNSUPPORTED,
        ),
    },
    required=("input",),
)


class OutputText(ResponseBody):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenBody] = Field(description="Empty unless the request includes them.")


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


class ResponseObject(FreeBody):
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
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
