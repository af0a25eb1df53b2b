"""Which experts are worth a copy on the target: counts of how often each was picked, and a budget. Layer 3.

Counts are a CSV file that `dflash route-stats` writes: a comment with the model's numbers, a header, and a
line per layer and expert.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import UsageError

COLUMNS: Final = ("layer", "expert", "picks")
NUMBERS: Final = re.compile(
    r"# n_layer=([0-9]{1,6}) n_expert=([0-9]{1,6}) n_used=([0-9]{1,6}) tokens=([0-9]{1,15})"
)
Picks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RouteStats:
    """How often each expert of each layer was picked: int64 [n_layer, n_expert], over `n_tokens` tokens."""

    picks: Picks
    n_used: int
    n_tokens: int

    def write(self, path: Path) -> None:
        """Store the counts."""
        n_layer, n_expert = self.picks.shape
        with path.open("w", newline="", encoding="utf-8") as file:
            numbers = f"n_layer={n_layer} n_expert={n_expert} n_used={self.n_used} tokens={self.n_tokens}"
            file.write(f"# {numbers}\n")
            out = csv.writer(file, lineterminator="\n")
            out.writerow(COLUMNS)
            out.writerows((i, e, int(n)) for (i, e), n in np.ndenumerate(self.picks))

    @classmethod
    def read(cls, path: Path) -> RouteStats:
        """Counts from a file; anything but what `write` makes raises `UsageError`."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"expert_placement is {str(path)!r}, which cannot be read: {error}") from error
        numbers = NUMBERS.fullmatch(lines[0]) if lines else None
        if numbers is None or len(lines) < 2 or lines[1] != ",".join(COLUMNS):
            raise UsageError(
                f"expert_placement is {str(path)!r}; it must be what 'dflash route-stats' writes"
            )
        n_layer, n_expert, n_used, n_tokens = map(int, numbers.groups())
        if len(lines) - 2 != n_layer * n_expert:
            raise UsageError(
                f"{path} has {len(lines) - 2} lines of counts; {n_layer} layers of {n_expert} experts "
                f"have {n_layer * n_expert}"
            )
        picks = np.full((n_layer, n_expert), -1, np.int64)
        for number, line in enumerate(lines[2:], 3):
            row = re.fullmatch(r"([0-9]{1,6}),([0-9]{1,6}),([0-9]{1,15})", line)
            if row is None or int(row[1]) >= n_layer or int(row[2]) >= n_expert:
                raise UsageError(f"{path}: line {number} is {line[:40]!r}; it must be layer,expert,picks")
            picks[int(row[1]), int(row[2])] = int(row[3])
        if (picks < 0).any():
            layer, expert = np.argwhere(picks < 0)[0]
            raise UsageError(f"{path}: expert {expert} of layer {layer} is missing")
        return cls(picks, n_used, n_tokens)

    def check(self, *, n_layer: int, n_expert: int, n_used: int) -> None:
        """Raise `UsageError` for counts of another model."""
        has, wanted = (*self.picks.shape, self.n_used), (n_layer, n_expert, n_used)
        if has != wanted:
            raise UsageError(
                "expert_placement was recorded with {} layers of {} experts, {} used; ".format(*has)
                + "this model has {} of {}, {} used".format(*wanted)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPlan:
    """The experts that are copied, per layer ascending; their bytes; part of the picks they cover."""

    layers: tuple[tuple[int, ...], ...]
    n_bytes: int
    coverage: float

    @property
    def n_copies(self) -> int:
        """Experts copied in all."""
        return sum(map(len, self.layers))


def choose_hot(stats: RouteStats, expert_bytes: Sequence[int], budget: int) -> HotPlan:
    """The experts with the most picks per byte, until the budget is used up.

    `expert_bytes`: by layer, bytes of one expert. Experts that were never picked are not copied.
    """
    worth = stats.picks / np.maximum(1, np.array(expert_bytes, np.float64))[:, None]
    n_expert, left = stats.picks.shape[1], budget
    chosen: list[list[int]] = [[] for _ in expert_bytes]
    for place in np.argsort(-worth, axis=None, kind="stable").tolist():
        layer, expert = divmod(place, n_expert)
        if stats.picks[layer, expert] == 0:
            break
        if expert_bytes[layer] <= left:
            left -= expert_bytes[layer]
            chosen[layer].append(expert)
    covered = sum(int(stats.picks[i, experts].sum()) for i, experts in enumerate(chosen))
    return HotPlan(
        layers=tuple(tuple(sorted(experts)) for experts in chosen),
        n_bytes=budget - left,
        coverage=covered / max(1, int(stats.picks.sum())),
    )
