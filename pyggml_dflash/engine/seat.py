"""One admitted sequence: how far it is, what chooses its tokens, and who drafts them. Layer 6."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.reuse import Continued
from pyggml_dflash.engine.sampling import Sampler, best
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.engine.step import Admission, Phase
from pyggml_dflash.state.slot import Slot


@dataclass(slots=True, eq=False)
class Seat:
    """A slot that is taken. The core runs its forwards; the slot belongs to the table."""

    slot: Slot
    admission: Admission
    ends: Sequence[int]  # where the forwards of its prompt end
    drafts: bool = False  # the drafter follows it
    plain_reason: str | None = None  # why it is not drafted for, though it may be
    phase: Phase = "prefill"
    anchor: int = -1  # the newest token, which the state does not have yet
    n_left: int = field(init=False)  # tokens of the answer that may still come
    n_read: int = 0  # tokens of the prompt that are in the slot
    n_cached: int = 0  # of these, tokens that were not computed again
    prompt: Continued | None = None  # what became of it with stored states; None: they were not looked at
    speculation: Speculation | None = None  # once its prompt is complete, if it drafts or did
    failed_at: int = -1  # `n_past` of the last step that failed
    may_join: bool = True  # its prompt may share forwards: none that it shared failed
    answer: list[int] = field(default_factory=list)  # tokens chosen so far, the anchor last
    regains: bool = False  # its state was lost: what led to it runs again, as if it were a prompt
    _runs: Generator[list[Chosen], None, None] | None = None

    def __post_init__(self) -> None:
        self.n_left = self.admission.limit

    @property
    def sampler(self) -> Sampler:
        """What chooses its tokens."""
        assert self.admission.sampler is not None
        return self.admission.sampler

    @property
    def speculates(self) -> bool:
        """True if its steps may have drafts."""
        return self.drafts and self.speculation is not None

    @property
    def is_whole(self) -> bool:
        """True if the slot is as the last good step left it, so that the next may be tried again."""
        n_past = self.n_before_anchor if self.phase == "decode" else self.n_read
        return not self.slot.torn and self.slot.n_past == n_past

    @property
    def n_before_anchor(self) -> int:
        """Tokens of prompt and answer that a state has from which the answer goes on."""
        return len(self.admission.tokens) + len(self.answer) - 1

    def end_behind(self, n_past: int) -> int:
        """Where the forward that begins at `n_past` ends; `n_past` itself at the end of the prompt."""
        i = bisect_right(self.ends, n_past)
        return self.ends[i] if i < len(self.ends) else n_past

    def choose(self, logits: Logits) -> Chosen:
        """The next token of the answer, from a step without drafts."""
        if self.speculation is None:
            sampler = self.sampler
            token = sampler.pick(logits) if sampler.needs_logits else best(logits)
            sampler.accept(token)
            chosen = Chosen(token, logits)
        else:
            self.pause()
            chosen = self.speculation.beside(logits)
        self.note(chosen)
        return chosen

    def begin_answer(self, logits: Logits) -> Chosen:
        """Choose the first token; the prompt is complete."""
        sampler = self.sampler
        token = sampler.pick(logits)
        sampler.accept(token)
        self.phase, chosen = "decode", Chosen(token, logits)
        self.note(chosen)
        return chosen

    def next_run(self, n_ctx: int) -> list[Chosen]:
        """The tokens of one step of its own, drafted or not."""
        assert self.speculation is not None
        if self._runs is None:
            self._runs = self.speculation.runs(self.slot, self.anchor, n_ctx, limit=self.n_left)
        run = next(self._runs)
        self.note(*run)
        return run

    def note(self, *run: Chosen) -> None:
        """These tokens were chosen, and the state has all of them but the last."""
        self.answer += [chosen.token for chosen in run]
        self.anchor = run[-1].token
        self.n_left -= len(run)

    def lose(self) -> None:
        """Its state is lost, and the slot empty: it goes back to the beginning of its prompt."""
        self.pause()
        self.phase, self.regains, self.n_read = "prefill", bool(self.answer), 0

    def put_drafts_aside(self, reason: str) -> None:
        """Go on without the drafter, which may follow another sequence."""
        self.pause()
        self.drafts, self.plain_reason = False, reason

    def pause(self) -> None:
        """Leave off steps of its own: the next token comes from another forward."""
        if self._runs is not None:
            self._runs.close()
            self._runs = None
