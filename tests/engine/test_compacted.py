"""A history that is compacted again and again leaves no memory behind: hardly anything of it is continued."""

from __future__ import annotations

import sys

import pytest

from tests.engine.apart import program

TURNS = """
import sys
from pathlib import Path
from tests.engine.tiny import QWEN35, opened, prompt

n_turns, n_tokens, limit_mib = map(int, sys.argv[1:])
START, END, LINE = 755, 756, 10

def turn(role, n, seed):
    return [START, role, LINE, *prompt(n, seed=seed), END, LINE]

def resident():
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))

limits = dict(prefix_cache_max_mib=limit_mib, prefix_cache_entries=63)
with opened(QWEN35, max_ctx=4096, chunk=128, cache_type_k="f32", cache_type_v="f32", **limits) as engine:
    most = held = 0
    sizes = []
    for i in range(n_turns):
        parts = [turn(1, 40, 1), turn(2, n_tokens // 2, 1000 + i), turn(3, n_tokens // 3, i), turn(2, 25, i)]
        engine.generate([*(token for part in parts for token in part), START, 3, LINE], max_tokens=4)
        most = max(most, engine.stats().snapshots.n_bytes)
        held = max(held, engine.memory()["CPU"].get("snapshots", 0))
        sizes.append(resident())
    stats = engine.stats().snapshots
print(most, held, stats.limit_bytes, stats.captured, stats.evicted, sum(stats.capture_failures.values()))
print(*sizes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
@pytest.mark.parametrize(
    ("n_turns", "n_tokens", "limit_mib"),
    [(60, 300, 2), pytest.param(300, 1800, 64, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_states_stay_within_their_limit_and_the_process_does_not_grow(
    n_turns: int, n_tokens: int, limit_mib: int
) -> None:
    """B06: once the limit is reached, every state takes the place of others."""
    done = program(TURNS, n_turns, n_tokens, limit_mib, deadline_s=3.0 * n_turns)
    assert done.returncode == 0, done.stderr
    counts, sizes = (list(map(int, line.split())) for line in done.stdout.splitlines())
    most, held, limit_bytes, n_captured, n_evicted, n_failed = counts
    assert max(most, held) <= limit_bytes == limit_mib * 2**20
    assert most > limit_bytes // 2
    assert (n_captured > n_turns, n_failed) == (True, 0)
    assert n_evicted > n_turns // 2
    full = sizes[n_turns // 2]
    assert max(sizes[n_turns // 2 :]) < 1.02 * full, [size // 2**10 for size in sizes]
