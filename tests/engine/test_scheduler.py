"""The queue is first come, first served; everybody who can goes on, and long prompts take turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.scheduler import Scheduler
from pyggml_dflash.engine.step import Admission, Phase, StepPlan, check_plan
from pyggml_dflash.options import SamplingOptions
from tests.contract.steps import FakeEngine, tokens_of

PHASES: tuple[Phase, ...] = ("free", "prefill", "decode", "done")
phases = st.lists(st.sampled_from(PHASES), min_size=1, max_size=8)


@given(phases)
def test_a_plan_suits_the_slots(found: list[Phase]) -> None:
    check_plan(Scheduler[int]().plan(found), found)


@given(phases)
def test_whoever_decodes_goes_on(found: list[Phase]) -> None:
    plan = Scheduler[int]().plan(found)
    assert plan.decode == tuple(id for id, phase in enumerate(found) if phase == "decode")


@given(phases)
def test_prompts_go_on_together_where_nobody_decodes_and_one_at_a_time_where_somebody_does(
    found: list[Phase],
) -> None:
    n = found.count("prefill")
    plan = Scheduler[int]().plan(found)
    assert len(plan.prefill) == (min(1, n) if "decode" in found else n)
    assert plan.is_empty == (not n and "decode" not in found)


@given(st.lists(st.booleans(), min_size=2, max_size=8).filter(any), st.integers(0, 5))
def test_prompts_take_turns_while_somebody_decodes(reading: list[bool], n_before: int) -> None:
    found: list[Phase] = ["decode", *("prefill" if x else "free" for x in reading)]
    scheduler = Scheduler[int]()
    for _ in range(n_before):
        scheduler.plan(found)
    n = found.count("prefill")
    turns = [scheduler.plan(found).prefill for _ in range(2 * n)]
    assert len(set(turns[:n])) == n
    assert turns[:n] == turns[n:]


def test_two_long_prompts_alternate_whoever_comes_and_goes() -> None:
    scheduler = Scheduler[int]()
    long: list[Phase] = ["prefill", "decode", "prefill", "free"]
    assert [scheduler.plan(long).prefill for _ in range(3)] == [(0,), (2,), (0,)]
    assert scheduler.plan([*long[:3], "prefill"]).prefill == (2,)
    assert scheduler.plan([*long[:3], "prefill"]).prefill == (3,)
    assert scheduler.plan(long).prefill == (0,)
    assert scheduler.plan(["prefill", "free", "prefill", "free"]).prefill == (0, 2)
    assert scheduler.plan(long).prefill == (2,)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@given(data=st.data())
def test_prompts_take_no_more_than_their_share_while_somebody_decodes(
    share: float, data: st.DataObject
) -> None:
    """But for one granule, which may be the first."""
    scheduler = Scheduler[int](share)
    both: list[Phase] = ["decode", "prefill"]
    costs = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), max_size=60))
    decode_s = prefill_s = most_s = 0.0
    for decode, prefill in costs:
        plan = scheduler.plan(both)
        assert plan.decode == (0,)
        assert bool(plan.prefill) != scheduler.postpones
        taken = prefill if plan.prefill else 0
        scheduler.spent(decode_s=decode, prefill_s=taken)
        decode_s, prefill_s, most_s = decode_s + decode, prefill_s + taken, max(most_s, taken)
        assert (1 - share) * (prefill_s - most_s) <= share * decode_s + 1e-6


def test_who_pays_a_granule_off_waits_for_the_next_and_saves_nothing_up() -> None:
    scheduler = Scheduler[int](0.5)
    both: list[Phase] = ["decode", "prefill"]
    for _ in range(50):  # nobody reads
        scheduler.plan(["decode"])
        scheduler.spent(decode_s=1, prefill_s=0)
    found = []
    for _ in range(12):
        n = len(scheduler.plan(both).prefill)
        scheduler.spent(decode_s=1, prefill_s=4 * n)
        found.append(n)
    assert found == [1, 0, 0, 0] * 3
    assert scheduler.plan(both).prefill == (1,)
    scheduler.spent(decode_s=1, prefill_s=400)
    scheduler.plan(["decode", "free"])  # the prompt has left its debt behind
    assert scheduler.plan(both).prefill == ()
    assert scheduler.plan(["free", "prefill", "prefill"]).prefill == (1, 2)  # nobody is owed anything
    assert scheduler.plan(both).prefill == (1,)


def test_those_that_share_the_forward_of_a_prompt_go_on_with_it_while_somebody_decodes() -> None:
    """And nobody waits longer for it: turns are of those that are asked for their company."""
    scheduler, asked = Scheduler[int](), list[int]()
    phases: list[Phase] = ["decode", "prefill", "prefill", "prefill"]

    def beside(id: int) -> tuple[int, ...]:
        asked.append(id)
        return {1: (3,), 2: (), 3: (1,)}[id]

    assert [scheduler.plan(phases, beside).prefill for _ in range(4)] == [(1, 3), (2,), (3, 1), (1, 3)]
    assert asked == [1, 2, 3, 1]
    assert scheduler.plan(["free", *phases[1:]], beside).prefill == (1, 2, 3)
    assert len(asked) == 4


def test_without_a_share_prompts_wait_until_nobody_decodes() -> None:
    scheduler = Scheduler[int](0)
    for _ in range(5):
        assert scheduler.plan(["decode", "prefill"]) == StepPlan(decode=(0,))
        scheduler.spent(decode_s=1, prefill_s=0)
    assert scheduler.plan(["free", "prefill"]) == StepPlan(prefill=(1,))


def test_an_empty_plan_is_for_slots_without_work() -> None:
    assert Scheduler[int]().plan(["free", "done"]) == StepPlan()
    assert Scheduler[int]().next() is None


def test_those_who_leave_the_queue_change_no_order() -> None:
    scheduler = Scheduler[int]()
    for i in range(8):
        scheduler.add(i)
    assert scheduler.remove(lambda i: i % 3 == 0) == [0, 3, 6]
    assert scheduler.remove(lambda i: i > 9) == []
    assert scheduler.waiting == (1, 2, 4, 5, 7)
    assert [scheduler.next() for _ in range(6)] == [1, 2, 4, 5, 7, None]
    assert scheduler.n_waiting == 0


class Served(RuleBasedStateMachine):
    """Any arrivals, cancellations and ends, in front of an engine without a model."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.scheduler = FakeEngine(n_slots=3, granule=4), Scheduler[int]()
        self.sizes: list[int] = []  # of every request that came
        self.started: list[int] = []
        self.left: set[int] = set()  # before they had a slot
        self.slots: dict[int, int] = {}  # slot -> request
        self.tokens: dict[int, list[int]] = {}

    @rule(n=st.integers(1, 20))
    def arrive(self, n: int) -> None:
        self.scheduler.add(len(self.sizes))
        self.sizes.append(n)

    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        if self.scheduler.waiting:
            gone = data.draw(st.sampled_from(self.scheduler.waiting))
            assert self.scheduler.remove(lambda i: i == gone) == [gone]
            self.left.add(gone)

    @rule(data=st.data())
    def leave_a_slot(self, data: st.DataObject) -> None:
        if self.slots:
            id = data.draw(st.sampled_from(sorted(self.slots)))
            self.engine.retire(id)
            del self.slots[id]

    @rule()
    def turn(self) -> None:
        while "free" in self.engine.phases and (first := self.scheduler.next()) is not None:
            free = [id for id, phase in enumerate(self.engine.phases) if phase == "free"]
            prompt = tuple(range(first, first + self.sizes[first]))
            sampler = Sampler(SamplingOptions(), prompt, n_vocab=10_000)
            id = self.engine.admit(Admission(tokens=prompt, sampler=sampler))
            assert id == free[0]
            self.slots[id], self.tokens[first] = first, []
            self.started.append(first)
        report = self.engine.step(self.scheduler.plan(self.engine.phases))
        for id, request in self.slots.items():
            self.tokens[request] += tokens_of(report, id)

    @invariant()
    def nobody_overtakes(self) -> None:
        came = [i for i in range(len(self.sizes)) if i not in self.left and i not in self.scheduler.waiting]
        assert self.started == came
        assert list(self.scheduler.waiting) == sorted(self.scheduler.waiting)

    @invariant()
    def no_slot_is_idle_while_somebody_waits_after_a_turn(self) -> None:
        """Whoever waits is taken in the next turn, if a slot is free."""
        assert set(self.engine.phases) <= {"free", "prefill", "decode"}
        assert len(self.slots) == sum(phase != "free" for phase in self.engine.phases)

    @invariant()
    def tokens_are_those_of_the_request(self) -> None:
        for request, tokens in self.tokens.items():
            total = sum(range(request, request + self.sizes[request]))
            assert tokens == [total * i % 64 for i in range(1, len(tokens) + 1)]


Served.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestServed = Served.TestCase


@pytest.mark.parametrize("n_others", [0, 1, 2])
def test_an_answer_waits_for_one_granule_per_token_at_most(n_others: int) -> None:
    engine, scheduler = FakeEngine(n_slots=4, granule=4), Scheduler[int]()
    sampler = Sampler(SamplingOptions(), (1,), n_vocab=64)
    engine.admit(Admission(tokens=(1,), sampler=sampler))
    for _ in range(n_others):
        engine.admit(Admission(tokens=tuple(range(100)), sampler=sampler))
    n_tokens = 0
    for _ in range(20):
        plan = scheduler.plan(engine.phases)
        assert not n_tokens or len(plan.prefill) <= 1
        n_tokens += len(tokens_of(engine.step(plan), 0))
    assert n_tokens == 20
