"""Times the parts of a speculative step inside an open engine, at a given context, and what they come to.

The context is filled without a prefill: caches and recurrent states get random numbers, and the slot is told
how far it is. What a step costs depends on sizes, not on values. The draft's cache is filled through the
drafter, from random features. Each width is measured in a loop of its own beside plain steps, so that both
see the same machine; the first rounds of a loop build graphs and let CUDA record them, and do not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from inside import compute, drafter_of, forwards_of, last_graph, more_forwards, state_of
from random_blocks import BlockPool
from rates import Spread

from pyggml_dflash.arch.base import StateUpdate
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafting import Drafter
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.ggml.arena import write
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.options import SamplingOptions
from pyggml_dflash.state.slot import Slot

WARM_UP: Final = 3
FILL_STD: Final = 0.5
TOKEN: Final = 65


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthCost:
    """One verify width at one context; milliseconds over rounds.

    `graph` is the verify forward without its inputs and without reading logits, `ratio` the verify forward in
    plain steps of the same round; `keep_one` and `keep_all` bring the state to that many rows.
    """

    context: int
    update: str
    width: int
    plain: Spread
    plain_graph: Spread
    verify: Spread
    ratio: Spread
    graph: Spread
    choose: Spread
    keep_one: Spread
    keep_all: Spread
    draft: Spread | None  # None: no drafter proposes so many
    inject: Spread | None

    @property
    def step_ms(self) -> float | None:
        """A whole step in which every row is kept: draft, verify, choose, commit, inject."""
        if self.draft is None or self.inject is None:
            return None
        parts = (self.draft, self.verify, self.choose, self.keep_all, self.inject)
        return sum(part.median for part in parts)

    @property
    def even_length(self) -> float | None:
        """Tokens that a step must commit to be as fast as plain decoding, which chooses a token per step."""
        if self.step_ms is None:
            return None
        return self.step_ms / (self.plain.median + self.choose.median / self.width)

    @property
    def even_rate(self) -> float | None:
        """The chance of each draft to hold, all alike, that gives that many; None if no chance does."""
        return None if self.even_length is None else accept_rate(self.even_length, self.width)


def accept_rate(length: float, width: int) -> float | None:
    """The p with 1 + p + ... + p^(width - 1) = length; None if even p = 1 is not enough."""
    if length > width:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(width)) < length else (low, p)
    return (low + high) / 2


class Bench:
    """Measures in one engine, on its thread. Tokens are filler: any do.

    `forbidden`: ids that are never chosen, which choosing has to look at.
    """

    def __init__(
        self,
        core: EngineCore,
        n_repeat: int,
        say: Callable[[str], None],
        forbidden: npt.NDArray[np.int64] | None,
    ) -> None:
        self._core, self._n_repeat, self._say = core, n_repeat, say
        self._forwards: Forwards = forwards_of(core)
        self._drafter: Drafter | None = drafter_of(core)
        self._slot: Slot = core.slots[0]
        n_vocab = self._forwards.model.config.n_vocab
        self._sampler = Sampler(SamplingOptions(), (), n_vocab=n_vocab, forbidden=forbidden)
        self._seen = 0

    def fill(self, context: int) -> None:
        """Make the slot and the drafter as after a prompt of `context` tokens."""
        slot, drafter = self._slot, self._drafter
        slot.reset()
        pool = BlockPool(1)
        for tensor in (*state_of(self._core).values(), *self._forwards.record.values()):
            randomize(tensor, pool)
        slot.commit(context)
        self._seen = 0
        if drafter is not None:
            drafter.begin()
            for start in range(0, context, self._core.chunk):
                self._inject(min(self._core.chunk, context - start))

    def _inject(self, n: int) -> None:
        assert self._drafter is not None
        self._drafter.observe([TOKEN] * n, self._seen)
        self._seen += n

    def widths(self, context: int, widths: Sequence[int], update: StateUpdate) -> list[WidthCost]:
        """Every width with one way to take rows back."""
        found = []
        with more_forwards(self._core, update, max(widths)) as forwards:
            for width in widths:
                self._say(f"context {context}, {update}, width {width}")
                self.set_back(context)
                found.append(self._width(forwards, context, update, width))
        return found

    def set_back(self, context: int) -> None:
        """Set the slot back to `context`; what it holds stays."""
        self._slot.reset()
        self._slot.commit(context)

    def _width(self, forwards: Forwards, context: int, update: str, width: int) -> WidthCost:
        slot, rows = self._slot, [TOKEN] * width
        drafts = self._drafter is not None and width <= self._drafter.max_drafts + 1
        times: dict[str, list[float]] = defaultdict(list)

        def timed(name: str, call: Callable[[], object]) -> None:
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))

        for _ in range(WARM_UP + self._n_repeat):
            timed("plain", lambda: self._forwards.decode(slot, TOKEN))
            timed("plain_graph", lambda: compute(last_graph(self._forwards)))
            slot.commit(1)
            if drafts and width > 1:
                timed("draft", lambda: self._propose(width - 1))
            logits: list[Logits] = []
            timed("verify", lambda to=logits: to.append(forwards.verify(slot, rows)))
            timed("graph", lambda: compute(last_graph(forwards)))
            timed("choose", lambda of=logits: [self._sampler.pick(row) for row in of[0]])
            timed("keep_one", lambda: forwards.commit(slot, width=width, n_keep=1))
            timed("keep_all", lambda: forwards.commit(slot, width=width, n_keep=width))
            if drafts:
                timed("inject", lambda: self._inject(width))
        times["ratio"] = [a / b for a, b in zip(times["verify"], times["plain"], strict=True)]
        spreads = {name: Spread.of(values[WARM_UP:]) for name, values in times.items()}
        optional = {name: spreads.pop(name, None) for name in ("draft", "inject")}
        return WidthCost(context=context, update=update, width=width, **spreads, **optional)

    def _propose(self, n_drafts: int) -> None:
        assert self._drafter is not None
        self._drafter.propose(TOKEN, self._slot.n_past, n_drafts, None)


def randomize(tensor: Tensor, pool: BlockPool) -> None:
    """Fill a tensor with random numbers of its type."""
    offset = 0
    for piece in pool.tensor(tensor.type, tensor.n_elements, FILL_STD):
        write(tensor, np.ascontiguousarray(piece).reshape(-1), offset)
        offset += piece.nbytes
