"""POST /v1/responses. Layer 8."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import WithJsonSchema

from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.asks import Body, Turn, sampling_of, with_reasoning
from pyggml_dflash.openai.forms import Calls, calls_of, format_of, only_form
from pyggml_dflash.openai.values import check_items
from pyggml_dflash.requests import TokenLogprob
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.blocks import Block, BlockDelta, BlockEvent, Blocks, BlockStart, blocks_of
from pyggml_dflash.serve.bodies import JsonRoute, Object, json_bytes
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.openai_bodies import token_body
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.prompt_progress import PromptProgress
from pyggml_dflash.serve.questions import Question, chat_question
from pyggml_dflash.serve.responses_bodies import (
    LOGPROBS,
    RESPONSES,
    CachedDetails,
    FailureBody,
    IncompleteDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    ReasoningDetails,
    ResponseObject,
    ResponseUsage,
    Status,
)
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.sse import Gathered, data, reply

ResponsesBody = Annotated[Object, WithJsonSchema(dict(RESPONSES.schema))]
_TOOL_PARTS: Final = dict.fromkeys(("description", "parameters", "strict"))  # clients expect all of them
_DELTAS: Final = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def response_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses", responses=answer_responses(ResponseObject), tags=["OpenAI"])
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation. Nothing is stored: each request brings the whole of it."""
        question = await service.asked(body, lambda: ask(service, body))

        def writer(answers: Answers) -> ResponseWriter:
            return ResponseWriter(service, answers, body, question)

        return await reply(request, service, [question], writer, stream=bool(body.get("stream")))

    return router


def ask(service: Service, body: Body) -> Question:
    """The question of a request. Renders and tokenizes: not for the event loop."""
    RESPONSES.check("", body)
    service.check_model(body.get("model"))
    service.desk.check_room(1)
    turns = turns_of(body)
    check_items("input", turns, service.options.max_messages)
    effort = (body.get("reasoning") or {}).get("effort")
    said = None if effort is None else effort != "none"
    reasoning, budget = service.defaults.thinking(said, body.get("reasoning_budget"))
    calls, form = calls_in(body), format_of((body.get("text") or {}).get("format"))
    max_tokens = body.get("max_output_tokens")
    request = BatchRequest(
        messages=turns,
        tools=calls.tools,
        reasoning=reasoning,
        reasoning_budget=budget,
        max_tokens=service.defaults.max_tokens if max_tokens is None else max_tokens,
        sampling=sampling_of(body, service.defaults.sampling),
        logprobs=_logprobs(body),
        constraint=only_form({"text.format": form}, calls),
        cache_prompt=body.get("cache_prompt") is not False,
    )
    return chat_question(service.engine, request, calls)


def _logprobs(body: Body) -> int | None:
    """How many alternatives of each token are wanted; None: no log-probabilities at all."""
    top = body.get("top_logprobs")
    if LOGPROBS in (body.get("include") or ()):
        return top or 0
    if top is not None:
        raise UsageError(f"top_logprobs is {top}, but include has no {LOGPROBS!r}", param="top_logprobs")
    return None


def calls_in(body: Body) -> Calls:
    """What the model may call."""
    choice = body.get("tool_choice")
    return calls_of(
        body.get("tools"),
        choice if isinstance(choice, str) else None,
        choice["name"] if isinstance(choice, Mapping) else None,
        parallel=body.get("parallel_tool_calls") is not False,
    )


def turns_of(body: Body) -> list[Turn]:
    """The turns of a request. Reasoning and calls belong to the assistant's turn that they stand beside."""
    system = body.get("instructions")
    turns: list[Turn] = [] if system is None else [_turn("system", system)]
    if isinstance(body["input"], str):
        return [*turns, _turn("user", body["input"])]
    for item in body["input"]:
        _add(turns, item)
    return [with_reasoning(turn) for turn in turns]


def _turn(role: str, content: str | list[dict[str, str]]) -> Turn:
    return {"role": role, "content": content}


def _add(turns: list[Turn], item: Body) -> None:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        turns.append({**_turn("tool", _texts(item["output"])), "tool_call_id": item["call_id"]})
    elif kind == "message":
        is_thought = bool(turns) and turns[-1].keys() == {"role", "content", "reasoning_content"}
        if item["role"] == "assistant" and is_thought and not turns[-1]["content"]:
            turns[-1]["content"] = _texts(item["content"])
        else:
            turns.append(_turn(item["role"], _texts(item["content"])))
    else:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append(_turn("assistant", ""))
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turns[-1].setdefault("tool_calls", []).append(call)
        else:
            thought = [piece["text"] for piece in item.get("content") or ()]
            turns[-1].setdefault("reasoning_content", []).extend(thought)


def _texts(content: str | Sequence[Body]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": piece["text"]} for piece in content]


class ResponseWriter:
    """Writes a response, whole and as events."""

    def __init__(self, service: Service, answers: Answers, body: Body, question: Question) -> None:
        self._engine, self._model, self._answers = service.engine, service.model_name, answers
        self._body, self._question = body, question
        self._mark, self._created = uuid.uuid4().hex, int(time.time())
        self._n_events = 0
        self._blocks = Blocks()

    def whole(self, gathered: Gathered) -> ResponseObject:
        """The body of a request that is not streamed."""
        ((parts, ending),) = gathered
        return self._response(_status(ending), blocks_of(parts, ending), ending)

    def begin(self) -> Iterator[bytes]:
        """The response without its output."""
        yield self._state("created", self._response("in_progress"))
        yield self._state("in_progress", self._response("in_progress"))

    def read(self, index: int, progress: PromptProgress) -> Iterable[bytes]:
        """Nothing: the protocol has no event for it."""
        return []

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """Items as they come, then the whole response."""
        if isinstance(event, Ending):
            for last in self._blocks.finish(event):
                yield from self._block_events(last)
            status = _status(event)
            yield self._state(status, self._response(status, self._blocks.done, event))
        else:
            for found in self._blocks.push(event):
                yield from self._block_events(found)

    def end(self) -> Iterable[bytes]:
        """The whole response was the last event."""
        return []

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """The response as it failed."""
        response = self._response("failed", self._blocks.done)
        response.error = FailureBody(code="server_error", message=problem.message)
        return [self._state("failed", response)]

    def _response(
        self, status: Status, blocks: Sequence[Block] = (), ending: Ending | None = None
    ) -> ResponseObject:
        body, sampling = self._body, self._question.sampling
        cut = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        form = (body.get("text") or {}).get("format")
        return ResponseObject(
            id=f"resp_{self._mark}",
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details=cut,
            instructions=body.get("instructions"),
            max_output_tokens=self._question.max_tokens,
            metadata=body.get("metadata") or {},
            model=self._model,
            output=[self._item(block, "incomplete" if block.is_cut else "completed") for block in blocks],
            parallel_tool_calls=not self._question.one_call,
            previous_response_id=None,
            reasoning={"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            store=False,
            temperature=sampling.temperature,
            text={"format": form or {"type": "text"}},
            tool_choice=body.get("tool_choice") or "auto",
            tools=[{**_TOOL_PARTS, **tool} for tool in body.get("tools") or ()],
            top_logprobs=self._question.logprobs or 0,
            top_p=sampling.top_p,
            truncation="disabled",
            usage=None if ending is None else self._usage(ending),
        )

    def _usage(self, ending: Ending) -> ResponseUsage:
        usage, n_prompt = ending.result.usage, self._answers.n_prompt
        return ResponseUsage(
            input_tokens=n_prompt,
            input_tokens_details=CachedDetails(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=n_prompt + usage.completion_tokens,
        )

    def _block_events(self, event: BlockEvent) -> Iterator[bytes]:
        """A block is an item, and all but calls have one part, which holds their text."""
        block, kind = event.block, _DELTAS[event.block.kind]
        at_item = {"item_id": self._item_id(block), "output_index": block.index}
        at_part = at_item if block.kind == "call" else {**at_item, "content_index": 0}
        at_output = {"output_index": block.index}
        if isinstance(event, BlockStart):
            item = self._item(block, "in_progress", empty=True).model_dump()
            yield self._event("response.output_item.added", {**at_output, "item": item})
            if block.kind != "call":
                part = {**at_part, "part": self._part(block).model_dump()}
                yield self._event("response.content_part.added", part)
        elif isinstance(event, BlockDelta):
            text = {"delta": event.text, **self._told(block, event.logprobs)}
            yield self._event(f"{kind}.delta", {**at_part, **text})
        else:
            is_call = block.kind == "call"
            text = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
            yield self._event(f"{kind}.done", {**at_part, **text, **self._told(block, block.logprobs)})
            if not is_call:
                part = {**at_part, "part": self._part(block).model_dump()}
                yield self._event("response.content_part.done", part)
            item = self._item(block, "incomplete" if block.is_cut else "completed").model_dump()
            yield self._event("response.output_item.done", {**at_output, "item": item})

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._mark}_{block.index}"

    def _item(self, block: Block, status: ItemStatus, *, empty: bool = False) -> OutputItem:
        """`empty`: without its part."""
        name = self._item_id(block)
        if block.kind == "call":
            return OutputCall(
                id=name,
                type="function_call",
                status=status,
                call_id=block.id,
                name=block.name,
                arguments=block.text,
            )
        part = self._part(block)
        if isinstance(part, OutputReasoningText):
            content = [] if empty else [part]
            return OutputReasoning(id=name, type="reasoning", status=status, summary=[], content=content)
        texts = [] if empty else [part]
        return OutputMessage(id=name, type="message", role="assistant", status=status, content=texts)

    def _part(self, block: Block) -> OutputText | OutputReasoningText:
        if block.kind == "reasoning":
            return OutputReasoningText(type="reasoning_text", text=block.text)
        logprobs = [token_body(self._engine, token) for token in block.logprobs]
        return OutputText(type="output_text", text=block.text, annotations=[], logprobs=logprobs)

    def _told(self, block: Block, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """What events of text have, and others have not."""
        if block.kind != "text":
            return {}
        return {"logprobs": [token_body(self._engine, token).model_dump() for token in logprobs]}

    def _state(self, state: str, response: ResponseObject) -> bytes:
        return self._event(f"response.{state}", {"response": response.model_dump()})

    def _event(self, kind: str, body: Mapping[str, Any]) -> bytes:
        self._n_events += 1
        whole = {"type": kind, "sequence_number": self._n_events - 1, **body}
        return data(json_bytes(whole), event=kind)


def _status(ending: Ending) -> Status:
    return "incomplete" if ending.reason == "length" else "completed"
