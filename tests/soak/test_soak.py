"""Engines in a storm of requests, parks and faults: no wrong word, nothing stuck, nothing left behind.

`python -m tests.soak` is the long form, and watches memory too.
"""

from __future__ import annotations

from pathlib import Path

from tests.soak.asks import NAMES
from tests.soak.faults import KINDS
from tests.soak.storm import ALL, Plan, run

SEED = 20


def test_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = Plan(seed=SEED, least_s=5, most_s=120, n_asks=10, n_clients=4, fault_pause_s=0.2, deed_pause_s=0.4)
    report = run(tmp_path, plan)
    assert report.wrong == []
    assert tuple(report.counts) == NAMES
    assert all(report.faults[kind] for kind in KINDS)
    assert all(report.total[name] for name in ALL)
