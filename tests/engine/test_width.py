"""The width controller in a simulated world: what steps take and what drafts do is given, no clock is read.

Times are in plain steps, so a plain answer of n tokens takes about n, and "lost" is what is above that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from pyggml_dflash.engine.width import (
    MOST_DEBT,
    REFRESH,
    SPARE,
    WIDTHS,
    Acceptance,
    StepCosts,
    VerifyWidth,
)

# Plain steps that a step of some rows takes, drafting included: as measured on a GPU with a large model, and
# with the shipped model on one CPU core with its draft, with its MTP block, and where drafts cost nothing.
GPU = {w: 1.2 + 0.05 * w for w in range(2, 17)}
CPU_DRAFT = {2: 2.7, 3: 3.1, 4: 3.5, 6: 4.5, 8: 5.4}
CPU_MTP = {2: 1.65, 3: 2.3, 4: 2.95}
CPU_FREE = {2: 1.45, 3: 1.9, 4: 2.35, 6: 3.3, 8: 4.1}
ROW_BY_ROW = {w: 1.1 * w for w in range(2, 17)}

Chance = Callable[[int], float]  # of a draft to hold, by tokens answered so far


@dataclass
class World:
    """What steps take and what drafts do."""

    factors: Mapping[int, float]
    chance: float | Chance
    plain: Callable[[int], float] = lambda n_past: 1.0
    noise: float = 0.0  # steps take up to a few times this part longer
    hiccups: float = 0.0  # part of the steps that take 20 plain ones longer
    graphs: float = 0.0  # time to build what a width needs, once per 256 positions
    catch_up: float = 0.0  # time to show the drafter a plain step's row
    seed: int = 0
    time: float = 0.0
    plain_time: float = 0.0  # of the same tokens without drafts
    n_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self._built = {(w, 0) for w in (1, 2, 4, 8, 16)}
        self._behind = 0

    def measured(self, *widths: int) -> dict[int, float]:
        """Costs as they are measured when a model is loaded."""
        return {1: self.plain(0), **{w: self.factors[w] * self.plain(0) for w in widths}}

    def answer(self, control: VerifyWidth, n_tokens: int, *, n_prompt: int = 20, room: int = 16) -> None:
        """Let the control decode an answer."""
        control.begin()
        n_past, end = n_prompt, n_prompt + n_tokens
        room = min(room, max(self.factors))
        while n_past < end:
            width = control.choose(room, n_past)
            for _ in range(control.plain_steps(room, n_past) if width == 1 else 1):
                n_past += self._step(control, width, n_past, end)
                if n_past >= end:
                    return

    def _step(self, control: VerifyWidth, width: int, n_past: int, end: int) -> int:
        n_held = self._held(width)
        key = width, n_past // 256
        built = key not in self._built
        self._built.add(key)
        seconds = self.plain(n_past) * (1 if width == 1 else self.factors[width]) * self._slowness()
        seconds += 20 * self.plain(n_past) * (self.random.random() < self.hiccups)
        if built and width > 1:
            seconds += self.graphs
        extra = self.catch_up * self._behind if width > 1 else 0.0
        self._behind = 0 if width > 1 else self._behind + 1
        control.observe(width, n_held, seconds, n_past, built=built, extra_s=extra)
        n_new = min(1 + n_held, end - n_past)
        self.steps[width] += 1
        self.time += seconds + extra
        self.n_tokens += n_new
        usual = math.exp(0.8 * self.noise) + 20 * self.hiccups
        self.plain_time += (
            seconds if width == 1 else sum(usual * self.plain(n_past + i) for i in range(n_new))
        )
        return 1 + n_held

    def _held(self, width: int) -> int:
        chance = self.chance if isinstance(self.chance, float) else self.chance(self.n_tokens)
        n = 0
        while n < width - 1 and self.random.random() < chance:
            n += 1
        return n

    def _slowness(self) -> float:
        return math.exp(self.noise * abs(self.random.standard_normal()))

    @property
    def lost(self) -> float:
        """Time above plain decoding's, as a part of it."""
        return self.time / self.plain_time - 1

    @property
    def tokens_drafted(self) -> float:
        """Part of the steps that were no plain ones."""
        return 1 - self.steps[1] / self.steps.total()


def best_static(factors: Mapping[int, float], chance: float) -> float:
    """Time per token of the best fixed width, plain decoding included."""
    return min(1.0, *(f / sum(chance**i for i in range(w)) for w, f in factors.items()))


def run(world: World, *, n_answers: int = 10, n_tokens: int = 100, calibrated: bool = True) -> VerifyWidth:
    widest = min(max(world.factors), 16)
    known = world.measured(*(w for w in (2, 4, 8, 16) if w <= widest)) if calibrated else None
    control = VerifyWidth(widest, known)
    for _ in range(n_answers):
        world.answer(control, n_tokens)
    return control


WORLDS = pytest.mark.parametrize(
    "factors",
    [GPU, CPU_DRAFT, CPU_MTP, CPU_FREE, ROW_BY_ROW],
    ids=["gpu", "cpu draft", "cpu mtp", "cpu free", "row by row"],
)
CALIBRATED = pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "cold"])


# the bound


@WORLDS
@CALIBRATED
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_no_drafter_on_no_device_costs_more_than_a_twentieth(
    factors: Mapping[int, float], chance: float, calibrated: bool
) -> None:
    for seed in range(3):
        world = World(factors, chance, seed=seed)
        run(world, calibrated=calibrated)
        assert world.lost < 0.05


@WORLDS
def test_the_loss_of_one_answer_is_a_part_of_it_and_a_few_steps(factors: Mapping[int, float]) -> None:
    for seed in range(10):
        for n_tokens in (20, 100, 400):
            world = World(factors, 0.05, seed=seed)
            run(world, n_answers=1, n_tokens=n_tokens)
            few = MOST_DEBT + max(factors.values())
            assert world.time - world.plain_time < SPARE * n_tokens + few


@WORLDS
def test_what_one_request_learned_serves_the_next(factors: Mapping[int, float]) -> None:
    world = World(factors, 0.05)
    control = run(world, n_answers=1, n_tokens=20)
    tries = 20 - world.steps[1]
    for _ in range(10):
        world.answer(control, 20)
    assert 220 - world.steps[1] <= tries + 6


@WORLDS
def test_clocks_with_noise_and_graphs_to_build_change_little(factors: Mapping[int, float]) -> None:
    """Noise of a tenth, one step in a hundred 20 plain ones longer, graphs that take five to build."""
    lost = []
    for seed in range(8):
        world = World(factors, 0.05, noise=0.1, hiccups=0.01, graphs=5.0, catch_up=0.05, seed=seed)
        run(world)
        lost.append(world.lost)
    assert np.mean(lost) < 0.05


def test_verify_steps_that_cost_as_much_per_row_as_decoding_are_hardly_ever_taken() -> None:
    """No acceptance can make them pay, so a calibrated control does not even try."""
    world = World(ROW_BY_ROW, 0.97)
    run(world)
    assert world.tokens_drafted == 0
    cold = World(ROW_BY_ROW, 0.97)
    run(cold, calibrated=False)
    assert cold.tokens_drafted < 0.02


def test_a_hopeless_drafter_is_put_aside_within_a_few_steps_and_the_reason_told() -> None:
    world = World(CPU_FREE, 0.05)
    control = run(world, n_answers=1, n_tokens=40)
    assert world.steps.total() - world.steps[1] <= 4
    assert control.gave_up >= 1
    assert control.why_plain is not None
    assert control.why_plain.startswith("2 rows cost 1.4 plain steps and give 1.")


def test_tries_get_rarer_while_they_fail() -> None:
    world = World(GPU, 0.0)
    control = VerifyWidth(8, world.measured(2, 4, 8))
    tried = []
    for _ in range(4):
        before = world.steps.total() - world.steps[1]
        world.answer(control, 400)
        tried.append(world.steps.total() - world.steps[1] - before)
    assert tried[-1] <= tried[0]
    assert 1 <= tried[-1] <= 400 * SPARE


# the gain


@WORLDS
@CALIBRATED
@pytest.mark.parametrize("chance", [0.6, 0.85, 0.97])
def test_a_drafter_that_pays_is_used(factors: Mapping[int, float], chance: float, calibrated: bool) -> None:
    """Where a fixed width would save a quarter and more, most of that is saved."""
    best = best_static(factors, chance)
    if best > 0.75:
        return
    lost = []
    for seed in range(3):
        world = World(factors, chance, seed=seed)
        run(world, n_answers=30, calibrated=calibrated)
        lost.append(world.lost)
    assert np.mean(lost) < -0.7 * (1 - best)


def test_a_good_drafter_is_used_from_the_first_token_on() -> None:
    world = World(GPU, 0.85)
    run(world, n_answers=1, n_tokens=20)
    assert world.lost < -0.4


@pytest.mark.parametrize(("chance", "widths"), [(0.4, {3, 4}), (0.6, {4, 6}), (0.97, {16})])
def test_the_width_goes_where_tokens_per_second_are(chance: float, widths: set[int]) -> None:
    world = World(GPU, chance)
    run(world, n_answers=20)
    verify = sum(n for width, n in world.steps.items() if width > 1)
    assert sum(world.steps[width] for width in widths) > 0.75 * verify


def test_text_that_gets_hard_and_easy_again_is_followed() -> None:
    """Phases of 300 tokens: drafts hold nine times of ten, then one of five."""
    world = World(GPU, lambda n: 0.9 if n // 300 % 2 == 0 else 0.2)
    run(world, n_answers=1, n_tokens=12_000)
    assert world.lost < -0.12
    hard = World(GPU, lambda n: 0.9 if n < 2000 else 0.05)
    run(hard, n_answers=1, n_tokens=2000)
    at_turn = hard.time - hard.plain_time
    control = run(hard, n_answers=1, n_tokens=2000)
    assert control.gave_up
    assert hard.time - hard.plain_time - at_turn < 0.05 * 2000


def test_costs_that_grow_with_the_context_are_followed() -> None:
    """Attention makes both kinds of steps slower: nothing changes about which one pays."""
    world = World(GPU, 0.85, plain=lambda n: 1 + n / 2000)
    run(world, n_answers=1, n_tokens=16_000)
    assert world.lost < 0.9 * (best_static(GPU, 0.85) - 1)
    world = World(CPU_DRAFT, 0.85, plain=lambda n: 1 + n / 2000)
    run(world, n_answers=1, n_tokens=16_000)
    assert world.lost < 0.03


def test_a_device_that_gets_slower_for_wide_steps_is_noticed() -> None:
    factors = dict(GPU)
    world = World(factors, 0.7)
    control = run(world, n_answers=4)
    assert world.lost < -0.4
    before, n = world.time - world.plain_time, world.n_tokens
    factors.update({w: 1.1 * w for w in factors})
    for _ in range(20):
        world.answer(control, 100)
    assert world.time - world.plain_time - before < 0.05 * (world.n_tokens - n)
    assert world.steps[1] > 1500


@WORLDS
@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_costs_that_were_measured_wrongly_are_put_right(factors: Mapping[int, float], wrong: float) -> None:
    for chance in (0.05, 0.5, 0.9):
        world = World(factors, chance)
        widest = min(max(factors), 16)
        seconds = world.measured(*(w for w in (2, 4, 8, 16) if w <= widest))
        control = VerifyWidth(widest, {w: s * (wrong if w > 1 else 1) for w, s in seconds.items()})
        for _ in range(30):
            world.answer(control, 100)
        assert world.lost < 0.05
        if best_static(factors, chance) < 0.5:
            assert world.lost < -0.4


# its parts


def test_a_step_never_has_more_rows_than_there_is_room() -> None:
    control = VerifyWidth(16)
    for n_past, room in enumerate([1, 2, 3, 5, 7, 11, 16] * 40):
        width = control.choose(room, n_past)
        assert 1 <= width <= room
        assert width > 1 or control.plain_steps(room, n_past) >= 1
        control.observe(width, width - 1, 0.1, n_past)


def test_a_plain_step_is_taken_now_and_then_so_that_its_cost_stays_known() -> None:
    world = World(GPU, 0.97)
    run(world, n_answers=1, n_tokens=8000)
    verify = world.steps.total() - world.steps[1]
    assert verify / (REFRESH + 2) < world.steps[1] < verify / REFRESH + 16


@pytest.mark.parametrize("n_past", [0, 20, 255, 256, 700, 5000])
def test_plain_steps_are_asked_for_in_bursts_within_one_context(n_past: int) -> None:
    control = VerifyWidth(8, {1: 1.0, 8: 99.0})
    control.observe(1, 0, 1.0, n_past)
    assert control.choose(8, n_past) == 1
    n = control.plain_steps(8, n_past)
    assert 1 <= n <= 32
    control.observe(1, 0, 1.0, n_past + n - 1)
    assert n_past + n >= 256 * 20 or control.costs.knows_plain(n_past + n - 1)


def test_acceptance_is_expected_to_go_on_as_it_was() -> None:
    acceptance = Acceptance(7)
    assert acceptance.tokens(3, 0.5) == 1.75
    for _ in range(100):
        acceptance.observe(3, 3)
    assert acceptance.tokens(8, 0.5) > 6
    for _ in range(100):
        acceptance.observe(7, 0)
    assert acceptance.tokens(8, 0.5) < 1.6
    acceptance.forget()
    acceptance.observe(7, 7)
    assert acceptance.tokens(8, 0.5) > 1.3


def test_a_depth_that_was_not_reached_is_not_held_against_the_drafts() -> None:
    acceptance = Acceptance(2)
    for n_held in [0, 2] * 200:
        acceptance.observe(2, n_held)
    assert acceptance.tokens(3, 0.5) == pytest.approx(1 + 0.5 + 0.5, abs=0.15)


def test_costs_between_measured_widths_lie_between_them() -> None:
    costs = StepCosts({1: 2.0, 4: 4.0, 8: 8.0})
    assert [costs.factor(w) for w in (1, 2, 4, 6, 8)] == [1, pytest.approx(4 / 3), 2, 3, 4]
    assert costs.factor(16) == pytest.approx(4 + 8 * 3 / 7)
    assert StepCosts({}).factor(3) == pytest.approx(1.3)


def test_one_slow_step_changes_no_cost_and_many_do() -> None:
    costs = StepCosts({1: 1.0, 4: 2.0})
    for seconds in (2.0, 100.0, 2.0, 50.0, 2.0):
        costs.observe(4, seconds, 0)
    assert costs.factor(4) == pytest.approx(2.0)
    for _ in range(20):
        costs.observe(4, 3.0, 0)
    assert costs.factor(4) == pytest.approx(3.0, rel=0.02)


def test_widths_are_few() -> None:
    assert len(WIDTHS) <= 8
    for most in (2, 3, 7, 8, 16):
        control = VerifyWidth(most, {1: 1.0, **{w: 1.0 + w / 100 for w in range(2, 17)}})
        assert control.choose(100, 0) == most


def test_the_end_of_an_answer_is_not_held_against_the_drafts() -> None:
    control = VerifyWidth(8, {1: 1.0, 8: 2.0})
    for _ in range(30):
        assert control.choose(8, 0) > 4
        control.observe(8, 2, 2.0, 0, n_judged=2)
    assert control.gave_up == 0


def test_a_reason_for_plain_steps_never_says_that_drafts_pay() -> None:
    """Drafts that held before do not, at a cost above the mean: what is expected still looks good."""
    control = VerifyWidth(8, {1: 1.0, 8: 2.0})
    for _ in range(3):
        control.observe(8, 7, 2.0, 0)
    while control.choose(8, 0) == 8:
        control.observe(8, 0, 6.0, 0)
    assert control.why_plain == "drafts lost 5.0 plain steps that are not yet made up for"
    while control.choose(8, 0) == 1:
        control.observe(1, 0, 1.0, 0)
    assert control.why_plain is None


def together(control: VerifyWidth, *, n: int, factor: float, n_held: int, n_steps: int) -> Counter[int]:
    """Steps by width of `n` sequences, a verify step of which costs so many plain ones."""
    steps: Counter[int] = Counter()
    for i in range(n_steps):
        width = control.choose(4, 20)
        judged = [(width - 1, min(n_held, width - 1))] * n
        seconds, built = (factor if width > 1 else 1.0), steps[width] == 0
        control.observe_together(width, judged, seconds + 50 * built, 20 + i % 200, n=n, built=built)
        steps[width] += 1
    return steps


@pytest.mark.parametrize("n", [2, 4])
def test_sequences_draft_together_where_that_pays_and_graphs_of_the_first_step_are_no_debt(n: int) -> None:
    good = together(VerifyWidth(4), n=n, factor=2.0, n_held=3, n_steps=300)
    assert good[1] < 30
    bad = together(VerifyWidth(4), n=n, factor=2.0, n_held=0, n_steps=300)
    assert bad[1] > 270


def test_what_is_gained_together_is_a_mean_over_all_sequences() -> None:
    """One of four has drafts that hold: a step of two plain ones does not pay for the others."""
    one, all_four = VerifyWidth(4, {1: 1.0, 4: 2.0}), VerifyWidth(4, {1: 1.0, 4: 2.0})
    for _ in range(20):
        one.observe_together(4, [(3, 3)], 2.0, 0, n=4)
        all_four.observe_together(4, [(3, 3)] * 4, 2.0, 0, n=4)
    assert one.choose(4, 0) == 1
    assert all_four.choose(4, 0) == 4
