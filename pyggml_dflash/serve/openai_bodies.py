"""What answers of OpenAI's chat and text completions look like. Layer 8."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pyggml_dflash.api import Engine
from pyggml_dflash.requests import GenerationResult, TokenLogprob
from pyggml_dflash.serve.bodies import ResponseBody
from pyggml_dflash.serve.parts import Ending, EndReason
from pyggml_dflash.serve.prompt_progress import PromptProgress

NO_LOGPROB = -9999.0  # OpenAI's figure for a token that cannot be


class PromptDetails(ResponseBody):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class CompletionDetails(ResponseBody):
    """Of the tokens of answers, those of reasoning."""

    reasoning_tokens: int


class UsageBody(ResponseBody):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimingsBody(ResponseBody):
    """How long the phases took; of several answers the first one's."""

    cached_prefix_tokens: int = Field(
        description="Tokens of the prompt that were continued from a stored state."
    )
    prefilled_tokens: int = Field(description="Tokens of the prompt that were computed.")
    effective_prompt_tokens: int = Field(
        description="Both: the prompt as the model reads it, never shortened."
    )
    agent_turn_cache_hit: bool = Field(
        description="What was continued holds an earlier answer of this conversation, as a whole."
    )
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    acceptance_length: float | None


class ProgressBody(ResponseBody):
    """How far a prompt is read, in tokens of it."""

    total: int
    cache: int = Field(description="Those that were continued from a stored state.")
    processed: int = Field(description="Those that are read, the continued ones included.")
    time_ms: int


class TopToken(ResponseBody):
    """A token that could have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenBody(TopToken):
    """The token of a place, and its best alternatives."""

    top_logprobs: list[TopToken]


class ChatLogprobs(ResponseBody):
    """Tokens of an answer; `bytes` has what is a part of a character."""

    content: list[TokenBody]


class CalledFunction(ResponseBody):
    """A function and the arguments that the model calls it with."""

    name: str
    arguments: str = Field(description="JSON text of an object.")


class CallBody(ResponseBody):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(ResponseBody):
    """The message of an answer; what it does not have is left out, and content is null beside calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None
    refusal: None


class ChatChoice(ResponseBody):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: EndReason


class ChatCompletion(ResponseBody):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    timings: TimingsBody


class FunctionDelta(ResponseBody):
    """What a chunk adds to a function that is called."""

    name: str | None = None
    arguments: str


class CallDelta(ResponseBody):
    """What a chunk adds to a call; the first one of a call has its id and the function's name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseBody):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(ResponseBody):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None


class ChatChunk(ResponseBody):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    timings: TimingsBody | None = None
    prompt_progress: ProgressBody | None = None


class CompletionLogprobs(ResponseBody):
    """Tokens of a text completion; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None


class Completion(ResponseBody):
    """A text completion, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    timings: TimingsBody | None = None
    prompt_progress: ProgressBody | None = None


def usage_body(endings: list[Ending], n_prompt: int) -> UsageBody:
    """Counts of one request; `n_prompt`: tokens of its prompts, which several answers may share."""
    usages = [ending.result.usage for ending in endings]
    n_generated = sum(usage.completion_tokens for usage in usages)
    cached = min(n_prompt, sum(usage.cached_tokens for usage in usages))
    return UsageBody(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages)
        ),
    )


def timings_body(result: GenerationResult) -> TimingsBody:
    """Milliseconds of one answer."""
    usage, timings, spec, reuse = result.usage, result.timings, result.speculation, result.reuse
    return TimingsBody(
        cached_prefix_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prompt_tokens - usage.cached_tokens,
        effective_prompt_tokens=usage.prompt_tokens,
        agent_turn_cache_hit=reuse is not None and reuse.holds_answer,
        queue_ms=1000 * timings.queue_s,
        prefill_ms=1000 * timings.prefill_s,
        decode_ms=1000 * timings.decode_s,
        acceptance_length=None if spec is None or not spec.verify_steps else spec.acceptance_length,
    )


def progress_body(progress: PromptProgress) -> ProgressBody:
    """One report."""
    return ProgressBody(
        total=progress.total, cache=progress.cache, processed=progress.processed, time_ms=progress.time_ms
    )


def finite(logprob: float) -> float:
    """A log-probability that JSON can have."""
    return max(logprob, NO_LOGPROB)


def token_body(engine: Engine, token: TokenLogprob) -> TokenBody:
    """The token of a place, and its best alternatives."""
    best = [_described(engine, other, logprob) for other, logprob in token.top]
    own = _described(engine, token.token, token.logprob)
    return TokenBody(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=best)


def _described(engine: Engine, token: int, logprob: float) -> TopToken:
    text = engine.token_bytes(token)
    return TopToken(token=text.decode(errors="replace"), logprob=finite(logprob), bytes=list(text))
