"""What steps cost is measured when a model is loaded, within a limit and without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyggml_dflash.engine import step_costs
from pyggml_dflash.engine.step_costs import measure_steps
from tests.drafts.drafted import draft_file, open_target, with_draft, with_mtp
from tests.engine.tiny import LLAMA, opened
from tests.reference.stored import model_file


def test_a_plain_step_and_a_few_widths_are_measured_and_leave_no_trace(tmp_path: Path) -> None:
    with open_target(model_file("qwen35-tiny", "F32", tmp_path), mtp=True) as target:
        for drafting in (with_draft(target, draft_file("dflash-tiny", tmp_path)), with_mtp(target)):
            with drafting as drafted:

                def proposed() -> tuple[int, ...]:
                    drafted.begin()
                    drafted.feed(list(range(40)))
                    return drafted.propose(7).tokens

                before = proposed()
                seconds = measure_steps(drafted.forwards, drafted.drafter, target.slot, 8)
                assert set(seconds) == {1, 2, 4, 8}
                assert min(seconds.values()) > 0
                assert target.slot.n_past == 0
                assert proposed() == before


@pytest.mark.parametrize(("limit_s", "widths"), [(0.0, set()), (1e9, {1, 2, 4, 7})])
def test_measuring_has_a_limit(
    limit_s: float, widths: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "LIMIT_S", limit_s)
    path = model_file("qwen35-tiny", "F32", tmp_path)
    draft = draft_file("dflash-tiny", tmp_path)
    with open_target(path) as target, with_draft(target, draft) as drafted:
        seconds = measure_steps(drafted.forwards, drafted.drafter, target.slot, 7)
    assert set(seconds) == widths


@pytest.mark.parametrize("max_ctx", [1, 2, 5, 16, 17])
def test_drafting_works_in_the_shortest_contexts(max_ctx: int) -> None:
    with (
        opened(None, max_ctx=max_ctx, spec="auto") as engine,
        opened(None, max_ctx=max_ctx, spec="off") as plain,
    ):
        assert engine.info.spec == "dflash"
        expected = plain.generate([1], ignore_eos=True)
        assert engine.generate([1], ignore_eos=True).tokens == expected.tokens
        assert len(expected.tokens) == max_ctx
        if max_ctx > 2:
            fixed = engine.generate([1], ignore_eos=True, spec_width=8)
            assert fixed.tokens == expected.tokens


def test_an_engine_without_a_drafter_measures_nothing() -> None:
    with opened(LLAMA, max_ctx=64, spec="auto") as engine:
        assert engine._loaded.core._control is None


def test_a_width_that_is_given_is_not_measured() -> None:
    with opened(None, max_ctx=64, spec_width=4, spec="auto") as engine:
        assert engine._loaded.core._control.costs.table() == {1: 1.0}
    with opened(None, max_ctx=64, spec="auto") as engine:
        assert set(engine._loaded.core._control.costs.table()) >= {1, 2}
