"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients use them. Layer 8."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from pyggml_dflash.errors import UsageError
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.blocks import Block, BlockDelta, BlockEvent, Blocks, BlockStart, blocks_of
from pyggml_dflash.serve.bodies import json_bytes, json_response
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.fields import check_count, with_given
from pyggml_dflash.serve.forms import form_of, held_to
from pyggml_dflash.serve.messages_bodies import (
    CountRequest,
    MessageBody,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TextOutput,
    ThinkingDetails,
    ThinkingOutput,
    TokenCount,
    ToolUseOutput,
)
from pyggml_dflash.serve.messages_turns import beginning, is_begun, turns_of
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.questions import ChatPrompt, Question, chat_prompt
from pyggml_dflash.serve.service import Service, off_loop
from pyggml_dflash.serve.sse import Gathered, data, reply
from pyggml_dflash.serve.tool_fields import Offer, offer


def message_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Anthropic"])

    @router.post("/v1/messages", responses=answer_responses(MessageBody, anthropic=True))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        question = await off_loop(lambda: ask(service, body))

        def writer(answers: Answers) -> MessageWriter:
            return MessageWriter(service, answers)

        return await reply(request, service, [question], writer, stream=bool(body.stream))

    @router.post("/v1/messages/count_tokens", responses=answer_responses(TokenCount, anthropic=True))
    async def count_tokens(body: CountRequest) -> Response:
        """Count the tokens of a conversation."""
        prompt = await off_loop(lambda: prompt_of(service, body, offered(body)))
        return json_response(TokenCount(input_tokens=len(prompt.tokens)))

    return router


def ask(service: Service, body: MessagesRequest) -> Question:
    """The question of a request. Renders and tokenizes: not for the event loop."""
    service.desk.check_room(1)
    tools = offered(body)
    prompt = prompt_of(service, body, tools)
    form = form_of(None if body.output_config is None else body.output_config.format)
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return Question(
        tokens=prompt.tokens,
        max_tokens=body.max_tokens,
        sampling=with_given(service.options.sampling, given),
        stop=tuple(body.stop_sequences or ()),
        parser=prompt.parser,
        reasoning_block=prompt.reasoning_block,
        one_call=tools.one_call,
        constraint=held_to(service.engine, tools, **{"output_config.format": form}),
        cache_prompt=body.cache_prompt is not False,
        keep_head=bool(tools.tools),
    )


def offered(body: CountRequest) -> Offer:
    """What the model may call."""
    single = None if body.tool_choice is None else body.tool_choice.disable_parallel_tool_use
    return offer(body.tools, body.tool_choice, parallel=None if single is None else not single)


def prompt_of(service: Service, body: CountRequest, tools: Offer) -> ChatPrompt:
    """The conversation as the model reads it."""
    service.check_model(body.model)
    check_count(body.messages, service.options.max_messages)
    engine, options = service.engine, service.options
    thinks = reasoning(body, can_think=engine.info.reasoning_supported)
    return chat_prompt(
        engine,
        turns_of(body),
        tools=tools.tools,
        reasoning=thinks,
        budget=options.budget(
            None if body.thinking is None else body.thinking.budget_tokens, reasoning=thinks
        ),
        begun=beginning(body),
    )


def reasoning(body: CountRequest, *, can_think: bool) -> bool | None:
    """Whether the model is to think first; None leaves it to the template."""
    thinking = body.thinking
    said = None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"
    if not is_begun(body):
        return said
    if said:
        raise UsageError(
            "thinking is enabled, but the last message begins the answer; what it thinks comes first"
        )
    return False if can_think else said


class MessageWriter:
    """Writes an answer as Anthropic does, whole and as events."""

    def __init__(self, service: Service, answers: Answers) -> None:
        self._model, self._n_prompt = service.model_name, answers.n_prompt
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = Blocks()

    def whole(self, gathered: Gathered) -> MessageBody:
        """The body of a request that is not streamed."""
        ((parts, ending),) = gathered
        return self._message(blocks_of(parts, ending), ending)

    def begin(self) -> Iterator[bytes]:
        """The message without its content."""
        yield _event({"type": "message_start", "message": self._message([], None).model_dump()})

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """Blocks as they come, then how the answer ended."""
        if isinstance(event, Ending):
            yield from map(_block_event, self._blocks.finish(event))
            delta = {"stop_reason": _stop_reason(event), "stop_sequence": event.result.stop}
            yield _event({"type": "message_delta", "delta": delta, "usage": self._usage(event).model_dump()})
        else:
            yield from map(_block_event, self._blocks.push(event.event))

    def end(self) -> Iterator[bytes]:
        """The last event."""
        yield _event({"type": "message_stop"})

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """Anthropic's clients raise what this event says."""
        return [_event(problem.anthropic)]

    def _message(self, blocks: Sequence[Block], ending: Ending | None) -> MessageBody:
        return MessageBody(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=[_content(block) for block in blocks],
            stop_reason=None if ending is None else _stop_reason(ending),
            stop_sequence=None if ending is None else ending.result.stop,
            usage=self._usage(ending),
        )

    def _usage(self, ending: Ending | None) -> MessageUsage:
        usage = None if ending is None else ending.result.usage
        n_cached = 0 if usage is None else usage.cached_tokens
        return MessageUsage(
            input_tokens=self._n_prompt - n_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=n_cached,
            output_tokens=0 if usage is None else usage.completion_tokens,
            output_tokens_details=ThinkingDetails(
                thinking_tokens=0 if usage is None else usage.reasoning_tokens
            ),
        )


def _stop_reason(ending: Ending) -> StopReason:
    if ending.result.stop is not None:
        return "stop_sequence"
    reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return reasons[ending.reason]


def _content(block: Block) -> TextOutput | ThinkingOutput | ToolUseOutput:
    if block.kind == "reasoning":
        return ThinkingOutput(type="thinking", thinking=block.text, signature="")
    if block.kind == "text":
        return TextOutput(type="text", text=block.text)
    return ToolUseOutput(type="tool_use", id=block.id, name=block.name, input=json.loads(block.text or "{}"))


def _block_event(event: BlockEvent) -> bytes:
    index = event.block.index
    if isinstance(event, BlockStart):
        content = _content(event.block).model_dump()
        return _event({"type": "content_block_start", "index": index, "content_block": content})
    if isinstance(event, BlockDelta):
        kind, field = _DELTAS[event.block.kind]
        return _event(
            {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: event.text}}
        )
    return _event({"type": "content_block_stop", "index": index})


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(body: dict[str, Any]) -> bytes:
    return data(json_bytes(body), event=body["type"])
