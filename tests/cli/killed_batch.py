"""Runs a batch that is killed again and again, and says what is wrong with the file it leaves in the end."""

from __future__ import annotations

import json
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.dflash_command import COMMAND, LIMIT_S, dflash

BAD = (
    "garbage",
    "",
    '{"prompt": 5}',
    '{"messages": []}',
    '{"prompt": "a", "frobnicate": 1}',
    '{"prompt": "a", "temperature": "hot"}',
    '{"method": "GET", "url": "/v1/chat/completions", "body": {}}',
    '{"prompt": "' + "x " * 20_000 + '"}',
    '{"custom_id": "first", "prompt": "a"}',
    '{"prompt": "\udcff"}',  # one byte that is no UTF-8
)
SPREAD_S = 0.1  # five times what lies between two records of these lines on a busy machine


@dataclass(frozen=True)
class Kill:
    """One run that was killed: how many whole records it added, and what was behind them."""

    n_added: int
    n_torn_bytes: int


def write_lines(path: Path, n: int, *, seed: int) -> set[int]:
    """An input of `n` lines, a twentieth of them bad; the numbers of these."""
    chosen = random.Random(seed)
    bad = set(chosen.sample(range(2, n + 1), n // 20))
    kinds = [chosen.choice(BAD) for _ in range(n + 1)]
    lines = ['{"custom_id": "first", "prompt": "Tell me a story.", "max_tokens": 3}']
    for i in range(2, n + 1):
        good = {"prompt": f"Tell me a story about {i} foxes.", "max_tokens": 2 + i % 5}
        lines.append(kinds[i] if i in bad else json.dumps(good))
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape") + b"\n")
    return bad


def kill_and_resume(source: Path, target: Path, *flags: str, n_kills: int, seed: str) -> list[Kill]:
    """Start, kill at a random moment and start again, and let the last run end; its exit code is 5.

    Every run that is killed has written a random number of records before, and then goes on for a time that
    several records take: a kill finds it anywhere between two of them, in a write and in a flush.
    """
    chosen, kills = random.Random(seed), []
    command = [*COMMAND, "batch", str(source), "-o", str(target), "--resume", "--quiet", *flags]
    n_lines, n_there = len(source.read_bytes().splitlines()), 0
    for i in range(n_kills):
        most = (n_lines - n_there) // (n_kills - i + 1)  # what the runs to come share evenly
        process = subprocess.Popen(command)
        _wait_for(target, n_there + chosen.randint(1, max(1, most)), process)
        time.sleep(chosen.uniform(0, SPREAD_S))
        process.kill()
        assert process.wait(LIMIT_S) == -9, "the batch ended before it was killed"
        data = target.read_bytes()
        kills.append(Kill(data.count(b"\n") - n_there, len(data) - data.rfind(b"\n") - 1))
        n_there = data.count(b"\n")
    done = dflash(*command[len(COMMAND) :])
    assert done.code == 5, done.err
    return kills


def _wait_for(target: Path, n_records: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not target.exists() or target.read_bytes().count(b"\n") < n_records:
        assert process.poll() is None, "the batch ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, each of them whole."""
    return [json.loads(line) for line in path.read_bytes().decode("ascii").splitlines()]


def told(record: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same of a record, however often its batch was killed."""
    body = record["response"]["body"]
    told = (body.get("choices"), body.get("usage"), body.get("error"))
    return (record["id"], record["custom_id"], record["response"]["status_code"], record["error"], *told)
