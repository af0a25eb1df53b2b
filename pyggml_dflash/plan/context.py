"""The search for the largest context that fits: each probe's answer chooses the next one. Layer 3.

A miss shrinks the context by its shortfall. Once something fits, the next guess lies between the
largest fit and the smallest miss, in the proportion of what was spare and what was missing there.
Demands that are no straight line would make this crawl, so it turns to halving when guesses hit the
ends of the bracket or take too many probes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pyggml_dflash.plan.chunk import ChunkPlan

STEP: Final = 4096  # tokens
SHORT_STEP: Final = 256
SHORT_CTX: Final = 16384  # models trained for no more than this are fitted in short steps
CLAMPED_GUESSES: Final = 2  # guesses in a row outside of the bracket before it is halved
MISSES_BEFORE_HALVING: Final = 3  # in a row from the start
PROBES_BEFORE_HALVING: Final = 5  # 64 steps are then settled within 11 probes, whatever the answers
MAX_PROBES: Final = 24


def step_for(n_ctx_train: int) -> int:
    """Tokens between two contexts that are tried."""
    return SHORT_STEP if n_ctx_train <= SHORT_CTX else STEP


def shrink(n_ctx: int, missing: int, position_bytes: int, step: int = STEP) -> int:
    """The largest step that is smaller than `n_ctx` by what `missing` bytes stand for; 0: none is."""
    fewer = n_ctx if position_bytes == 0 else min(n_ctx, -(-missing // position_bytes))
    return max(0, min(n_ctx - 1, n_ctx - fewer) // step * step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFit:
    """Where a search stands: the largest fit, the smallest miss, and the context to try next.

    Frozen: `after` returns the next state. Contexts are whole steps, except the one to start with.
    """

    step: int = STEP
    start: int = 0  # tried first; 0: whatever is
    min_ctx: int = 0  # nothing below it is tried; 0: one step
    fits: int = 0  # 0: none yet
    spare: int = 0  # bytes left over there
    misses: int = 0  # 0: none yet
    missing: int = 0  # bytes lacking there
    position_bytes: int = 0  # of the last probe
    n_probes: int = 0
    n_clamped: int = 0  # guesses in a row that had to be moved into the bracket
    halving: bool = False

    @classmethod
    def starting_at(cls, start: int, *, n_ctx_train: int, min_ctx: int | None = None) -> ContextFit:
        """A search from `start` down, for a model trained for `n_ctx_train` tokens."""
        return cls(step=step_for(n_ctx_train), start=start, min_ctx=min_ctx or 0)

    @property
    def lowest(self) -> int:
        """The smallest context worth trying: `min_ctx` in whole steps, or the start if that is less."""
        steps = max(1, -(-self.min_ctx // self.step)) * self.step
        return min(steps, self.start) if self.start else steps

    @property
    def settled(self) -> bool:
        """True once there is nothing left to try; `fits` is the answer, 0 for none."""
        return self.next_ctx == 0

    @property
    def next_ctx(self) -> int:
        """The context to try next; 0 when the search is over."""
        return self._choose()[0]

    def after(self, plan: ChunkPlan) -> ContextFit:
        """The search after one more probe, which was at `next_ctx`."""
        state = replace(self, n_probes=self.n_probes + 1, position_bytes=plan.position_bytes)
        if plan.fits:
            state = replace(state, fits=plan.n_ctx, spare=plan.spare)
        else:
            state = replace(state, misses=plan.n_ctx, missing=plan.missing)
        late = state.n_probes >= PROBES_BEFORE_HALVING
        lost = state.fits == 0 and state.n_probes >= MISSES_BEFORE_HALVING
        if late or lost or state.n_clamped >= CLAMPED_GUESSES:
            return replace(state, halving=True)
        return replace(state, n_clamped=state.n_clamped + 1 if state._choose()[1] else 0)

    def _choose(self) -> tuple[int, bool]:
        """The next context, and whether a guess had to be moved to get it."""
        if self.n_probes >= MAX_PROBES:
            return 0, False
        if self.misses == 0:
            return (0 if self.fits else self.start), False
        low = self.fits + self.step if self.fits else self.lowest
        high = (self.misses - 1) // self.step * self.step
        if low > high:
            return 0, False
        if self.halving:
            guess = (self.fits + self.misses) // 2 // self.step * self.step
        elif self.fits == 0:
            guess = shrink(self.misses, self.missing, self.position_bytes, self.step)
        else:
            guess = self._interpolated()
        moved = self.fits != 0 and not low <= guess <= high
        return max(low, min(guess, high)), moved

    def _interpolated(self) -> int:
        gap, whole = self.misses - self.fits, self.spare + self.missing
        rows = self.fits if whole == 0 else self.fits + self.spare * gap // whole
        return rows // self.step * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One context that was tried: bytes left over (negative: lacking) on the device that binds."""

    n_ctx: int
    fits: bool
    balance: int
    device: str

    @classmethod
    def of(cls, plan: ChunkPlan) -> Probe:
        """What a plan says."""
        balance = plan.spare if plan.fits else -plan.missing
        return cls(n_ctx=plan.n_ctx, fits=plan.fits, balance=balance, device=plan.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextChoice:
    """How a search ended: the plan of the largest context that fits, or None, and every probe."""

    plan: ChunkPlan | None
    trace: tuple[Probe, ...]
    smallest_miss: ChunkPlan | None


def choose_context(fit: ContextFit, plan_at: Callable[[int], ChunkPlan]) -> ContextChoice:
    """Probe until the search is settled. The plan returned was measured at its own context."""
    best: ChunkPlan | None = None
    worst: ChunkPlan | None = None
    trace: list[Probe] = []
    while n_ctx := fit.next_ctx:
        plan = plan_at(n_ctx)
        trace.append(Probe.of(plan))
        best, worst = (plan, worst) if plan.fits else (best, plan)
        fit = fit.after(plan)
    return ContextChoice(plan=best, trace=tuple(trace), smallest_miss=worst)
