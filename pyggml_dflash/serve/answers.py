"""The answers to one HTTP request, from the engine to whoever writes them. Layer 8.

One request may ask for several answers; their events come in one order through one queue. Whatever ends
the request early (the client is gone, the server stops, an answer fails) cancels all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeAlias

from pyggml_dflash.api import AsyncTextStream
from pyggml_dflash.errors import Cancelled
from pyggml_dflash.serve.desk import Ticket
from pyggml_dflash.serve.parts import Ending, Part, Reader
from pyggml_dflash.serve.prompt_progress import PromptProgress, Reporter
from pyggml_dflash.serve.questions import Question
from pyggml_dflash.serve.service import Service

Event: TypeAlias = "PromptProgress | Part | Ending"
Indexed: TypeAlias = "tuple[int, Event]"


class Answers:
    """Answers in progress, from `open` to `close`, which cancels what still runs."""

    def __init__(self, service: Service, questions: Sequence[Question], *, request_id: str) -> None:
        self._service, self._questions, self._request_id = service, questions, request_id
        self._events: asyncio.Queue[tuple[int, Event | Exception] | None] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def n(self) -> int:
        """How many answers there are."""
        return len(self._questions)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompts; those of one prompt with several answers count once."""
        return sum(len(tokens) for tokens in {id(q.tokens): q.tokens for q in self._questions}.values())

    @property
    def position(self) -> int:
        """The place in the queue of the first answer that waits; 0 if none does."""
        places = [self._service.desk.position(ticket) for ticket in self._tickets]
        return min((place for place in places if place), default=0)

    async def open(self) -> None:
        """Queue all of them; raises what the engine refuses, or that there are too many."""
        desk, engine, loop = self._service.desk, self._service.engine, asyncio.get_running_loop()
        desk.check_room(self.n)
        self._tickets = [desk.admit(self._request_id, len(q.tokens)) for q in self._questions]
        try:
            for i, question in enumerate(self._questions):
                stream = await question.submit(engine, Reporter(loop, partial(self._report, i)))
                self._tickets[i].stream = stream
                self._pumps.append(asyncio.create_task(self._pump(i, stream, question.reader(engine))))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel what runs; a second call does nothing."""
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        for ticket in self._tickets:
            self._service.desk.leave(ticket)

    async def events(self, patience_s: float | None = None) -> AsyncIterator[Indexed | None]:
        """Events with the index of their answer, up to the last ending; None after so long without one.

        Raises what an answer raised.
        """
        n_open = self.n
        while n_open:
            item = await self._next(patience_s)
            if item is None:
                yield None
                continue
            index, event = item
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Ending):
                n_open -= 1
                if event.result.finish_reason == "cancelled":
                    raise Cancelled("the engine stopped the answer")
            yield index, event

    def _report(self, index: int, progress: PromptProgress) -> None:
        """Take in how far the engine has read a prompt."""
        self._tickets[index].n_cached = progress.cache
        self._events.put_nowait((index, progress))

    async def _next(self, patience_s: float | None) -> tuple[int, Event | Exception] | None:
        """The next event; None after so long without one.

        `asyncio.wait_for` would lose a cancellation that comes together with an event, before Python 3.12.
        """
        if patience_s is None:
            return await self._events.get()
        timer = asyncio.get_running_loop().call_later(patience_s, self._events.put_nowait, None)
        try:
            return await self._events.get()
        finally:
            timer.cancel()

    async def _pump(self, index: int, stream: AsyncTextStream, reader: Reader) -> None:
        """From the engine's stream to events; leaves the desk when the answer is over."""
        metrics, put = self._service.metrics, self._events.put_nowait
        try:
            async for part in self._parts(self._tickets[index], stream, reader):
                put((index, part))
            ending = reader.ending(stream.result)
            self._service.count(ending.result)
            put((index, ending))
        except asyncio.CancelledError:
            metrics.on_cancel()
            raise
        except Exception as error:
            put((index, error))
        finally:
            stream.cancel()
            self._service.desk.leave(self._tickets[index])

    async def _parts(self, ticket: Ticket, stream: AsyncTextStream, reader: Reader) -> AsyncIterator[Part]:
        """What the reader makes of the stream; once nothing more is wanted, the engine is told to stop."""
        last_s = ticket.started_s
        async for piece in stream:
            if reader.is_over:
                continue
            now, n_tokens = time.monotonic(), len(piece.tokens)
            self._service.metrics.on_piece(now - last_s, n_tokens, first=not ticket.n_generated)
            ticket.n_generated += n_tokens
            last_s = now
            for part in reader.push(piece):
                yield part
            if reader.is_over:
                stream.cancel()
        if not reader.is_over:
            for part in reader.finish():
                yield part
