"""How many rows the next verify forward should have: measured costs against measured acceptance. Layer 6.

A step of w rows costs one draft and one target forward of w rows, and commits one token plus those
drafts that survive. The controller keeps both figures per width as running means and takes the
width with the most tokens per second; where plain steps are faster it lets them run for a burst
and then tries again.
"""

from __future__ import annotations

from typing import Final

WIDTHS: Final = (2, 3, 4, 6, 8, 12, 16)  # few, so that graphs are used again
BURST: Final = 16  # plain steps between two tries, doubled while tries keep failing
MAX_BURST: Final = 256
KEEP: Final = 0.8  # weight of the past in running means


class VerifyWidth:
    """Chooses between plain steps and verify widths up to `max_width`, from what it is told of each step."""

    def __init__(self, max_width: int) -> None:
        self._widths = [w for w in WIDTHS if w < max_width] + [max_width]
        self._cost_s: dict[int, float] = {}  # by rows, drafting included; 1: a plain step
        self._n_seen: dict[int, int] = {}  # by rows: the first step of a width also builds its graphs
        self._survival = [0.8**depth for depth in range(max_width)]  # that the first `depth` drafts all hold
        self._burst, self._plain_left = BURST, 0
        self.gave_up = 0  # times speculation was put aside

    def choose(self, room: int) -> int:
        """Rows of the next step, at most `room`; 1 is a plain one."""
        if room < 2:
            return 1
        if self._n_seen.get(1, 0) < 2:
            return 1
        if self._plain_left > 0:
            self._plain_left -= 1
            return 1
        fitting = [w for w in self._widths if w <= room] or [2]
        untried = [w for w in fitting if self._n_seen.get(w, 0) < 2]
        if untried:
            return untried[-1]
        best = max(fitting, key=self._rate)
        if self._rate(best) >= self._rate(1):
            self._burst = BURST
            return best
        self.gave_up += 1
        self._plain_left, self._burst = self._burst - 1, min(MAX_BURST, 2 * self._burst)
        self._n_seen[best] = 1  # tried again after the burst, and then measured anew
        return 1

    def observe(self, width: int, accepted: int, seconds: float) -> None:
        """A step of `width` rows took `seconds`; its first `accepted` drafts held."""
        n = self._n_seen[width] = self._n_seen.get(width, 0) + 1
        self._cost_s[width] = seconds if n <= 2 else KEEP * self._cost_s[width] + (1 - KEEP) * seconds
        for depth in range(1, width):
            held = 1.0 if accepted >= depth else 0.0
            self._survival[depth] = KEEP * self._survival[depth] + (1 - KEEP) * held

    def _rate(self, width: int) -> float:
        """Tokens per second to expect of steps of `width` rows."""
        return (1 + sum(self._survival[1:width])) / self._cost_s[width]
