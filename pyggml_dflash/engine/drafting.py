"""What every drafter does, and what all of them share: caches, cells, masks. Layer 6.

A drafter proposes tokens behind the newest one, which the target has not run yet. It sees the text
through what target forwards recorded: after each commit it is shown the committed rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Capture
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.record_space import Room
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.errors import BackendError
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.state.strips import Companion, Part


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens; `distributions` float64 [n_vocab] they were drawn from, None for greedy choices."""

    tokens: tuple[int, ...]
    distributions: tuple[npt.NDArray[np.float64], ...] | None = None


class Drafter(Companion, Protocol):
    """Proposes tokens for one slot; what it knows of the sequence can be stored with the slot.

    As a `Companion` it knows of what it was shown alone; a `Backlog` knows of what waits, too.
    """

    name: str
    capture: Capture
    max_drafts: int  # tokens of the longest proposal

    def begin(self) -> None:
        """Forget the sequence before."""

    def observe(self, tokens: Sequence[int], n_past: int, row: int | None = None) -> None:
        """Take in rows of the target's record: `tokens` at positions from `n_past` on.

        They lie from `row` on; None: in its slot's own room.
        """

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """Up to `n_drafts` tokens behind `anchor`, which stands at position `n_past`.

        With a sampler the tokens are drawn from distributions that are returned; without, the best. A
        proposal ends before the first row whose logits are no numbers. Whether a row is proposed depends
        on the rows before it and on its distribution, never on the token drawn there.
        """

    def needs(self, probe: MemoryProbe) -> int:
        """Bytes of its largest graph of a whole context, without running one."""

    def close(self) -> None:
        """Free everything."""


D = TypeVar("D", bound="SlotDrafter")


class SlotDrafter(ABC):
    """What drafters know of one slot: how much of its sequence they have seen, and where its rows begin.

    Those of other slots, which `beside` makes, use the inputs and the memory of the first one's graphs.
    """

    def __init__(self, forwards: Forwards) -> None:
        """Of the first slot; `_allocate` is the subclass's to call."""
        self._forwards, self._slot = forwards, 0
        self._first_row = forwards.space.own(0).first
        self._n_seen = 0
        self._stack = ExitStack()

    @abstractmethod
    def _allocate(self, stack: ExitStack) -> None:
        """Make what is of one slot, which `stack` frees."""

    @abstractmethod
    def begin(self) -> None:
        """See `Drafter`."""

    def beside(self: D, slot: int) -> D:
        """The one of another slot; to be closed before this one."""
        other = copy(self)
        other._slot, other._first_row = slot, self._forwards.space.own(slot).first
        other._n_seen = 0
        with ExitStack() as stack:
            other._allocate(stack)
            other._stack = stack.pop_all()
        return other

    def _see(self, tokens: Sequence[int], n_past: int, row: int | None) -> int:
        """Count tokens that are observed; the row of the record where they begin."""
        assert n_past == self._n_seen, "a gap in what the draft has seen"
        self._n_seen += len(tokens)
        return self._first_row if row is None else row

    def covers(self, n_past: int) -> bool:
        """True if it has seen exactly the first `n_past` positions."""
        return n_past == self._n_seen

    def resume(self, n_past: int) -> None:
        """The cells are about to hold `n_past` positions."""
        self._n_seen = n_past

    def forget(self) -> None:
        """It has not seen what its slot holds."""
        self.begin()

    def close(self) -> None:
        """Free what is of its slot, and of the first one inputs and graphs; the weights are their owner's."""
        self._stack.close()


class Backlog:
    """Committed rows of one slot that wait in the target's record until its drafter takes them in.

    Plain steps and prompts leave theirs here: taking in many at once is cheaper, and in an answer without
    a draft it never has to happen. It is the `Companion` that is stored with a slot: whoever stores the
    sequence has what waits taken in first, and whoever restores one leaves nothing waiting.
    """

    def __init__(self, forwards: Forwards, drafter: Drafter, slot: int = 0) -> None:
        self._forwards, self._drafter, self._slot = forwards, drafter, slot
        self._own = self._room = forwards.space.own(slot)
        self._tokens: list[int] = []
        self._n_past = 0  # position of the first that waits

    def begin(self) -> None:
        """Forget the sequence before."""
        self._clear()
        self._drafter.begin()

    def make_room(self, n: int, at: int = 0) -> None:
        """See to it that a forward can record `n` rows; `at`: where in the room of prompts, if several do."""
        if self._room != self._own or len(self._tokens) + n > self._room.n_rows:
            self.take()
            if n > self._own.n_rows:
                shared = self._forwards.space.shared
                self._room = Room(shared.first + at, shared.n_rows - at)
                self._forwards.recorded[self._slot] = self._room.first

    def add(self, tokens: Sequence[int], n_past: int) -> None:
        """The last forward's first rows are committed: `tokens` at positions from `n_past` on."""
        if not self._tokens:
            self._n_past = n_past
        assert n_past == self._n_past + len(self._tokens), "a gap in what was recorded"
        self._tokens += tokens
        self._forwards.recorded[self._slot] += len(tokens)

    def take(self) -> None:
        """Show the drafter everything that waits."""
        if self._tokens:
            tokens, first = tuple(self._tokens), self._room.first
            self._clear()
            self._drafter.observe(tokens, self._n_past, first)

    def drop(self) -> None:
        """What waits is not wanted: the drafter no longer follows this sequence."""
        self._clear()

    def settle(self) -> None:
        """Have nothing wait where others' prompts are recorded."""
        if self._room != self._own:
            self.take()

    @property
    def kind(self) -> str:
        """The drafter's."""
        return self._drafter.kind

    def covers(self, n_past: int) -> bool:
        """True if the drafter, having taken in what waits, has seen exactly the first `n_past` positions."""
        self.take()
        return self._drafter.covers(n_past)

    def parts(self, n_past: int) -> tuple[Part, ...]:
        """The drafter's; complete where it `covers` these positions."""
        return self._drafter.parts(n_past)

    def resume(self, n_past: int) -> None:
        """The drafter's parts are about to hold `n_past` positions, and nothing waits."""
        self._clear()
        self._drafter.resume(n_past)

    def forget(self) -> None:
        """See `begin`."""
        self.begin()

    def _clear(self) -> None:
        self._tokens.clear()
        self._room = self._own
        self._forwards.recorded[self._slot] = self._own.first


def distribution(logits: npt.NDArray[Any], sampler: Sampler) -> npt.NDArray[np.float64] | None:
    """What a row's token is drawn from, float64 [n_vocab]; None where no choice can be made, as among NaN."""
    try:
        return sampler.probabilities(logits)
    except BackendError:
        return None


def ring_mask(
    mask: npt.NDArray[Any], *, n_past: int, n_cells: int, window: int, causal: bool, block: int
) -> None:
    """Fill a block's mask F16 [block, n_kv] over a cache whose cell is position modulo `n_cells`.

    Context cells hold positions below `n_past`; row i of the block stands at n_past + i, and its own
    keys are in the cells of its positions. A row sees context within `window` (0: all of it) and the
    block's rows: all of them, or those up to itself.
    """
    n_kv = mask.shape[1]
    cells = np.arange(n_kv)
    positions = n_past - 1 - (n_past - 1 - cells) % n_cells  # the newest position below n_past in each cell
    rows = n_past + np.arange(block)[:, None]
    held = (positions >= 0) & (cells < n_cells)
    seen = held & ((window == 0) | (rows - positions < window))
    own = (n_past + np.arange(block)) % n_cells
    seen[:, own[own < n_kv]] = False
    mask[:] = np.where(seen, 0, -np.inf)
    for j, cell in enumerate(own):
        first = j if causal else 0
        last = block
        if window:
            last = min(last, j + window)
            first = max(first, j - window + 1)
        mask[first:last, cell] = 0
