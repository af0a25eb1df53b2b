"""POST /v1/completions. Layer 8."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import WithJsonSchema

from pyggml_dflash.api import ContentDelta
from pyggml_dflash.openai.asks import Ask, completion_ask
from pyggml_dflash.openai.fields import COMPLETION
from pyggml_dflash.openai.forms import held_to
from pyggml_dflash.openai.values import check_items
from pyggml_dflash.requests import TokenLogprob
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.bodies import JsonRoute, Object, json_bytes
from pyggml_dflash.serve.chat import DONE
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.openai_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    finite,
    progress_body,
    timings_body,
    usage_body,
)
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.prompt_progress import PromptProgress
from pyggml_dflash.serve.questions import Question, check_choices
from pyggml_dflash.serve.service import Service
from pyggml_dflash.serve.sse import Gathered, data, reply

CompletionBody = Annotated[Object, WithJsonSchema(dict(COMPLETION.schema))]


def completion_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=answer_responses(Completion), tags=["OpenAI"])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        asked, questions = await service.asked(body, lambda: ask(service, body))

        def writer(answers: Answers) -> CompletionWriter:
            return CompletionWriter(service, answers, asked)

        return await reply(request, service, questions, writer, stream=asked.stream)

    return router


def ask(service: Service, body: Mapping[str, Any]) -> tuple[Ask, list[Question]]:
    """What a request asks for, prompt by prompt. Tokenizes: not for the event loop."""
    options, engine = service.options, service.engine
    asked = completion_ask(body, service.defaults)
    service.check_model(asked.model)
    service.desk.check_room(1)
    check_items("prompt", asked.requests, options.max_messages)
    check_choices(asked.n * len(asked.requests), options.max_choices)
    constraint = held_to(engine, asked.calls, asked.requests[0].constraint)
    questions: list[Question] = []
    for request in asked.requests:
        assert request.prompt is not None
        tokens = engine.tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt
        questions += Question.of(request, tokens, constraint=constraint).times(asked.n)
    return asked, questions


class CompletionWriter:
    """Writes text completions, whole and as chunks."""

    def __init__(self, service: Service, answers: Answers, asked: Ask) -> None:
        self._engine, self._model = service.engine, service.model_name
        self._answers, self._asked = answers, asked
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._endings: list[Ending] = []
        self._offsets = [0] * answers.n  # characters of each answer that were sent

    def whole(self, gathered: Gathered) -> Completion:
        """The body of a request that is not streamed."""
        choices = [
            CompletionChoice(
                index=i,
                text="".join(map(_text_of, parts)),
                logprobs=self._logprobs(i, ending.result.logprobs),
                finish_reason=ending.reason,
            )
            for i, (parts, ending) in enumerate(gathered)
        ]
        body = self._body(choices)
        body.usage = usage_body([ending for _, ending in gathered], self._answers.n_prompt)
        body.timings = timings_body(gathered[0][1].result)
        return body

    def begin(self) -> Iterable[bytes]:
        """Nothing comes before the text."""
        return []

    def read(self, index: int, progress: PromptProgress) -> Iterator[bytes]:
        """A chunk without text, if reports are wanted."""
        if self._asked.return_progress:
            body = self._chunk(CompletionChoice(index=index, text="", logprobs=None, finish_reason=None))
            body.prompt_progress = progress_body(progress)
            yield data(body.json_bytes())

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """Text as it comes, then how the answer ended."""
        if isinstance(event, Ending):
            self._endings.append(event)
            choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=event.reason)
        else:
            logprobs, text = self._logprobs(index, event.logprobs), _text_of(event)
            choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)
        body = self._chunk(choice)
        if isinstance(event, Ending):
            body.timings = timings_body(event.result)
        yield data(body.json_bytes())

    def end(self) -> Iterator[bytes]:
        """Counts, if they are wanted, and the word that OpenAI's streams end with."""
        if self._asked.include_usage:
            body = self._body([])
            body.usage = usage_body(self._endings, self._answers.n_prompt)
            yield data(body.json_bytes())
        yield DONE

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """OpenAI's clients raise what an event with `error` says."""
        return [data(json_bytes(problem.openai))]

    def _chunk(self, choice: CompletionChoice) -> Completion:
        body = self._body([choice])
        if self._asked.include_usage:  # null in all but the last
            body.usage = None
        return body

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not logprobs:
            return None
        texts = [self._text(token.token) for token in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[finite(token.logprob) for token in logprobs],
            top_logprobs=[
                {self._text(other): finite(logprob) for other, logprob in token.top} for token in logprobs
            ],
            text_offset=offsets,
        )

    def _text(self, token: int) -> str:
        return self._engine.token_bytes(token).decode(errors="replace")


def _text_of(part: Part) -> str:
    assert isinstance(part.event, ContentDelta)  # nothing takes a text apart that is no answer
    return part.event.text
