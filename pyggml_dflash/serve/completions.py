"""POST /v1/completions. Layer 8."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter, Request, Response

from pyggml_dflash.api import ContentDelta
from pyggml_dflash.requests import TokenLogprob
from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.bodies import json_bytes
from pyggml_dflash.serve.chat import DONE, wants_usage
from pyggml_dflash.serve.documents import answer_responses
from pyggml_dflash.serve.fields import check_count, stop_texts
from pyggml_dflash.serve.forms import held_to
from pyggml_dflash.serve.openai_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    finite,
    timings_body,
    usage_body,
)
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem
from pyggml_dflash.serve.questions import Question, check_choices
from pyggml_dflash.serve.service import Service, off_loop
from pyggml_dflash.serve.sse import Gathered, data, reply
from pyggml_dflash.serve.tool_fields import Offer


def completion_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions", responses=answer_responses(Completion), tags=["OpenAI"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        questions = await off_loop(lambda: ask(service, body))
        usage = wants_usage(body)

        def writer(answers: Answers) -> CompletionWriter:
            return CompletionWriter(service, answers, include_usage=usage)

        return await reply(request, service, questions, writer, stream=bool(body.stream))

    return router


def ask(service: Service, body: CompletionRequest) -> list[Question]:
    """The questions of a request, prompt by prompt. Tokenizes: not for the event loop."""
    options, engine = service.options, service.engine
    service.check_model(body.model)
    service.desk.check_room(1)
    prompts = prompts_of(body)
    check_count(prompts, options.max_messages, "prompt")
    check_choices((body.n or 1) * len(prompts), options.max_choices)
    constraint = held_to(engine, Offer(tools=None), **body.forms())
    questions: list[Question] = []
    for prompt in prompts:
        tokens = engine.tokenize(prompt) if isinstance(prompt, str) else prompt
        question = Question(
            tokens=tuple(tokens),
            max_tokens=options.default_max_tokens if body.max_tokens is None else body.max_tokens,
            sampling=body.sampling(options.sampling),
            stop=stop_texts(body.stop),
            logprobs=body.logprobs,
            spec=body.spec,
            ignore_eos=bool(body.ignore_eos),
            continues_text=True,
            constraint=constraint,
            cache_prompt=body.cache_prompt is not False,
        )
        questions += question.times(body.n or 1)
    return questions


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Texts or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class CompletionWriter:
    """Writes text completions, whole and as chunks."""

    def __init__(self, service: Service, answers: Answers, *, include_usage: bool) -> None:
        self._engine, self._model = service.engine, service.model_name
        self._answers, self._include_usage = answers, include_usage
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

    def write(self, index: int, event: Part | Ending) -> Iterator[bytes]:
        """Text as it comes, then how the answer ended."""
        if isinstance(event, Ending):
            self._endings.append(event)
            choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=event.reason)
        else:
            logprobs, text = self._logprobs(index, event.logprobs), _text_of(event)
            choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)
        body = self._body([choice])
        if self._include_usage:
            body.usage = None
        if isinstance(event, Ending):
            body.timings = timings_body(event.result)
        yield data(body.json_bytes())

    def end(self) -> Iterator[bytes]:
        """Counts, if they are wanted, and the word that OpenAI's streams end with."""
        if self._include_usage:
            body = self._body([])
            body.usage = usage_body(self._endings, self._answers.n_prompt)
            yield data(body.json_bytes())
        yield DONE

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """OpenAI's clients raise what an event with `error` says."""
        return [data(json_bytes(problem.openai))]

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
