"""Texts that are read and not continued: the logits of every row, or what they say of the text. Layer 6.

Such a text takes a slot like any request, waits for it like any request, and is read granule by granule
between the steps of others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import numpy as np

from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.sampling import logprobs_of
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.engine.step import Admission, Granule, Outcome
from pyggml_dflash.errors import Cancelled, EngineClosed
from pyggml_dflash.requests import RequestState, TokenLogprob

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reading(Protocol[T_co]):
    """What is made of a text's logits."""

    tokens: tuple[int, ...]

    def take(self, start: int, rows: Logits) -> None:
        """Logits F32 [n, n_vocab] of the tokens from `start` on, in order; the array is the taker's."""

    def value(self) -> T_co:
        """What came of it, after the last."""


class AllLogits:
    """Every row."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self._parts: list[Logits] = []

    def take(self, start: int, rows: Logits) -> None:
        """Keep them."""
        self._parts.append(rows)

    def value(self) -> Logits:
        """F32 [n_tokens, n_vocab]."""
        return np.concatenate(self._parts)


class Scores:
    """The log-probability of each token after the first; logits are not kept."""

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        """`top`: alternatives of each."""
        self.tokens, self._top = tuple(tokens), top
        self._found: list[TokenLogprob] = []

    def take(self, start: int, rows: Logits) -> None:
        """Look up the token that follows each row."""
        following = self.tokens[start + 1 : start + 1 + len(rows)]
        pairs = zip(rows, following, strict=False)  # nothing follows the last row
        self._found += [logprobs_of(row, token, self._top) for row, token in pairs]

    def value(self) -> tuple[TokenLogprob, ...]:
        """Of tokens[1:]."""
        return tuple(self._found)


class ForcedText(Generic[T]):
    """A text while it waits and while it is read; whoever asked waits for `future`."""

    id: int | None = None

    def __init__(self, reading: Reading[T]) -> None:
        self.future: Future[T] = Future()
        self.state = RequestState(phase="queued")
        self._reading = reading
        self._n_read = 0
        self._stop = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for it."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Stop after the current granule."""
        self._stop.set()

    def started(self, loaded: Loaded) -> ForcedText[T]:
        """Itself, as it has no other side."""
        return self

    @property
    def admission(self) -> Admission:
        """What it brings to its slot."""
        return Admission(tokens=self._reading.tokens)

    def begin(self, n_cached: int) -> None:
        """It has a slot, which is empty."""

    def read(self, granule: Granule) -> bool:
        """Take the rows of a granule; True if they were the last."""
        assert granule.rows is not None
        self._reading.take(self._n_read, granule.rows)
        self._n_read = granule.n_past
        return self._n_read == len(self._reading.tokens)

    def take(self, token: int, logits: Logits) -> bool:
        """Nothing is decoded."""
        raise AssertionError("a text that is only read has no tokens")

    def finish(self, seat: Seat | None) -> Outcome:
        """Hand out what came of it, or why it was not read to its end."""
        if self._n_read == len(self._reading.tokens):
            self.future.set_result(self._reading.value())
            return "done"
        self.fail(Cancelled("the call was cancelled") if self.cancelled else EngineClosed("Engine"))
        return "cancelled"

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits."""
        self.future.set_exception(error)
