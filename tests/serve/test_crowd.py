"""Many clients at once: every answer is the one that its request gets alone, and nothing piles up."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.engine.tiny import opened
from tests.serve.crowd import Crowd
from tests.serve.live import live, until
from tests.serve.test_command import serving

N_SLOTS: Final = 4


def is_idle(url: str) -> bool:
    """True if nothing runs and nothing waits."""
    report = httpx.get(f"{url}/slots").json()
    return report["queue"] == [] and {slot["state"] for slot in report["slots"]} == {"free"}


def test_a_crowd_gets_the_answers_that_each_would_get_alone() -> None:
    with opened(None, max_ctx=512, slots=N_SLOTS) as engine, live(engine, queue_limit=8) as server:
        crowd = Crowd(server.url)

        async def come() -> None:
            await crowd.ask_alone()
            await crowd.come(16, n_requests=3)

        asyncio.run(come())
        assert crowd.wrong == []
        assert crowd.answered.total() == 48
        assert set(crowd.statuses) <= {200, 429}
        assert crowd.statuses[429] > 0  # so the queue was full at times
        until(lambda: is_idle(server.url))
        stats = engine.stats()
        assert (stats.requests.failed, stats.step_failures) == (0, 0)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not given back to the system."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_clients_for_five_minutes() -> None:
    args = ("--slots", str(N_SLOTS), "--queue-limit", "64")
    with serving(*args, slots=N_SLOTS) as (process, url):
        crowd = Crowd(url)
        held = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(20)
                held.append(resident_bytes(process.pid))

        async def come() -> None:
            await crowd.ask_alone()
            watcher = asyncio.create_task(watch())
            await crowd.come(200, seconds=300)
            watcher.cancel()

        asyncio.run(come())
        until(lambda: is_idle(url))
        print(crowd.answered, crowd.statuses, [n >> 20 for n in held])  # noqa: T201
        assert crowd.wrong == []
        assert set(crowd.statuses) <= {200, 429}
        assert crowd.answered.total() > 1000
        assert min(crowd.answered[manner] for manner in ("whole", "stream", "slow", "leaves")) > 50
        assert max(held[3:]) < 1.05 * held[2]  # after a minute it has all that it will ever have
