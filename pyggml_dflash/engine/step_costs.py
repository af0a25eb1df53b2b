"""Measures what plain and verify steps cost on this device, before anybody waits for an answer. Layer 6."""

from __future__ import annotations

import time
from typing import Final

from pyggml_dflash.engine.drafting import Backlog, Drafter
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.state.slot import Slot

N_TOKENS: Final = 8  # of the text behind which steps are measured
N_TIMES: Final = 2  # of which the shortest counts, after one that builds the graphs
N_PLAIN: Final = 5  # the same for plain steps, which everything is compared with
LIMIT_S: Final = 0.6  # for everything; steps that would take longer are measured while the engine answers
WIDTHS: Final = (2, 4, 8, 16)


def learn_costs(forwards: Forwards, drafter: Drafter, slot: Slot, options: EngineOptions) -> VerifyWidth:
    """What chooses widths; steps are measured here unless one width was chosen for all."""
    assert forwards.recording is not None
    width = min(forwards.max_width, drafter.max_drafts + 1)
    if options.spec_width != "auto" or width < 2:
        return VerifyWidth(width)
    return VerifyWidth(width, measure_steps(forwards, drafter, slot, width))


def measure_steps(forwards: Forwards, drafter: Drafter, slot: Slot, max_width: int) -> dict[int, float]:
    """Seconds of steps by rows, drafting included; 1 is a plain step. Widths that would take too long lack.

    Empty where a plain step alone does. The slot must be idle, and is reset.
    """
    bench = _Bench(forwards, drafter, slot, max_width)
    started = time.perf_counter()
    try:
        found: dict[int, float] = {}
        if bench.plain_s() > LIMIT_S:  # and it builds the graph
            return found
        found[1] = min(bench.plain_s() for _ in range(N_PLAIN))
        for width in sorted({w for w in WIDTHS if w < max_width} | {max_width}):
            at_most = found[1] * (1 + N_TIMES) * (1 + width if forwards.is_host else 3)
            if time.perf_counter() - started + at_most < LIMIT_S:
                drafts, rests = zip(*(bench.step_s(width) for _ in range(1 + N_TIMES)), strict=True)
                found[width] = min(drafts[1:]) + min(rests[1:])
        return found
    finally:
        slot.reset()


class _Bench:
    """Steps in a slot, all behind the same text."""

    def __init__(self, forwards: Forwards, drafter: Drafter, slot: Slot, max_width: int) -> None:
        self._forwards, self._drafter, self._slot = forwards, drafter, slot
        self._backlog = Backlog(forwards, drafter)
        self.n_tokens = min(N_TOKENS, forwards.chunk)
        # Rows of a model with experts cost what their experts cost, so tokens differ.
        n_vocab = forwards.model.config.n_vocab
        tokens = [(7919 * i + 13) % n_vocab for i in range(self.n_tokens + max_width)]
        self._text, self._rest = tokens[: self.n_tokens], tokens[self.n_tokens :]

    def plain_s(self) -> float:
        """Seconds of a plain step."""
        self._slot.reset()
        self._backlog.begin()
        started = time.perf_counter()
        self._forwards.decode(self._slot, self._rest[0], capture=True)
        return time.perf_counter() - started

    def step_s(self, width: int) -> tuple[float, float]:
        """Seconds of a step of `width` rows, all of which are kept: of the proposal, and of the rest."""
        slot, forwards, rows = self._slot, self._forwards, self._rest[:width]
        slot.reset()
        self._backlog.begin()
        forwards.prefill(slot, self._text, "none", capture=True)
        self._backlog.add(self._text, 0)
        self._backlog.take()
        slot.commit(self.n_tokens)
        started = time.perf_counter()
        self._drafter.propose(rows[0], slot.n_past, width - 1, None)
        proposed = time.perf_counter()
        forwards.verify(slot, rows)
        forwards.commit(slot, width=width, n_keep=width)
        self._backlog.add(rows, slot.n_past)
        self._backlog.take()
        return proposed - started, time.perf_counter() - proposed
