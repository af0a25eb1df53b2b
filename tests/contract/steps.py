"""What every engine that carries out step plans keeps, as a class to inherit from; and the simplest one.

A subclass gives a fixture `engine` with three slots and granules of 16 rows, and may say which tokens exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytest

from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.step import (
    Admission,
    Granule,
    Phase,
    PlanError,
    StepPlan,
    StepReport,
    check_plan,
)
from pyggml_dflash.options import SamplingOptions
from pyggml_dflash.state.cuts import prompt_ends

N_SLOTS, GRANULE = 3, 16


class StepEngine(Protocol):
    """What a scheduler needs of an engine."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What each slot does."""

    def admit(self, admission: Admission) -> int | None:
        """Give the lowest free slot to a sequence; None while all are taken."""

    def step(self, plan: StepPlan) -> StepReport:
        """Carry out a plan."""

    def retire(self, id: int) -> None:
        """Free a slot, whatever it does."""


@dataclass(slots=True)
class _Sequence:
    admission: Admission
    n_past: int = 0
    n_answered: int = 0
    phase: Phase = "prefill"


class FakeEngine:
    """No model: a sequence's tokens are sums of its prompt."""

    def __init__(self, *, n_slots: int = N_SLOTS, granule: int = GRANULE, n_vocab: int = 64) -> None:
        self._slots: list[_Sequence | None] = [None] * n_slots
        self._granule, self._n_vocab = granule, n_vocab

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What each slot does."""
        return tuple("free" if s is None else s.phase for s in self._slots)

    def admit(self, admission: Admission) -> int | None:
        """Give the lowest free slot to a sequence."""
        if None not in self._slots:
            return None
        id = self._slots.index(None)
        self._slots[id] = _Sequence(admission)
        return id

    def step(self, plan: StepPlan) -> StepReport:
        """Carry out a plan."""
        check_plan(plan, self.phases)
        decoded = {id: [self._token(self._at(id))] for id in plan.decode}
        granules = {id: self._read(self._at(id)) for id in plan.prefill}
        going_on = {id for id in granules if self._at(id).phase == "prefill"}
        return StepReport(
            decoded=decoded,
            advanced={id: granules[id] for id in going_on},
            completed={id: granules[id] for id in granules if id not in going_on},
        )

    def retire(self, id: int) -> None:
        """Free a slot."""
        self._slots[id] = None

    def _at(self, id: int) -> _Sequence:
        sequence = self._slots[id]
        assert sequence is not None
        return sequence

    def _token(self, s: _Sequence) -> Chosen:
        s.n_answered += 1
        token = sum(s.admission.tokens) * s.n_answered % self._n_vocab
        return Chosen(token, np.eye(self._n_vocab, dtype=np.float32)[token])

    def _read(self, s: _Sequence) -> Granule:
        tokens = s.admission.tokens
        start, s.n_past = s.n_past, min(s.n_past + self._granule, len(tokens))
        if s.admission.sampler is None:
            s.phase = "done" if s.n_past == len(tokens) else "prefill"
            return Granule(n_past=s.n_past, rows=np.zeros((s.n_past - start, self._n_vocab), np.float32))
        if s.n_past < len(tokens):
            return Granule(n_past=s.n_past)
        s.phase = "decode"
        return Granule(n_past=s.n_past, first=self._token(s))


def planned(engine: StepEngine) -> StepPlan:
    """Everything that can go on, at once."""
    phases = enumerate(engine.phases)
    ids = [(id, phase) for id, phase in phases]
    return StepPlan(
        decode=tuple(id for id, phase in ids if phase == "decode"),
        prefill=tuple(id for id, phase in ids if phase == "prefill"),
    )


def tokens_of(report: StepReport, id: int) -> list[int]:
    """The tokens that a step gave a slot."""
    found = [chosen.token for chosen in report.decoded.get(id, ())]
    granule = report.completed.get(id)
    if granule is not None and granule.first is not None:
        found.append(granule.first.token)
    return found


def named(report: StepReport) -> list[int]:
    """The slots that a report answers."""
    parts: tuple[Mapping[int, object], ...] = (
        report.decoded,
        report.advanced,
        report.completed,
        report.failed,
    )
    return sorted((*(id for part in parts for id in part), *report.regaining))


class StepContract:
    """The tests; inherited by a class with a fixture `engine`."""

    n_vocab = 64

    def prompt(self, n: int, seed: int = 1) -> tuple[int, ...]:
        """`n` tokens."""
        return tuple((seed * 31 + 17 * i) % self.n_vocab for i in range(n))

    def asked(self, n: int, seed: int = 1, limit: int = 64) -> Admission:
        """A prompt of `n` tokens to be continued greedily."""
        tokens = self.prompt(n, seed)
        sampler = Sampler(SamplingOptions(), tokens, n_vocab=self.n_vocab)
        return Admission(tokens=tokens, sampler=sampler, limit=limit)

    def alone(self, engine: StepEngine, admission: Admission, n: int) -> list[int]:
        """The first `n` tokens of an answer that nothing else runs beside."""
        id = engine.admit(admission)
        assert id is not None
        found: list[int] = []
        while len(found) < n:
            found += tokens_of(engine.step(planned(engine)), id)
        engine.retire(id)
        return found[:n]

    def test_an_empty_step_succeeds(self, engine: StepEngine) -> None:
        assert named(engine.step(StepPlan())) == []
        engine.admit(self.asked(40))
        assert named(engine.step(StepPlan())) == []

    def test_the_lowest_free_slot_is_given_until_none_is_left(self, engine: StepEngine) -> None:
        assert [engine.admit(self.asked(5)) for _ in range(N_SLOTS + 2)] == [0, 1, 2, None, None]
        engine.retire(1)
        engine.retire(0)
        assert [engine.admit(self.asked(5)) for _ in range(3)] == [0, 1, None]

    def test_retiring_twice_or_a_free_slot_does_nothing(self, engine: StepEngine) -> None:
        assert engine.admit(self.asked(5)) == 0
        for _ in range(2):
            engine.retire(0)
            engine.retire(2)
        assert engine.phases == ("free",) * N_SLOTS
        assert len(self.alone(engine, self.asked(5), 3)) == 3

    @pytest.mark.parametrize("n", [1, GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE, 50])
    def test_a_prompt_advances_by_granules_and_completes_with_its_last_token(
        self, engine: StepEngine, n: int
    ) -> None:
        engine.admit(self.asked(n))
        for end in prompt_ends(n, (), GRANULE).all:
            assert engine.phases[0] == "prefill"
            report = engine.step(StepPlan(prefill=(0,)))
            granule = report.completed[0] if end == n else report.advanced[0]
            assert named(report) == [0]
            assert granule.n_past == end
            assert (granule.first is None) == (end < n)
            assert granule.rows is None
        assert engine.phases[0] == "decode"

    def test_every_planned_slot_is_answered_once(self, engine: StepEngine) -> None:
        for n in (5, 40, 20):
            engine.admit(self.asked(n, seed=n))
        n_tokens = [0, 0, 0]
        for _ in range(8):
            plan = planned(engine)
            report = engine.step(plan)
            assert named(report) == sorted((*plan.decode, *plan.prefill)) == [0, 1, 2]
            assert not report.failed
            assert all(run for run in report.decoded.values())
            for id in range(3):
                n_tokens[id] += len(tokens_of(report, id))
        assert min(n_tokens) > 0

    def test_prompts_that_complete_together_are_told_together(self, engine: StepEngine) -> None:
        for seed in range(3):
            engine.admit(self.asked(20, seed=seed))
        engine.step(planned(engine))
        assert sorted(engine.step(planned(engine)).completed) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("plan", "words"),
        [
            (StepPlan(prefill=(1,)), "leaves out slot 0, which decodes"),
            (StepPlan(), "leaves out slot 0, which decodes"),
            (StepPlan(prefill=(0,)), "prefill is planned for slot 0, which is decoding"),
            (StepPlan(decode=(0,), prefill=(0,)), "slot 0 is planned 2 times"),
            (StepPlan(decode=(0, 0)), "slot 0 is planned 2 times"),
            (StepPlan(decode=(0, 1)), "decode is planned for slot 1, which is at its prompt"),
            (StepPlan(decode=(0,), prefill=(1, 1)), "slot 1 is planned 2 times"),
            (StepPlan(decode=(0,), prefill=(2,)), "prefill is planned for slot 2, which is free"),
            (StepPlan(decode=(0, 2)), "decode is planned for slot 2, which is free"),
            (StepPlan(decode=(0, 3)), "slot 3 is planned; there are 3"),
            (StepPlan(decode=(0,), prefill=(-1,)), "slot -1 is planned; there are 3"),
        ],
    )
    def test_a_plan_that_does_not_suit_fails_as_a_whole(
        self, engine: StepEngine, plan: StepPlan, words: str
    ) -> None:
        alone = [self.alone(engine, self.asked(n, seed=n), 6) for n in (5, 40)]
        engine.admit(self.asked(5, seed=5))
        engine.admit(self.asked(40, seed=40))
        answers = [tokens_of(engine.step(StepPlan(prefill=(0,))), 0), []]
        with pytest.raises(PlanError, match=words):
            engine.step(plan)
        assert engine.phases == ("decode", "prefill", "free")
        report = engine.step(StepPlan(decode=(0,), prefill=(1,)))
        assert report.advanced[1].n_past == GRANULE
        while len(answers[1]) < 6:
            for id in (0, 1):
                answers[id] += tokens_of(report, id)
            report = engine.step(planned(engine))
        assert [answer[:6] for answer in answers] == alone

    def test_what_runs_beside_it_does_not_show_in_an_answer(self, engine: StepEngine) -> None:
        sizes = (5, 40, 20)
        alone = {n: self.alone(engine, self.asked(n, seed=n), 10) for n in sizes}
        for first in range(3):
            order = [*sizes[first:], *sizes[:first]]
            ids: dict[int, int] = {}
            answers: dict[int, list[int]] = {n: [] for n in sizes}
            while not ids or min(map(len, answers.values())) < 10:
                if len(ids) < 3:
                    n = order[len(ids)]
                    id = engine.admit(self.asked(n, seed=n))
                    assert id is not None
                    ids[n] = id
                report = engine.step(planned(engine))
                for n, id in ids.items():
                    answers[n] += tokens_of(report, id)
            assert {n: answers[n][:10] for n in sizes} == alone
            for id in ids.values():
                engine.retire(id)

    @pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 5])
    def test_a_slot_that_was_left_early_serves_the_next_as_a_new_one(
        self, engine: StepEngine, n_steps: int
    ) -> None:
        expected = self.alone(engine, self.asked(20, seed=7), 8)
        engine.admit(self.asked(40, seed=3))
        for _ in range(n_steps):
            engine.step(planned(engine))
        engine.retire(0)
        assert self.alone(engine, self.asked(20, seed=7), 8) == expected

    def test_the_others_go_on_when_one_leaves(self, engine: StepEngine) -> None:
        alone = self.alone(engine, self.asked(20, seed=2), 8)
        for seed in (1, 2, 3):
            engine.admit(self.asked(20, seed=seed))
        found: list[int] = []
        for i in range(10):
            if i in (1, 4):
                engine.retire(0 if i == 1 else 2)
            found += tokens_of(engine.step(planned(engine)), 1)
        assert found[:8] == alone

    def test_a_text_that_is_only_read_gives_a_row_per_token_and_no_more(self, engine: StepEngine) -> None:
        tokens = self.prompt(40)
        engine.admit(self.asked(5))
        assert engine.admit(Admission(tokens=tokens)) == 1
        rows: list[int] = []
        while engine.phases[1] == "prefill":
            report = engine.step(planned(engine))
            granule = {**report.advanced, **report.completed}[1]
            assert granule.first is None
            assert granule.rows is not None
            assert granule.rows.shape[1] == self.n_vocab
            rows.append(len(granule.rows))
        assert rows == [16, 16, 8]
        assert engine.phases[:2] == ("decode", "done")
        with pytest.raises(PlanError, match="decode is planned for slot 1, which is done"):
            engine.step(StepPlan(decode=(0, 1)))
        engine.retire(1)
        assert engine.admit(self.asked(5)) == 1
