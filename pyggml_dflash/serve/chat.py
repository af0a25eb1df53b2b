"""POST /v1/chat/completions. Layer 8."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import WithJsonSchema

from pyggml_dflash.api import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    ParsedAnswer,
    ReasoningDelta,
    ToolCall,
)
from pyggml_dflash.openai.asks import Ask, chat_ask
from pyggml_dflash.openai.fields import CHAT
from pyggml_dflash.openai.values import check_items
from pyggml_dflash.requests import GenerationResult, TokenLogprob
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.bodies import JsonRoute, Object, json_bytes
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.openai_bodies import (
    CallBody,
    CallDelta,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    UsageBody,
    progress_body,
    timings_body,
    token_body,
    usage_body,
)
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.prompt_progress import PromptProgress
from pyggml_dflash.serve.questions import Question, chat_question, check_choices
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.sse import Gathered, data, reply

DONE: Final = b"data: [DONE]\n\n"

ChatBody = Annotated[Object, WithJsonSchema(dict(CHAT.schema))]


def chat_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses=answer_responses(ChatCompletion), tags=["OpenAI"])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        asked, questions = await service.asked(body, lambda: ask(service, body))

        def writer(answers: Answers) -> ChatWriter:
            return ChatWriter(service, answers, asked)

        return await reply(request, service, questions, writer, stream=asked.stream)

    return router


def ask(service: Service, body: Mapping[str, Any]) -> tuple[Ask, Sequence[Question]]:
    """What a request asks for. Renders and tokenizes: not for the event loop."""
    engine, options = service.engine, service.options
    asked = chat_ask(body, service.defaults)
    (request,) = asked.requests
    assert request.messages is not None
    service.check_model(asked.model)
    service.desk.check_room(1)
    check_items("messages", request.messages, options.max_messages)
    check_choices(asked.n, options.max_choices)
    return asked, chat_question(engine, request, asked.calls).times(asked.n)


class ChatWriter:
    """Writes chat completions, whole and as chunks."""

    def __init__(self, service: Service, answers: Answers, asked: Ask) -> None:
        self._engine, self._model = service.engine, service.model_name
        self._answers, self._asked = answers, asked
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._endings: list[Ending] = []

    def whole(self, gathered: Gathered) -> ChatCompletion:
        """The body of a request that is not streamed."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(i, parts, ending) for i, (parts, ending) in enumerate(gathered)],
            usage=self._usage([ending for _, ending in gathered]),
            timings=timings_body(gathered[0][1].result),
        )

    def begin(self) -> Iterator[bytes]:
        """A chunk for each answer, with its role."""
        for i in range(self._answers.n):
            yield self._chunk(i, ChatDelta(role="assistant", content=""))

    def read(self, index: int, progress: PromptProgress) -> Iterator[bytes]:
        """A chunk that adds nothing to the message, if reports are wanted."""
        if self._asked.return_progress:
            yield self._chunk(index, ChatDelta(), progress=progress)

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """The answer as it comes, then how it ended."""
        if isinstance(event, Ending):
            self._endings.append(event)
            yield self._chunk(index, ChatDelta(), ending=event)
        elif not isinstance(event.event, CallEnd) or event.logprobs:
            yield self._chunk(index, _delta(event.event), logprobs=event.logprobs)

    def end(self) -> Iterator[bytes]:
        """Counts, if they are wanted, and the word that OpenAI's streams end with."""
        if self._asked.include_usage:
            yield self._event([], usage=self._usage(self._endings))
        yield DONE

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """OpenAI's clients raise what an event with `error` says."""
        return [data(json_bytes(problem.openai))]

    def _choice(self, index: int, parts: Sequence[Part], ending: Ending) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(ParsedAnswer.gather(part.event for part in parts)),
            logprobs=self._logprobs(ending.result.logprobs),
            finish_reason=ending.reason,
        )

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        ending: Ending | None = None,
        progress: PromptProgress | None = None,
    ) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(logprobs),
            finish_reason=None if ending is None else ending.reason,
        )
        return self._event([choice], result=None if ending is None else ending.result, progress=progress)

    def _event(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: UsageBody | None = None,
        result: GenerationResult | None = None,
        progress: PromptProgress | None = None,
    ) -> bytes:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._asked.include_usage:  # null in all but the last
            chunk.usage = usage
        if result is not None:
            chunk.timings = timings_body(result)
        if progress is not None:
            chunk.prompt_progress = progress_body(progress)
        return data(chunk.json_bytes())

    def _usage(self, endings: list[Ending]) -> UsageBody:
        return usage_body(endings, self._answers.n_prompt)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not logprobs:
            return None
        return ChatLogprobs(content=[token_body(self._engine, token) for token in logprobs])


def _message(answer: ParsedAnswer) -> ChatAnswer:
    content = None if answer.calls and not answer.content else answer.content
    message = ChatAnswer(role="assistant", content=content, refusal=None)
    if answer.reasoning:
        message.reasoning_content = answer.reasoning
    if answer.calls:
        message.tool_calls = [_call(call) for call in answer.calls]
    return message


def _call(call: ToolCall) -> CallBody:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return CallBody(id=call.id, type="function", function=function)


def _delta(event: AnswerEvent) -> ChatDelta:
    """What an event adds to the message."""
    if isinstance(event, ReasoningDelta):
        return ChatDelta(reasoning_content=event.text)
    if isinstance(event, CallStart):
        function = FunctionDelta(name=event.name, arguments="")
        call = CallDelta(index=event.index, id=event.id, type="function", function=function)
        return ChatDelta(tool_calls=[call])
    if isinstance(event, CallArguments):
        arguments = FunctionDelta(arguments=event.text)
        return ChatDelta(tool_calls=[CallDelta(index=event.index, function=arguments)])
    if isinstance(event, CallEnd):
        return ChatDelta()
    return ChatDelta(content=event.text)
