"""Many requests through one engine: so many in flight that no slot waits for its next one. Layer 7.

The thread that iterates takes the items and hands them to threads, one to each request; these render,
tokenize and read. Knows nothing of files.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast

from pyggml_dflash.errors import Cancelled, EngineClosed, QueueFullError, UsageError
from pyggml_dflash.options import Auto, SamplingOptions, Spec, check_int, refusal
from pyggml_dflash.requests import Constraint, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from pyggml_dflash.api import Engine, TextStream

SPARE: Final = 2  # requests beyond the slots: a free slot finds its next one ready, tokens and all
WINDOW: Final = 1024  # results that may wait for one before them, so that a slow one does not fill the memory
# A signal that arrives just before a wait without a limit is seen only when the wait ends.
WAIT_S: Final = 0.25

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One request of a batch: a prompt to continue, as in `Engine.stream`, or messages to answer, as in
    `Engine.stream_chat`. Fields mean what they mean there.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # with messages
    reasoning: bool | None = None  # with messages
    reasoning_budget: int = -1  # with messages
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    spec: Spec | None = None
    spec_width: int | Auto | None = None
    cache_prompt: bool = True
    constraint: Constraint | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise UsageError("a request of a batch has either a prompt or messages")
        check_int("reasoning_budget", self.reasoning_budget, -1)
        templated = (self.tools, self.reasoning, self.reasoning_budget) != (None, None, -1)
        if self.messages is None and templated:
            raise UsageError("tools and reasoning go through the chat template: they need messages")
        GenerationRequest(  # refuses what is wrong with the rest
            tokens=(0,),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            logprobs=self.logprobs,
            spec=self.spec,
            spec_width=self.spec_width,
            cache_prompt=self.cache_prompt,
            constraint=self.constraint,
            ignore_eos=self.ignore_eos,
        )

    def submit(self, engine: Engine) -> TextStream:
        """Queue it; raises what the engine refuses."""
        if self.messages is not None:
            return engine.stream_chat(
                self.messages,
                tools=self.tools,
                reasoning=self.reasoning,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop=self.stop,
                logprobs=self.logprobs,
                spec=self.spec,
                spec_width=self.spec_width,
                cache_prompt=self.cache_prompt,
                ignore_eos=self.ignore_eos,
                constraint=self.constraint,
                reasoning_budget=self.reasoning_budget,
            )
        assert self.prompt is not None
        return engine.stream(
            self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            logprobs=self.logprobs,
            spec=self.spec,
            spec_width=self.spec_width,
            cache_prompt=self.cache_prompt,
            constraint=self.constraint,
            ignore_eos=self.ignore_eos,
        )


BatchItem: TypeAlias = "BatchRequest | str | Sequence[int] | Sequence[Mapping[str, Any]]"


def as_request(item: BatchItem) -> BatchRequest:
    """A text or token ids to continue, or the messages of a chat, as a request that asks for nothing else."""
    if isinstance(item, BatchRequest):
        return item
    if isinstance(item, Sequence) and item and all(isinstance(message, Mapping) for message in item):
        return BatchRequest(messages=cast("Sequence[Mapping[str, Any]]", item))
    return BatchRequest(prompt=cast("str | Sequence[int]", item))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What became of the `index`-th request: a result, or the error that it alone ended with."""

    index: int
    request: BatchItem = field(repr=False)
    answer: GenerationResult | None = None
    error: Exception | None = None

    @property
    def result(self) -> GenerationResult:
        """The whole answer; raises what the request raised."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


class Streams:
    """The streams that several threads read, so that one call cancels them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[TextStream] = set()
        self._cancelled = threading.Event()

    def answer(self, request: BatchRequest, engine: Engine) -> GenerationResult:
        """Submit a request and read its answer to the end; `Cancelled` if it was cut off there."""
        with self._submitted(request, engine) as stream:
            with self._lock:
                self._open.add(stream)
                if self._cancelled.is_set():
                    stream.cancel()
            try:
                result = stream.result
            finally:
                with self._lock:
                    self._open.discard(stream)
        if result.finish_reason == "cancelled":
            raise Cancelled("the batch was stopped")
        return result

    def cancel(self) -> None:
        """Stop every stream after its current step, also those that are still to come."""
        with self._lock:
            self._cancelled.set()
            for stream in self._open:
                stream.cancel()

    def _submitted(self, request: BatchRequest, engine: Engine) -> TextStream:
        """A stream, after a wait where others fill the engine's queue."""
        while True:
            try:
                return request.submit(engine)
            except QueueFullError:
                if self._cancelled.wait(WAIT_S / 10):
                    raise Cancelled("the batch was stopped") from None


class InFlight(Iterator[Value], Generic[Item, Value]):
    """`function` of every item, computed on `n` threads; in the order of the items, or as they get ready.

    Items are taken one by one while somebody iterates. An error of the items or of the function stops
    everything and is raised; a function that raises `Cancelled` after `cancel` has no value. Whoever stops
    iterating before the end calls `close`.
    """

    def __init__(
        self,
        function: Callable[[Item, Streams], Value],
        items: Iterable[Item],
        *,
        n: int,
        ordered: bool,
    ) -> None:
        self._function, self._items, self._n, self._ordered = function, iter(items), n, ordered
        self._streams = Streams()
        self._pool = ThreadPoolExecutor(n, thread_name_prefix="dflash-batch")
        self._ready: queue.SimpleQueue[tuple[int, Future[Value]]] = queue.SimpleQueue()
        self._values: dict[int, Value] = {}  # computed and not handed out
        self._n_taken, self._n_running, self._n_given = 0, 0, 0
        self._exhausted = self._cancelled = False

    def __iter__(self) -> InFlight[Item, Value]:
        return self

    def __next__(self) -> Value:
        try:
            while True:
                self._fill()
                index = self._n_given if self._ordered else next(iter(self._values), -1)
                if index in self._values:
                    self._n_given += 1
                    return self._values.pop(index)
                if not self._n_running:
                    raise StopIteration
                self._collect()
        except BaseException:  # the end is one as well
            self.close()
            raise

    @property
    def cancelled(self) -> bool:
        """True once somebody asked to stop."""
        return self._cancelled

    def cancel(self) -> None:
        """Take no more items, and stop what runs; values that are whole can still be read. Any thread."""
        self._cancelled = True
        self._streams.cancel()

    def close(self) -> None:
        """Cancel, and wait until every thread has let go; a second call does nothing."""
        self.cancel()
        self._pool.shutdown()

    def __enter__(self) -> InFlight[Item, Value]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_exhausted"):
            self.cancel()

    def _fill(self) -> None:
        """Hand out items up to `n`."""
        while (
            self._n_running < self._n
            and self._n_taken - self._n_given < self._n + WINDOW
            and not (self._exhausted or self._cancelled)
        ):
            try:
                item = next(self._items)
            except StopIteration:
                self._exhausted = True
                return
            index = self._n_taken
            future = self._pool.submit(self._function, item, self._streams)
            self._n_taken += 1
            self._n_running += 1
            future.add_done_callback(_hand_in(index, self._ready))

    def _collect(self) -> None:
        """Wait for one that runs."""
        while True:
            try:
                index, future = self._ready.get(timeout=WAIT_S)
                break
            except queue.Empty:
                continue
        self._n_running -= 1
        try:
            self._values[index] = future.result()
        except Cancelled:
            if not self._cancelled:
                raise


def _hand_in(
    index: int, ready: queue.SimpleQueue[tuple[int, Future[Value]]]
) -> Callable[[Future[Value]], None]:
    """A callback that holds the queue alone: what nobody iterates over any more can be collected."""
    return lambda future: ready.put((index, future))


class Batch(InFlight["tuple[int, BatchItem]", BatchResult]):
    """The results of a batch, made by `Engine.batch`: an iterator that is also a context manager."""

    def __init__(self, engine: Engine, requests: Iterable[BatchItem], *, ordered: bool) -> None:
        if isinstance(requests, (str, bytes, BatchRequest)) or not isinstance(requests, Iterable):
            raise refusal("requests", requests, "it must be an iterable of requests")

        def answer(numbered: tuple[int, BatchItem], streams: Streams) -> BatchResult:
            index, item = numbered
            try:
                found = streams.answer(as_request(item), engine)
            except (Cancelled, EngineClosed):
                raise
            except Exception as error:
                return BatchResult(index=index, request=item, error=error)
            return BatchResult(index=index, request=item, answer=found)

        super().__init__(answer, enumerate(requests), n=engine.options.slots + SPARE, ordered=ordered)
