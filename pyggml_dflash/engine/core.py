"""The engine's core: owns every native object of one model and carries out steps. Layer 6.

Created and used on one thread; a call from another raises. Objects are freed in the reverse order of
their creation.

Every slot has a drafter of its own, which follows the sequence there if it may be drafted for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import OutputKind
from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.decode import Take, decode_step, run_alone
from pyggml_dflash.engine.drafting import Backlog, Drafter
from pyggml_dflash.engine.failures import Failures
from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.engine.prefill import PoolTrims
from pyggml_dflash.engine.prompt_steps import PromptSteps
from pyggml_dflash.engine.ragged import Ragged
from pyggml_dflash.engine.regain import begin_again, regain
from pyggml_dflash.engine.reuse import Reuse
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.engine.step import (
    Admission,
    Granule,
    Phase,
    StepPlan,
    StepReport,
    check_plan,
    granule_of,
)
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.ggml.heap import release_free_heap
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.config import MoeConfig
from pyggml_dflash.requests import EngineStats, SlotInfo
from pyggml_dflash.state.cuts import PromptEnds, prompt_ends
from pyggml_dflash.state.slot import Slot, SlotTable

LOG: Final = logging.getLogger(__name__)
PICK_ROWS: Final = 256  # of a forward that shows its choice of experts
DRAFTER_BEHIND: Final = "the state that was continued has nothing of the drafter's"


class EngineCore:
    """One loaded model with its slots; `stack` holds everything it must free, in creation order."""

    def __init__(
        self,
        forwards: Forwards,
        slots: SlotTable,
        ledger: Ledger,
        n_ctx: int,
        stack: ExitStack,
        drafters: Sequence[Drafter] = (),
        *,
        trims: PoolTrims,
        control: VerifyWidth | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """`drafters`: one per slot, or none. `control` has what is known about cost and acceptance of their
        steps; `reuse` what prompts may continue: it is bound to these slots, and closed with the core."""
        self.reuse = reuse
        self._drafters, self._control, self.trims = tuple(drafters), control, trims
        self._backlogs = tuple(Backlog(forwards, drafter, i) for i, drafter in enumerate(drafters))
        self._forwards, self._slots, self._ledger, self._stack = forwards, slots, ledger, stack
        self._thread = threading.get_ident()
        self.n_ctx, self.chunk = n_ctx, forwards.chunk
        self.granule = granule_of(self.chunk, len(slots.slots))
        self._seats: list[Seat | None] = [None] * len(slots.slots)
        self._failures = Failures()
        self._prompts = PromptSteps(forwards, self._backlogs, self._failures, trims)
        several = len(drafters) > 1
        self._ragged = Ragged(forwards, drafters, self._backlogs, self._failures) if several else None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Room for sequences."""
        return self._slots.slots

    @property
    def ledger(self) -> Ledger:
        """What is charged for the memory that it holds."""
        return self._ledger

    @property
    def n_slots(self) -> int:
        """How many sequences there is room for."""
        return len(self._seats)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What each slot does."""
        return tuple("free" if seat is None else seat.phase for seat in self._seats)

    @property
    def has_room(self) -> bool:
        """True while a slot is free."""
        return None in self._seats

    def seat(self, id: int) -> Seat:
        """The sequence in slot `id`."""
        seat = self._seats[id]
        assert seat is not None, f"slot {id} is free"
        return seat

    # sequences come and go

    def admit(self, admission: Admission) -> int | None:
        """Give the lowest free slot to a sequence, which stays until `retire`; None while all are taken."""
        self._check_thread()
        if not self.has_room:
            return None
        id = self._seats.index(None)
        slot = self.slots[id]
        slot.reset()
        rows = self._rows_of(admission)
        ends = prompt_ends(len(admission.tokens), admission.boundaries, rows)
        seat = Seat(slot, admission, ends.all)
        seat.drafts = admission.drafts and bool(self._drafters)
        if admission.reuses and self.reuse is not None:
            self._continue(seat, ends, self.reuse)
        seat.n_read = seat.n_cached = slot.n_past
        self._seats[id] = seat
        self.trims.begin(slot.n_past, len(admission.tokens), slot=id)
        return id

    def _continue(self, seat: Seat, ends: PromptEnds, reuse: Reuse) -> None:
        """Have the slot hold what is stored of the prompt, and the drafter, if it follows, know of it."""
        admission, slot, companion = seat.admission, seat.slot, self._backlog_of(seat)
        try:
            seat.prompt = reuse.begin(
                slot,
                admission.tokens,
                boundaries=admission.boundaries,
                ends=ends,
                keep_head=admission.keep_head,
                companion=companion,
            )
        except Exception as error:
            LOG.warning("no stored state was continued: %s: %s", type(error).__name__, error)
            slot.reset()
        if companion is not None and slot.n_past and not companion.covers(slot.n_past):
            seat.drafts, seat.plain_reason = False, DRAFTER_BEHIND

    def _backlog_of(self, seat: Seat) -> Backlog | None:
        return self._backlogs[seat.slot.id] if seat.drafts else None

    def _rows_of(self, admission: Admission) -> int:
        most = self._forwards.scored_rows if admission.sampler is None else self.granule
        return min(self.granule, most)

    def retire(self, id: int) -> None:
        """Free slot `id`, whatever its sequence was doing; nothing happens if it is free."""
        self._check_thread()
        seat = self._seats[id]
        if seat is not None:
            seat.pause()
            if seat.phase == "prefill" and seat.is_whole:
                self._store(seat, is_over=True)
            self.trims.end(id)
            self._seats[id] = None

    # steps

    def step(self, plan: StepPlan) -> StepReport:
        """Carry out a plan: a run of tokens for every slot that decodes, then one granule of each prompt.

        Raises `PlanError` before anything is done; whatever fails later is in the report, for its slot.
        """
        self._check_thread()
        check_plan(plan, self.phases)
        decoded, read = dict[int, Sequence[Chosen]](), dict[int, Granule]()
        failed, regaining = dict[int, Exception](), set[int]()
        runs = decode_step(
            self._forwards,
            self._backlogs,
            self._ragged,
            self._failures,
            [self.seat(id) for id in plan.decode],
        )
        started_s = time.perf_counter()
        for id, granule in self._prefill([self.seat(id) for id in plan.prefill]).items():
            if isinstance(granule, Exception):
                failed[id] = granule
            elif granule is None:
                regaining.add(id)
            else:
                read[id] = granule
        prefill_s = time.perf_counter() - started_s
        for id, run in runs.items():
            if isinstance(run, Exception):
                failed[id] = run
            elif not run:
                self._lose(self.seat(id))
                regaining.add(id)
            else:
                decoded[id] = run
        for id in failed:
            self.seat(id).phase = "done"
        return StepReport(
            decoded=decoded,
            advanced={id: granule for id, granule in read.items() if self.phases[id] == "prefill"},
            completed={id: granule for id, granule in read.items() if self.phases[id] != "prefill"},
            failed=failed,
            regaining=frozenset(regaining),
            prefill_s=prefill_s,
        )

    def run_alone(self, id: int, take: Take, pause: Callable[[], bool]) -> bool:
        """Steps of slot `id`, where nothing else runs, until `take` has enough (True) or `pause` says so.

        What `take` is given is as in a report. Raises what ends the sequence; `take` must not raise.
        """
        self._check_thread()
        seat = self.seat(id)
        while True:
            try:
                return run_alone(self._forwards, seat, take, pause)
            except Exception as error:
                self._failures.note(error, seat)
                if not self._failures.may_repeat(seat, error):
                    seat.phase = "done"
                    raise

    def beside(self, id: int) -> tuple[int, ...]:
        """The slots whose prompts go on in the same forward as that of slot `id`, if the plan names them."""
        reading = [other for other, phase in enumerate(self.phases) if phase == "prefill" and other != id]
        seats = self._prompts.beside(self.seat(id), [self.seat(other) for other in reading])
        return tuple(seat.slot.id for seat in seats)

    def _prefill(self, seats: Sequence[Seat]) -> dict[int, Granule | Exception | None]:
        """One granule of each prompt, by its slot; None: it is behind, and runs again what it had."""
        found = dict[int, Granule | Exception | None]()
        for group in self._prompts.groups(seats):
            found |= self._read_together(group) if len(group) > 1 else self._read_alone(group)
        return found

    def _read_alone(self, seats: Sequence[Seat]) -> dict[int, Granule | Exception | None]:
        return {
            seat.slot.id: self._failures.attempt(
                seat, partial(self._regain if seat.regains else self._read, seat)
            )
            for seat in seats
        }

    def _read_together(self, seats: Sequence[Seat]) -> dict[int, Granule | Exception | None]:
        """A forward for all; where it fails, one of each alone, once its state is good."""
        try:
            rows = self._prompts.run_together(seats)
        except Exception as error:
            self._failures.note(error, *seats)
            for seat in seats:
                self._failures.set_apart(seat, error)
            whole = [seat for seat in seats if seat.is_whole]
            lost = [seat for seat in seats if seat not in whole]
            for seat in lost:
                self._lose(seat)
            return self._read_alone(whole) | dict.fromkeys((seat.slot.id for seat in lost), None)
        return {
            seat.slot.id: self._failures.attempt(seat, partial(self._behind, seat, own))
            for seat, own in zip(seats, rows, strict=True)
        }

    def _read(self, seat: Seat) -> Granule:
        """One granule of a prompt, committed."""
        slot, admission = seat.slot, seat.admission
        tokens, start = admission.tokens, slot.n_past
        end = seat.end_behind(start)
        part, ahead, last = tokens[start:end], tokens[end : seat.end_behind(end)], end == len(tokens)
        output: OutputKind = "all" if admission.sampler is None else "last" if last else "none"
        return self._behind(seat, self._prompts.run(slot, part, output, ahead=ahead, drafting=seat.drafts))

    def _behind(self, seat: Seat, rows: Logits | None) -> Granule:
        """What comes behind a forward of a prompt, which gave these logits."""
        slot, admission = seat.slot, seat.admission
        end = slot.n_past
        last = end == len(admission.tokens)
        if seat.drafts:  # before the forward of another prompt overwrites what was recorded of this one
            self._failures.attempt_drafting(seat, self._backlogs[slot.id].settle)
        first: Chosen | None = None
        if last and admission.sampler is not None:
            assert rows is not None
            if seat.drafts:
                seat.speculation = self.speculation(
                    seat.sampler, admission.width, admission.stop_ids, slot=slot.id
                )
            first, rows = seat.begin_answer(rows[0]), None
        elif last:
            seat.phase = "done"
        seat.n_read = end  # now that nothing can fail any more
        self._store(seat, is_over=False)
        return Granule(n_past=end, first=first, rows=rows)

    def _lose(self, seat: Seat) -> None:
        """Have a sequence begin again whose state is lost."""
        begin_again(seat, self.reuse, self._rows_of(seat.admission))
        self.trims.begin(seat.slot.n_past, len(seat.admission.tokens), slot=seat.slot.id)

    def _regain(self, seat: Seat) -> None:
        def run_prompt(tokens: Sequence[int], output: OutputKind) -> None:
            self._prompts.run(seat.slot, tokens, output, ahead=(), drafting=False)

        regain(self._forwards, seat, run_prompt)

    def _store(self, seat: Seat, *, is_over: bool) -> None:
        """Store the state of a prompt where that is worth it; an answer never fails for it."""
        prompt, companion = seat.prompt, self._backlog_of(seat)
        if prompt is None or self.reuse is None:
            return
        store = self.reuse.leave if is_over else self.reuse.after_forward
        try:
            store(prompt, seat.slot, companion)
        except Exception as error:
            LOG.warning(
                "a state of slot %d was not stored: %s: %s", seat.slot.id, type(error).__name__, error
            )

    def prefill(
        self,
        slot: Slot,
        tokens: Sequence[int],
        *,
        last: bool,
        ahead: Sequence[int] = (),
        drafting: bool = False,
    ) -> Logits | None:
        """Run one chunk of a prompt in a slot that nobody was admitted to, and commit it.

        Logits of its last row if it is the `last` chunk. `ahead`: the next chunk, for what the host can
        prepare while this one runs. `drafting`: record what the drafter reads, in every chunk or in none.
        """
        self._check_thread()
        output: OutputKind = "last" if last else "none"
        rows = self._prompts.run(slot, tokens, output, ahead=ahead, drafting=drafting)
        if drafting and self._backlogs:
            self._backlogs[slot.id].settle()
        return None if rows is None else rows[0]

    def decode(self, slot: Slot, token: int) -> Logits:
        """Run one token in a slot that nobody was admitted to; its logits, overwritten by the next step."""
        self._check_thread()
        logits = self._forwards.decode(slot, token)
        slot.commit(1)
        return logits

    def speculation(
        self, sampler: Sampler, width: int | None, ends: Set[int] = frozenset(), *, slot: int = 0
    ) -> Speculation | None:
        """What continues a sequence whose prompt was recorded, up to an end; None without a drafter."""
        self._check_thread()
        if not self._drafters:
            return None
        return Speculation(
            self._forwards,
            self._drafters[slot],
            sampler,
            width=width,
            ends=ends,
            backlog=self._backlogs[slot],
            control=self._control,
        )

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Teacher-forced logits F32 [n_tokens, n_vocab], where nothing else runs."""
        id = self.admit(Admission(tokens=tuple(tokens)))
        assert id is not None
        try:
            parts: list[Logits] = []
            while self.phases[id] == "prefill":
                report = self.step(StepPlan(prefill=(id,)))
                for error in report.failed.values():
                    raise error
                for granule in (*report.advanced.values(), *report.completed.values()):
                    assert granule.rows is not None
                    parts.append(granule.rows)
            return np.concatenate(parts)
        finally:
            self.retire(id)

    # what is held

    @property
    def moe(self) -> MoeConfig | None:
        """The model's experts, None if it has none."""
        return self._forwards.model.config.moe

    def picks(self, tokens: Sequence[int]) -> Iterator[list[npt.NDArray[np.int32]]]:
        """Read tokens in an idle slot, chunk by chunk: per layer the experts chosen, I32 [rows, n_used]."""
        self._check_thread()
        slot = self.slots[0]
        slot.reset()
        n_rows = min(PICK_ROWS, max(1, self._forwards.scored_rows // 2))  # that have logits beside the choice
        for start in range(0, len(tokens), n_rows):
            part = tokens[start : start + n_rows]
            yield self._forwards.picks(slot, part)
            slot.commit(len(part))

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes held by device and label."""
        self._check_thread()
        return {device: self._ledger.by_label(device) for device in self._ledger.devices()}

    def stats(self) -> EngineStats:
        """What was trimmed, the most that was held, what the slots do, and how many steps failed."""
        self._check_thread()
        peaks = {device: self._ledger.peak(device) for device in self._ledger.devices()}
        slots = tuple(
            SlotInfo(id=slot.id, phase=phase, n_past=slot.n_past)
            for slot, phase in zip(self.slots, self.phases, strict=True)
        )
        return EngineStats(
            snapshots=None if self.reuse is None else self.reuse.stats(),
            trims=self.trims.counts,
            peak_bytes=peaks,
            slots=slots,
            step_failures=self._failures.n,
            joined_prompts=self._prompts.n_joined,
        )

    def add_counts(self, parked: EngineCore) -> None:
        """Count on from where the core of the same engine was parked."""
        self._check_thread()
        self._failures.n += parked._failures.n
        self._prompts.n_joined += parked._prompts.n_joined
        self.trims.add(parked.trims.counts)
        self.trims.n_relieved += parked.trims.n_relieved

    def release_scratch(self) -> None:
        """Give scratch memory back; called when nothing is waiting."""
        self._check_thread()
        self.trims.release_scratch()

    def park(self) -> None:
        """Save stored states where there is a folder; free all but those that need nothing of the rest."""
        self._check_thread()
        if self.reuse is not None:
            self.reuse.flush()
        self._stack.close()
        release_free_heap()  # who parks wants the memory for others

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._check_thread()
        if self.reuse is not None:
            self.reuse.close()
        self._stack.close()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("the engine's core belongs to another thread")
