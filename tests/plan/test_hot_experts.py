"""Experts are copied by picks per byte within a budget; counts that are not the model's are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import UsageError
from pyggml_dflash.plan.hot_experts import RouteStats, choose_hot

PICKS = np.array([[9, 1, 0, 5], [2, 2, 8, 0]])


def stats() -> RouteStats:
    return RouteStats(PICKS, n_used=2, n_tokens=9)


def test_the_most_picked_are_copied_until_the_budget_is_used_up() -> None:
    plan = choose_hot(stats(), [10, 10], 35)
    assert plan.layers == ((0, 3), (2,))
    assert (plan.n_bytes, plan.n_copies) == (30, 3)
    assert plan.coverage == pytest.approx(22 / 27)


def test_a_smaller_expert_is_worth_more_and_may_still_fit() -> None:
    assert choose_hot(stats(), [10, 4], 14).layers == ((0,), (2,))
    assert choose_hot(stats(), [10, 4], 9).layers == ((), (0, 2))


def test_an_expert_that_was_never_picked_is_not_copied() -> None:
    plan = choose_hot(stats(), [1, 1], 1000)
    assert plan.layers == ((0, 1, 3), (0, 1, 2))
    assert plan.coverage == 1


def test_without_a_budget_nothing_is_copied() -> None:
    assert choose_hot(stats(), [1, 1], 0).n_copies == 0


def test_counts_come_back_from_a_file(tmp_path: Path) -> None:
    stats().write(tmp_path / "picks.csv")
    found = RouteStats.read(tmp_path / "picks.csv")
    np.testing.assert_array_equal(found.picks, PICKS)
    assert (found.n_used, found.n_tokens) == (2, 9)
    found.check(n_layer=2, n_expert=4, n_used=2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "must be what 'dflash route-stats' writes"),
        (["layer,expert,picks"], "must be what 'dflash route-stats' writes"),
        (["# n_layer=1 n_expert=1 n_used=1 tokens=1", "a,b,c"], "must be what 'dflash route-stats' writes"),
        (["# n_layer=1 n_expert=2 n_used=1 tokens=1", "layer,expert,picks", "0,0,1"], "has 1 lines"),
        (["# n_layer=1 n_expert=1 n_used=1 tokens=1", "layer,expert,picks", "0,0,1", "0,0,2"], "has 2 lines"),
        (
            ["# n_layer=1 n_expert=2 n_used=1 tokens=1", "layer,expert,picks", "0,0,1", "0,0,2"],
            "expert 1 of layer 0",
        ),
        (["# n_layer=999999 n_expert=999999 n_used=1 tokens=1", "layer,expert,picks"], "has 0 lines"),
        (["# n_layer=1 n_expert=1 n_used=1 tokens=1", "layer,expert,picks", "0,0,-1"], "line 3 is '0,0,-1'"),
        (["# n_layer=1 n_expert=1 n_used=1 tokens=1", "layer,expert,picks", "1,0,1"], "line 3 is '1,0,1'"),
    ],
)
def test_damaged_counts_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "picks.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=message):
        RouteStats.read(path)


def test_a_file_of_counts_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        RouteStats.read(tmp_path / "none.csv")


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 5, 2), (2, 4, 1)])
def test_counts_of_another_model_are_refused(shape: tuple[int, int, int]) -> None:
    n_layer, n_expert, n_used = shape
    with pytest.raises(UsageError, match="2 layers of 4 experts, 2 used; this model has"):
        stats().check(n_layer=n_layer, n_expert=n_expert, n_used=n_used)
