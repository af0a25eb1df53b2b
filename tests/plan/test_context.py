"""The search for a context: the vectors of its definition, and what holds for whatever it is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.plan.chunk import ChunkPlan
from pyggml_dflash.plan.context import (
    ContextChoice,
    ContextFit,
    choose_context,
    shrink,
    step_for,
)

GIB: Final = 2**30
KIB: Final = 2**10
GB: Final = 10**9


def plan(n_ctx: int, available: int, required: int | None, position_bytes: int) -> ChunkPlan:
    return ChunkPlan(
        n_ctx=n_ctx, chunk=512, available=available, required=required, position_bytes=position_bytes
    )


# vectors


@pytest.mark.parametrize(
    ("n_ctx", "missing", "position_bytes", "expected"),
    [
        (262144, 10**10, 138400, 188416),
        (135168, 3 * 10**8, 138400, 131072),
        (262144, 1, 1000, 258048),
        (8192, 10**12, 1, 0),
        (4096, 1, 1, 0),
        (131072, 0, 0, 0),
    ],
)
def test_a_miss_shrinks_by_its_shortfall(
    n_ctx: int, missing: int, position_bytes: int, expected: int
) -> None:
    assert shrink(n_ctx, missing, position_bytes) == expected


@pytest.mark.parametrize(
    ("fits", "spare", "misses", "missing", "expected"),
    [
        (0, 0, 262144, 10**10, 188416),
        (0, 0, 4096, 10**9, 0),
        (262144, 0, 0, 0, 0),
        (122880, 10**9, 262144, 9 * 10**9, 135168),
        (122880, 0, 262144, 9 * 10**9, 126976),
        (122880, 5 * 10**9, 131072, 10**8, 126976),
        (131072, 0, 135168, 0, 0),
    ],
)
def test_the_next_context_lies_where_spare_and_missing_say(
    fits: int, spare: int, misses: int, missing: int, expected: int
) -> None:
    state = ContextFit(fits=fits, spare=spare, misses=misses, missing=missing, position_bytes=138400)
    assert state.next_ctx == expected


def test_a_miss_shrinks_by_its_shortfall_in_whole_steps() -> None:
    miss = plan(n_ctx=262_144, available=10 * GIB, required=12 * GIB, position_bytes=64 * KIB)
    assert ContextFit(step=4096).after(miss).next_ctx == 229_376


@dataclass(frozen=True)
class Card:
    """A device with `free` bytes beside the weights, and a model with a fixed appetite per slot."""

    free: int
    n_slots: int
    workspace: int = 1_200_000_000
    workspace_per_position: int = 6000
    snapshots: bool = False  # a full one per slot lives on the device
    n_unmeasurable: int = 0  # probes whose graphs cannot be measured

    ROW = 32_256
    DRAFT_ROW = 2048
    RECURRENT = 118_000_000

    def plan_at(self) -> Callable[[int], ChunkPlan]:
        """Plans as the planner would make them; the first slot is resident when it measures."""
        n_seen = 0

        def plan_at(n_ctx: int) -> ChunkPlan:
            nonlocal n_seen
            n_seen += 1
            first = n_ctx * (self.ROW + self.DRAFT_ROW) + self.RECURRENT
            others = (self.n_slots - 1) * (n_ctx * self.ROW + self.RECURRENT)
            snapshots = self.n_slots * (n_ctx * self.ROW + self.RECURRENT) if self.snapshots else 0
            available = self.free - first
            workspace = self.workspace + self.workspace_per_position * n_ctx
            headroom = max(0, available) // 10
            per_position = (self.n_slots * n_ctx * self.ROW + n_ctx * self.DRAFT_ROW) // n_ctx + 1
            required = others + workspace + headroom + snapshots
            unknown = n_seen <= self.n_unmeasurable
            return plan(n_ctx, available, None if unknown else required, per_position + snapshots // n_ctx)

        return plan_at


def searched(card: Card, n_ctx_train: int = 262144) -> ContextChoice:
    return choose_context(ContextFit.starting_at(n_ctx_train, n_ctx_train=n_ctx_train), card.plan_at())


@pytest.mark.parametrize(
    ("card", "trace", "answer"),
    [
        (
            Card(22 * GB, 4),
            [(262144, -16.894), (131072, 0.623), (135168, 0.076), (139264, -0.472)],
            135168,
        ),
        (Card(22 * GB, 1), [(262144, 8.828)], 262144),
        (Card(40 * GB, 4), [(262144, -0.694), (253952, 0.401), (258048, -0.146)], 253952),
        (
            Card(12 * GB, 4),
            [(262144, -25.894), (61440, 0.929), (65536, 0.381), (69632, -0.166)],
            65536,
        ),
        (
            Card(60 * GB, 4, snapshots=True),
            [(262144, -16.988), (196608, 0.226), (200704, -0.850)],
            196608,
        ),
        (
            Card(22 * GB, 4, n_unmeasurable=1),
            [(262144, -8.590), (196608, -8.135), (131072, 0.623), (135168, 0.076), (139264, -0.472)],
            135168,
        ),
        (Card(11 * GB, 1, workspace=11 * GB), [(262144, -10.872), (4096, -1.357)], None),
        (
            Card(12 * GB, 1, workspace=GB, workspace_per_position=60_000),
            [(262144, -14.128), (4096, 9.322), (106496, 0.016), (110592, -0.356)],
            106496,
        ),
        (
            Card(8 * GB, 1),
            [(262144, -3.883), (147456, 0.457), (155648, 0.154), (159744, 0.003), (163840, -0.148)],
            159744,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_search_takes_the_probes_of_its_definition(
    card: Card, trace: list[tuple[int, float]], answer: int | None
) -> None:
    choice = searched(card)
    assert [(p.n_ctx, round(p.balance / GB, 3)) for p in choice.trace] == trace
    assert (choice.plan.n_ctx if choice.plan else None) == answer


# properties


Demand = Callable[[int], "int | None"]


def probes(demand: Demand, available: int, trained: int, min_ctx: int = 0) -> tuple[ContextChoice, list[int]]:
    """A search over any demand; what a position is said to cost is the demand's own mean."""
    seen: list[int] = []

    def plan_at(n_ctx: int) -> ChunkPlan:
        seen.append(n_ctx)
        required = demand(n_ctx)
        return plan(n_ctx, available, required, max(1, (required or available) // n_ctx))

    fit = ContextFit.starting_at(trained, n_ctx_train=trained, min_ctx=min_ctx)
    return choose_context(fit, plan_at), seen


def grid(trained: int, min_ctx: int = 0) -> list[int]:
    """Every context that a search may choose."""
    step = step_for(trained)
    return [n for n in range(step, trained, step) if n >= min_ctx] + [trained]


def check_probes(seen: list[int], trained: int) -> None:
    step = step_for(trained)
    assert len(seen) == len(set(seen)) <= min(trained // step + 1, 24)
    assert seen[0] == trained
    for n_ctx in seen[1:]:
        assert n_ctx % step == 0
        assert step <= n_ctx < trained


def check_bracket(choice: ContextChoice) -> None:
    """Each probe lies strictly between the largest fit and the smallest miss before it."""
    fits, misses = 0, None
    for probe in choice.trace:
        assert fits < probe.n_ctx
        assert misses is None or probe.n_ctx < misses
        fits, misses = (probe.n_ctx, misses) if probe.fits else (fits, probe.n_ctx)
    assert (choice.plan.n_ctx if choice.plan else 0) == fits
    assert choice.plan is None or choice.plan.fits


def random_monotone(rng: random.Random) -> tuple[Demand, int, int]:
    """A demand that never falls: a line, a kink, stairs, a power; with the memory to meet it with."""
    trained = rng.choice([262144, 131072, 40960, 10000, 4096, 1024, 300, 200, rng.randrange(2, 262145)])
    fixed, slope = rng.randrange(1, 10**9), rng.randrange(1, 200_000)
    kind, knee = rng.randrange(4), rng.randrange(1, trained + 1)
    bend, stair = rng.randrange(1, 10**6), rng.randrange(1, trained + 1)
    power = rng.uniform(0.3, 2.5)
    shapes: list[Callable[[int], float]] = [
        lambda n: slope * n,
        lambda n: slope * n + bend * max(0, n - knee),
        lambda n: slope * stair * (n // stair),
        lambda n: slope * n**power,
    ]
    shape = shapes[kind]
    most = int(fixed + shape(trained))
    return (lambda n: int(fixed + shape(n))), rng.randrange(0, most + most // 10 + 1), trained


def check_monotone(rng: random.Random) -> None:
    demand, available, trained = random_monotone(rng)
    choice, seen = probes(demand, available, trained)
    check_probes(seen, trained)
    check_bracket(choice)
    best = max((n for n in grid(trained) if (demand(n) or 0) <= available), default=None)
    assert (choice.plan.n_ctx if choice.plan else None) == best
    again, _ = probes(demand, available, trained)
    assert again == choice
    more, _ = probes(demand, available + rng.randrange(1, 10**9), trained)
    assert choice.plan is None or (more.plan is not None and more.plan.n_ctx >= choice.plan.n_ctx)
    assert len(seen) <= 11


def check_adversary(rng: random.Random) -> None:
    """Answers without rhyme or reason, some of them unmeasurable."""
    trained = rng.choice([262144, 10000, 16384, 4096, 700, rng.randrange(2, 262144)])
    odds, unknown, size = rng.random(), rng.random() / 4, 10 ** rng.randrange(1, 12)

    def demand(n_ctx: int) -> int | None:
        if rng.random() < unknown:
            return None
        away = rng.randrange(size)
        return 10**12 - away if rng.random() < odds else 10**12 + 1 + away

    choice, seen = probes(demand, 10**12, trained, min_ctx=rng.choice([0, 0, 1000, trained]))
    check_probes(seen, trained)
    check_bracket(choice)
    assert len(seen) <= 11


@pytest.mark.parametrize("n_demands", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [check_monotone, check_adversary])
def test_whatever_the_demand_a_search_settles_within_eleven_probes(
    check: Callable[[random.Random], None], n_demands: int
) -> None:
    settings(max_examples=n_demands, deadline=None)(given(st.randoms(use_true_random=True))(check))()


@pytest.mark.parametrize("wall", [4096, 300_000, 1_000_000])
def test_a_million_tokens_take_a_probe_more_for_every_doubling(wall: int) -> None:
    choice, seen = probes(lambda n: 10**9 if n <= wall else 10**15, 10**9, 2**20)
    assert choice.plan is not None
    assert choice.plan.n_ctx == wall // 4096 * 4096
    assert len(seen) <= 13


@given(
    answers=st.lists(st.one_of(st.none(), st.integers(-(10**12), 10**12)), min_size=1, max_size=30),
    position_bytes=st.integers(0, 10**9),
    trained=st.integers(1, 400_000),
    min_ctx=st.integers(0, 500_000),
)
@settings(max_examples=300, deadline=None)
def test_any_sequence_of_answers_ends(
    answers: list[int | None], position_bytes: int, trained: int, min_ctx: int
) -> None:
    seen: list[int] = []

    def plan_at(n_ctx: int) -> ChunkPlan:
        answer = answers[len(seen) % len(answers)]
        seen.append(n_ctx)
        return plan(n_ctx, 0, answer, position_bytes)

    choice = choose_context(ContextFit.starting_at(trained, n_ctx_train=trained, min_ctx=min_ctx), plan_at)
    check_probes(seen, trained)
    check_bracket(choice)


@given(trained=st.integers(1, 300_000), slots=st.integers(1, 4), free=st.integers(10**9, 10**11))
@settings(max_examples=200, deadline=None)
def test_more_slots_never_fit_more(trained: int, slots: int, free: int) -> None:
    few = searched(Card(free, slots), trained).plan
    many = searched(Card(free, slots + 1), trained).plan
    assert (many.n_ctx if many else 0) <= (few.n_ctx if few else 0)


def test_what_cannot_be_measured_anywhere_fits_nowhere() -> None:
    choice, seen = probes(lambda _: None, 10**12, 262144)
    assert choice.plan is None
    assert choice.smallest_miss is not None
    assert choice.smallest_miss.n_ctx == seen[-1] == 4096


@pytest.mark.parametrize(("trained", "step"), [(262144, 4096), (16385, 4096), (16384, 256), (100, 256)])
def test_short_contexts_are_fitted_in_short_steps(trained: int, step: int) -> None:
    assert step_for(trained) == step


def test_an_odd_trained_context_is_taken_whole_or_in_whole_steps() -> None:
    for available, expected in ((10000, 10000), (9999, 9984), (9983, 9728)):
        choice, _ = probes(lambda n: n, available, 10000)
        assert choice.plan is not None
        assert choice.plan.n_ctx == expected


def test_nothing_below_the_smallest_useful_context_is_tried() -> None:
    choice, seen = probes(lambda n: 10**6 * n, 5000 * 10**6, 262144, min_ctx=6000)
    assert choice.plan is None
    assert min(seen) == 8192  # 6000 in whole steps
    choice, _ = probes(lambda n: 10**6 * n, 9000 * 10**6, 262144, min_ctx=6000)
    assert choice.plan is not None
    assert choice.plan.n_ctx == 8192


def test_a_demand_that_leaves_nothing_spare_is_halved_not_crawled() -> None:
    """A wall inside a flat demand: every interpolation lands on the last fit."""
    wall = 200_000
    choice, seen = probes(lambda n: 10**9 if n <= wall else 10**15, 10**9, 262144)
    assert choice.plan is not None
    assert choice.plan.n_ctx == wall // 4096 * 4096
    assert len(seen) <= 11
