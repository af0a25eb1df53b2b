"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients use them. Layer 8."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import WithJsonSchema

from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.asks import Body, sampling_of
from pyggml_dflash.openai.forms import Calls, calls_of, format_of, only_form
from pyggml_dflash.openai.values import check_items
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.blocks import Block, BlockDelta, BlockEvent, Blocks, BlockStart, blocks_of
from pyggml_dflash.serve.bodies import JsonRoute, Object, json_bytes, json_response
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.messages_bodies import (
    COUNTED,
    MESSAGES,
    MessageBody,
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
from pyggml_dflash.serve.prompt_progress import PromptProgress
from pyggml_dflash.serve.questions import Question, chat_prompt, chat_question
from pyggml_dflash.serve.service import Service, off_loop
from pyggml_dflash.serve.sse import Gathered, data, reply

MessagesBody = Annotated[Object, WithJsonSchema(dict(MESSAGES.schema))]
CountedBody = Annotated[Object, WithJsonSchema(dict(COUNTED.schema))]


def message_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)

    @router.post("/v1/messages", responses=answer_responses(MessageBody, anthropic=True))
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation."""
        question = await service.asked(body, lambda: ask(service, body))

        def writer(answers: Answers) -> MessageWriter:
            return MessageWriter(service, answers)

        return await reply(request, service, [question], writer, stream=bool(body.get("stream")))

    @router.post("/v1/messages/count_tokens", responses=answer_responses(TokenCount, anthropic=True))
    async def count_tokens(body: CountedBody) -> Response:
        """Count the tokens of a conversation."""
        return json_response(await off_loop(lambda: count(service, body)))

    return router


def ask(service: Service, body: Body) -> Question:
    """The question of a request. Renders and tokenizes: not for the event loop."""
    MESSAGES.check("", body)
    service.check_model(body.get("model"))
    service.desk.check_room(1)
    request, calls = request_of(service, body)
    return chat_question(service.engine, request, calls, begun=beginning(body))


def count(service: Service, body: Body) -> TokenCount:
    """How long the prompt of a request would be. Renders and tokenizes: not for the event loop."""
    COUNTED.check("", body)
    service.check_model(body.get("model"))
    request, _ = request_of(service, body)
    prompt = chat_prompt(service.engine, request, begun=beginning(body))
    return TokenCount(input_tokens=len(prompt.tokens))


def request_of(service: Service, body: Body) -> tuple[BatchRequest, Calls]:
    """What a request asks of the engine, but for the beginning of the answer; and of its tools' calls."""
    check_items("messages", body["messages"], service.options.max_messages)
    calls, form = calls_in(body), format_of((body.get("output_config") or {}).get("format"))
    said = reasoning(body, can_think=service.engine.info.reasoning_supported)
    thinks, budget = service.defaults.thinking(said, (body.get("thinking") or {}).get("budget_tokens"))
    request = BatchRequest(
        messages=turns_of(body),
        tools=calls.tools,
        reasoning=thinks,
        reasoning_budget=budget,
        max_tokens=body.get("max_tokens"),
        sampling=sampling_of(body, service.defaults.sampling),
        stop=tuple(body.get("stop_sequences") or ()),
        constraint=only_form({"output_config.format": form}, calls),
        cache_prompt=body.get("cache_prompt") is not False,
    )
    return request, calls


def calls_in(body: Body) -> Calls:
    """What the model may call, in OpenAI's words."""
    choice = body.get("tool_choice") or {"type": "auto"}
    kind, name = choice["type"], choice.get("name")
    if (kind == "tool") != (name is not None):
        raise UsageError(f"tool_choice has type {kind!r} and name {name!r}", param="tool_choice")
    functions = [{**tool, "parameters": tool["input_schema"]} for tool in body.get("tools") or ()]
    return calls_of(
        functions,
        "required" if kind == "any" else kind,
        name,
        parallel=not choice.get("disable_parallel_tool_use"),
    )


def reasoning(body: Body, *, can_think: bool) -> bool | None:
    """Whether the model is to think first; None leaves it to the template."""
    kind = (body.get("thinking") or {"type": "adaptive"})["type"]
    said = None if kind == "adaptive" else kind == "enabled"
    if not is_begun(body):
        return said
    if said:
        raise UsageError(
            "thinking is enabled, but the last message begins the answer; what it thinks comes first",
            param="thinking",
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

    def read(self, index: int, progress: PromptProgress) -> Iterable[bytes]:
        """Nothing: the protocol has no event for it."""
        return []

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """Blocks as they come, then how the answer ended."""
        if isinstance(event, Ending):
            yield from map(_block_event, self._blocks.finish(event))
            delta = {"stop_reason": _stop_reason(event), "stop_sequence": event.result.stop}
            yield _event({"type": "message_delta", "delta": delta, "usage": self._usage(event).model_dump()})
        else:
            yield from map(_block_event, self._blocks.push(event))

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
