"""States of plain bytes for a folder of files; run as a program it saves and evicts until it is killed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.state.disk_tier import DiskTier, Fill
from pyggml_dflash.state.fingerprint import Digest
from pyggml_dflash.state.snapshot import Contents
from pyggml_dflash.state.strips import Strip

MARK = bytes(range(16))
BIG_ROWS = 20_000  # of a state that takes most of its time to write
Bytes = NDArray[np.uint8]


@dataclass(eq=False)
class State:
    """Contents and the bytes of each strip."""

    contents: Contents
    strips: list[Bytes]
    closed: bool = False

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What led to it."""
        return self.contents.tokens

    @property
    def n_bytes(self) -> int:
        """Bytes of its strips."""
        return sum(len(data) for data in self.strips)

    def data(self, i: int) -> Bytes:
        """The bytes of strip `i`."""
        return self.strips[i]

    def close(self) -> None:
        """Nothing to free."""
        self.closed = True


def state(seed: int, n_past: int = 8, *, rows: int = 40, mark: Digest = MARK) -> State:
    """A state of which every number follows from the seed; one of its strips is empty."""
    rng = np.random.default_rng(seed)
    strips = (
        Strip(name="k", type=ElementType.Q8_0, shape=(32, rows)),
        Strip(name="pooled", type=ElementType.F32, shape=(8, 0)),
        Strip(name="memory", type=ElementType.F32, shape=(4, 4, 2)),
    )
    more = (Strip(name="ring", type=ElementType.F16, shape=(8, n_past)),)
    tokens = rng.integers(0, 100_000, n_past, dtype=np.int32)
    tokens[0] = seed
    contents = Contents(
        tokens=tokens, fingerprint=mark, strips=strips, companion="draft", companion_strips=more
    )
    noise = rng.integers(0, 256, 1021, dtype=np.uint8)
    data = [np.resize(np.roll(noise, i), strip.n_bytes) for i, strip in enumerate(contents.all_strips)]
    return State(contents, data)


def adopt(contents: Contents, fill: Fill) -> State:
    """A state as a file tells it."""
    data = [np.empty(strip.n_bytes, np.uint8) for strip in contents.all_strips]
    for i, target in enumerate(data):
        if len(target):
            fill(i, target)
    return State(contents, data)


def tier_in(
    folder: Path, *, budget: int = 2**30, mark: Digest = MARK, min_tokens: int = 1
) -> DiskTier[State]:
    """The folder as a tier."""
    return DiskTier(folder, adopt, fingerprint=mark, budget_bytes=budget, min_tokens=min_tokens)


def assert_same(found: State, expected: State) -> None:
    """The same tokens, strips and bytes."""
    assert found.tokens.tolist() == expected.tokens.tolist()
    a, b = found.contents, expected.contents
    assert (a.fingerprint, a.strips, a.companion, a.companion_strips) == (
        b.fingerprint, b.strips, b.companion, b.companion_strips,
    )  # fmt: skip
    for x, y in zip(found.strips, expected.strips, strict=True):
        np.testing.assert_array_equal(x, y)


def main(folder: Path, first: int, budget: int) -> None:
    """Save one state after the other, with a budget for a few; say when it has begun."""
    tier = tier_in(folder, budget=budget)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    seed = first
    while True:
        tier.save(state(seed, rows=BIG_ROWS))
        older = state(max(first, seed - 2), rows=BIG_ROWS)
        if tier.longest(older.tokens, 0):
            tier.load(older.tokens)
        seed += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
