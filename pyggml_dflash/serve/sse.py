"""Answers as server-sent events or as one body; both end when the client is gone. Layer 8."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from pyggml_dflash.serve.answers import Answers
from pyggml_dflash.serve.bodies import ResponseBody, json_response
from pyggml_dflash.serve.guard import request_id
from pyggml_dflash.serve.parts import Ending, Part
from pyggml_dflash.serve.problems import Problem, problem_of
from pyggml_dflash.serve.prompt_progress import PromptProgress
from pyggml_dflash.serve.questions import Question
from pyggml_dflash.serve.service import Service

T = TypeVar("T")
Gathered: TypeAlias = "Sequence[tuple[Sequence[Part], Ending]]"  # of every answer


class Writer(Protocol):
    """How one protocol writes answers: as a body, or as events, each with the blank line behind it."""

    def whole(self, gathered: Gathered) -> ResponseBody:
        """The body of a request that is not streamed."""

    def begin(self) -> Iterable[bytes]:
        """What comes before the answer."""

    def read(self, index: int, progress: PromptProgress) -> Iterable[bytes]:
        """What a report on an answer's prompt becomes, beside the comment that has it too."""

    def write(self, index: int, event: Part | Ending) -> Iterable[bytes]:
        """What an event of an answer becomes; its ending is the last one."""

    def end(self) -> Iterable[bytes]:
        """What comes after all answers."""

    def fail(self, problem: Problem) -> Iterable[bytes]:
        """What a client is told when it goes wrong half-way."""


def data(body: bytes, *, event: str | None = None) -> bytes:
    """One event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + body + b"\n\n"


def comment(text: str) -> bytes:
    """What clients skip, and people at a terminal read."""
    return b": " + text.encode() + b"\n\n"


MakeWriter: TypeAlias = "Callable[[Answers], Writer]"


class EventStream(Response):
    """Sends answers while they come; closes them at the end, and when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, writer: Writer, *, patience_s: float) -> None:
        """`answers` are open; a comment is sent after every `patience_s` seconds of silence."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answers, self._writer, self._patience_s = answers, writer, patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream, or as much as the client takes."""
        try:
            await unless_gone(receive, self._send(send))
        finally:
            await self._answers.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def out(chunks: Iterable[bytes]) -> None:
            body = b"".join(chunks)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await out(self._writer.begin())
            if self._answers.position:
                await out([self._silence()])
            async for item in self._answers.events(self._patience_s):
                await out([self._silence()] if item is None else self._chunks(*item))
            await out(self._writer.end())
        except Exception as error:
            await out(self._writer.fail(problem_of(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunks(self, index: int, event: PromptProgress | Part | Ending) -> Iterable[bytes]:
        if isinstance(event, PromptProgress):
            said = comment(f"prefill {event.processed}/{event.total}")
            return [said, *self._writer.read(index, event)]
        return self._writer.write(index, event)

    def _silence(self) -> bytes:
        place = self._answers.position
        return comment(f"queued {place}" if place else "keep-alive")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The value of `work`; None, and `work` is cancelled, if the client goes before.

    The request's body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def gather(receive: Receive, answers: Answers) -> Gathered | None:
    """The parts and the ending of every answer; None if the client went before they were there."""

    async def collect() -> Gathered:
        parts: list[list[Part]] = [[] for _ in range(answers.n)]
        endings: dict[int, Ending] = {}
        async for item in answers.events():
            assert item is not None
            index, event = item
            if isinstance(event, Ending):
                endings[index] = event
            elif not isinstance(event, PromptProgress):
                parts[index].append(event)
        return [(parts[i], endings[i]) for i in range(answers.n)]

    return await unless_gone(receive, collect())


async def reply(
    request: Request, service: Service, questions: Sequence[Question], make: MakeWriter, *, stream: bool
) -> Response:
    """Answer questions in a protocol, as a stream or as one body."""
    answers = Answers(service, questions, request_id=request_id(request))
    writer = make(answers)
    await answers.open()
    if stream:
        return EventStream(answers, writer, patience_s=service.options.keep_alive_s)
    try:
        gathered = await gather(request.receive, answers)
    finally:
        await answers.close()
    return Response() if gathered is None else json_response(writer.whole(gathered))
