"""An answer while it is generated, as callers in threads and in event loops read it. Layer 7."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from pyggml_dflash.engine.handle import RequestHandle
from pyggml_dflash.requests import GenerationResult, RequestState, TextPiece


class _Answer:
    """What both kinds of streams tell of their request, and how they stop it."""

    def __init__(self, handle: RequestHandle, engine: object) -> None:
        self._handle = handle
        self._engine = engine  # kept open as long as somebody reads

    @property
    def state(self) -> RequestState:
        """Where the request stands: in the queue and where, at its prompt, answering, or over."""
        return self._handle.state

    @property
    def request_id(self) -> int:
        """The number of the request in this engine, counted from 1."""
        assert self._handle.id is not None
        return self._handle.id

    def cancel(self) -> None:
        """Ask the engine to stop after the current step; pieces already made can still be read."""
        self._handle.cancel()

    def __del__(self) -> None:
        self._handle.cancel()


class TextStream(_Answer, Iterator[TextPiece]):
    """An answer while it is generated: iterate over pieces, then read `result`.

    Leaving the loop early, or the `with` block, cancels the request; what was generated until then is
    in `result`.
    """

    def __next__(self) -> TextPiece:
        piece = self._handle.next_piece()
        if piece is None:
            raise StopIteration
        return piece

    @property
    def result(self) -> GenerationResult:
        """The whole answer; waits for its end. Raises what the request raised."""
        return self._handle.result()

    def close(self) -> None:
        """Cancel, and wait until the engine has let go of the request; in a callback, only cancel."""
        self._handle.cancel()
        if not self._handle.is_own_callback:
            self._handle.wait()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncTextStream(_Answer, AsyncIterator[TextPiece]):
    """`TextStream` for asyncio: iterate over pieces in the event loop that submitted, then read `result`.

    Who stops reading calls `cancel`.
    """

    async def __anext__(self) -> TextPiece:
        piece = await self._handle.next_piece_async()
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def result(self) -> GenerationResult:
        """The whole answer, once the pieces have been read. Raises what the request raised."""
        return self._handle.result()
