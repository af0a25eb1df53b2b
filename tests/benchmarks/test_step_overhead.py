"""The measurement of Python per step finds the engine's graphs and measures both loops."""

from __future__ import annotations

from step_overhead import measure


def test_python_is_measured_in_a_step_and_in_a_token() -> None:
    spreads = measure(1)
    assert spreads.keys() == {"step", "token"}
    assert 0 < spreads["step"].median < spreads["token"].median
