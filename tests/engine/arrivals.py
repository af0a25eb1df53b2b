"""Requests that arrive at chosen turns, and what a caller sees of their answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.serving import Serving
from pyggml_dflash.options import SamplingOptions
from pyggml_dflash.requests import GenerationRequest, GenerationResult
from tests.engine.served import Reader, answered
from tests.engine.tiny import prompt

Turns = tuple[int, ...]

# Turns at which the requests of an order arrive: together, one by one, and when the first are over.
ARRIVALS: Final[tuple[Turns, ...]] = ((0, 0, 0, 0), (0, 2, 5, 9), (0, 0, 14, 14), (0, 1, 30, 31))
KINDS: Final = (
    {},
    {"temperature": 0.9, "seed": 4, "top_k": 40},
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
)


def short_and_long(
    n_tokens: int = 12, *, lengths: Sequence[int] = (9, 40, 170, 33)
) -> list[GenerationRequest]:
    """Short prompts, a long one, penalties and a seed."""
    return [
        GenerationRequest(
            tokens=tuple(prompt(n, seed=n)),
            max_tokens=n_tokens + i % 4,
            sampling=SamplingOptions(**KINDS[i % 4]),  # type: ignore[arg-type]
            ignore_eos=True,
            logprobs=2,
        )
        for i, n in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the turn before which it comes."""

    turn: int
    reader: Reader


def serve(loaded: Loaded, arrivals: Sequence[Arrival], *, most_turns: int = 10_000) -> Serving:
    """Answer them, one step per turn."""
    serving = Serving(loaded, lambda: True)
    for turn in range(most_turns):
        for arrival in arrivals:
            if arrival.turn == turn:
                serving.add(arrival.reader)
        if turn > max(arrival.turn for arrival in arrivals) and serving.is_idle:
            return serving
        serving.turn()
    raise AssertionError("never over")


def seen(result: GenerationResult) -> Mapping[str, object]:
    """What a caller sees of an answer, but for how it came about."""
    names = ("tokens", "text", "finish_reason", "stop", "seed", "logprobs")
    usage = replace(result.usage, cached_tokens=0)
    return {"usage": usage, **{name: getattr(result, name) for name in names}}


def every_order(*, every_time: bool) -> Iterator[tuple[tuple[int, ...], Turns]]:
    """Four requests in every order of arrival, at every set of times or at each in turn."""
    for i, order in enumerate(itertools.permutations(range(4))):
        for turns in ARRIVALS if every_time else (ARRIVALS[i % len(ARRIVALS)],):
            yield order, turns


def assert_alone_is_together(
    loaded: Loaded,
    requests: Sequence[GenerationRequest],
    orders: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> None:
    """Each request gets, in any order and at any times, what it gets alone."""
    alone = [seen(answered(loaded, request)) for request in requests]
    assert len({str(answer) for answer in alone}) == len(requests)
    for order, turns in orders:
        readers = [Reader(request) for request in requests]
        serve(loaded, [Arrival(turn, readers[k]) for k, turn in zip(order, turns, strict=True)])
        assert [seen(reader.result()) for reader in readers] == alone, (order, turns)
