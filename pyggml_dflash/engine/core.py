"""The engine's core: owns every native object of one model and carries out steps. Layer 6.

Created and used on one thread; a call from another raises. Objects are freed in the reverse order of
their creation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from typing import Final

import numpy as np

from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.drafting import Backlog, Drafter
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.prefill import PoolTrims
from pyggml_dflash.engine.sampling import Sampler, logprobs_of
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.errors import Cancelled, ContextOverflowError
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.requests import EngineStats, TokenLogprob
from pyggml_dflash.state.slot import Slot, SlotTable

ALL_LOGITS_BYTES: Final = 64 * 2**20  # most bytes of logits that one teacher-forced forward returns

IsCancelled = Callable[[], bool]


def _never() -> bool:
    return False


class EngineCore:
    """One loaded model with its slots; `stack` holds everything it must free, in creation order."""

    def __init__(
        self,
        forwards: Forwards,
        slots: SlotTable,
        ledger: Ledger,
        n_ctx: int,
        stack: ExitStack,
        drafter: Drafter | None = None,
        *,
        trims: PoolTrims,
        control: VerifyWidth | None = None,
    ) -> None:
        """`control` has what is known about cost and acceptance of the drafter's steps."""
        self._drafter, self._control, self.trims = drafter, control, trims
        self._backlog = None if drafter is None else Backlog(forwards, drafter)
        self._forwards, self._slots, self._ledger, self._stack = forwards, slots, ledger, stack
        self._thread = threading.get_ident()
        self.n_ctx, self.chunk = n_ctx, forwards.chunk

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Room for sequences."""
        return self._slots.slots

    def prefill(
        self,
        slot: Slot,
        tokens: Sequence[int],
        *,
        last: bool,
        ahead: Sequence[int] = (),
        drafting: bool = False,
    ) -> Logits | None:
        """Run one chunk of a prompt and commit it; logits of its last row if it is the `last` chunk.

        `ahead`: the next chunk, for what the host can prepare while this one runs. `drafting`: record what
        the drafter reads, in every chunk of a prompt or in none.
        """
        self._check_thread()
        backlog = self._backlog if drafting else None
        if backlog is not None:
            if slot.n_past == 0:
                backlog.begin()
            backlog.make_room(len(tokens))
        output: OutputKind = "last" if last else "none"
        logits = self._forwards.prefill(slot, tokens, output, capture=backlog is not None, ahead=ahead)
        if backlog is not None:
            backlog.add(tokens, slot.n_past)
        slot.commit(len(tokens))
        if not last:
            self.trims.after_chunk(slot.n_past)
        return None if logits is None else logits[0]

    def decode(self, slot: Slot, token: int) -> Logits:
        """Run one token and commit it; its logits, overwritten by the next step."""
        self._check_thread()
        logits = self._forwards.decode(slot, token)
        slot.commit(1)
        return logits

    def speculation(
        self, sampler: Sampler, width: int | None, ends: Set[int] = frozenset()
    ) -> Speculation | None:
        """What continues a sequence whose prompt was recorded, up to an end; None without a drafter."""
        self._check_thread()
        if self._drafter is None:
            return None
        return Speculation(
            self._forwards,
            self._drafter,
            sampler,
            width=width,
            ends=ends,
            backlog=self._backlog,
            control=self._control,
        )

    def logits(self, tokens: Sequence[int], cancelled: IsCancelled = _never) -> Logits:
        """Teacher-forced logits F32 [n_tokens, n_vocab] in an idle slot; `Cancelled` when asked to stop."""
        parts = [rows for _, rows in self._teacher_forced(tokens, cancelled)]
        n_vocab = self._forwards.model.config.n_vocab
        return np.concatenate(parts) if parts else np.empty((0, n_vocab), np.float32)

    def score(
        self, tokens: Sequence[int], top: int, cancelled: IsCancelled = _never
    ) -> tuple[TokenLogprob, ...]:
        """Log-probability of each token after the first; only one chunk of logits is held at a time."""
        found: list[TokenLogprob] = []
        for start, rows in self._teacher_forced(tokens, cancelled):
            following = tokens[start + 1 : start + 1 + len(rows)]
            found += [logprobs_of(row, token, top) for row, token in zip(rows, following, strict=False)]
        return tuple(found)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes held by device and label."""
        self._check_thread()
        return {device: self._ledger.by_label(device) for device in self._ledger.devices()}

    def stats(self) -> EngineStats:
        """What was trimmed, and the most that was held."""
        self._check_thread()
        peaks = {device: self._ledger.peak(device) for device in self._ledger.devices()}
        return EngineStats(trims=self.trims.counts, peak_bytes=peaks)

    def release_scratch(self) -> None:
        """Give scratch memory back; called when nothing is waiting."""
        self._check_thread()
        self.trims.release_scratch()

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._check_thread()
        self._stack.close()

    def _teacher_forced(self, tokens: Sequence[int], cancelled: IsCancelled) -> Iterator[tuple[int, Logits]]:
        self._check_thread()
        if len(tokens) > self.n_ctx:
            raise ContextOverflowError(n_prompt=len(tokens), max_tokens=None, n_ctx=self.n_ctx)
        n_rows = max(1, min(self.chunk, ALL_LOGITS_BYTES // (4 * self._forwards.model.config.n_vocab)))
        slot = self.slots[0]
        slot.reset()
        self.trims.begin(0, len(tokens))
        for start in range(0, len(tokens), n_rows):
            if cancelled():
                raise Cancelled("the call was cancelled")
            part = tokens[start : start + n_rows]
            following = tokens[start + n_rows : start + 2 * n_rows]
            rows = self._forwards.prefill(slot, part, "all", ahead=following)
            assert rows is not None
            slot.commit(len(part))
            self.trims.after_chunk(slot.n_past)
            yield start, rows

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("the engine's core belongs to another thread")
