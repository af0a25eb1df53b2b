"""One request from prompt to answer, as it is moved on by steps. Layer 6.

It owns what is the request's alone: sampler, random stream, decoder, text. It never touches a slot: the
core runs its steps and gives it tokens, and it says when that is enough.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.output import OutputAssembler
from pyggml_dflash.engine.sampling import logprobs_of
from pyggml_dflash.engine.seat import Seat
from pyggml_dflash.engine.step import Admission, Granule, Outcome
from pyggml_dflash.model.reasoning import count_reasoning
from pyggml_dflash.model.tokenizer import TextDecoder
from pyggml_dflash.requests import (
    SWITCHED_OFF,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Progress,
    ProgressCallback,
    PromptReuse,
    RequestState,
    TextPiece,
    Timings,
    TokenLogprob,
    Usage,
)
from pyggml_dflash.state.cuts import holds_answer, turn_boundaries
from pyggml_dflash.state.prefix_match import Match


class Caller(Protocol):
    """Where pieces go, and whether anybody still wants them."""

    progress: ProgressCallback | None
    submitted_s: float
    state: RequestState

    @property
    def cancelled(self) -> bool:
        """True once the answer is no longer wanted."""

    def emit(self, event: TextPiece | GenerationResult | BaseException) -> None:
        """Take a piece; a result or an error is the last."""


class Generation:
    """The state of one running request. Used once."""

    def __init__(self, loaded: Loaded, request: GenerationRequest, caller: Caller) -> None:
        self._request, self._caller = request, caller
        self._stop_ids = frozenset() if request.ignore_eos else loaded.tokenizer.stop_ids
        self._tokenizer, self._sampler = loaded.tokenizer, loaded.sampler(request)
        # a constraint says which spaces there are
        continues = request.continues_text or request.constraint is not None
        self._output = OutputAssembler(TextDecoder(loaded.tokenizer, continuation=continues), request.stop)
        room = loaded.info.n_ctx - len(request.tokens) + 1
        self._limit = room if request.max_tokens is None else min(room, request.max_tokens)
        self._drafts, self._width = loaded.drafts(request), loaded.width(request)
        self._no_drafter = loaded.info.spec_reason
        markers = loaded.markers
        self._markers = markers
        self._boundaries = () if markers is None else tuple(turn_boundaries(request.tokens, markers))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: FinishReason = "cancelled"
        self._error: BaseException | None = None
        self._started_s = self._read_s = time.perf_counter()

    @property
    def admission(self) -> Admission:
        """What it brings to its slot."""
        return Admission(
            tokens=self._request.tokens,
            sampler=self._sampler,
            limit=self._limit,
            stop_ids=self._stop_ids,
            drafts=self._drafts,
            width=self._width,
            boundaries=self._boundaries,
            reuses=self._request.cache_prompt,
            keep_head=self._request.keep_head,
        )

    @property
    def cancelled(self) -> bool:
        """True once the answer is no longer wanted."""
        return self._caller.cancelled

    def begin(self, n_cached: int) -> None:
        """It has a slot, with so much of the prompt. May raise what the caller's callback raises."""
        self._read_s = time.perf_counter()
        self._progress(n_cached)

    def read(self, granule: Granule) -> bool:
        """More of the prompt was read; True if the answer is complete, with the prompt or its first token."""
        self._read_s = time.perf_counter()
        self._progress(granule.n_past)
        if granule.first is None or self.cancelled:
            return self.cancelled
        self._caller.state = RequestState(phase="decode", done=granule.n_past, total=granule.n_past)
        return self.take(granule.first.token, granule.first.logits)

    def take(self, token: int, logits: Logits) -> bool:
        """Make `token` part of the answer; True if it ends here. Never raises: `finish` tells of an error."""
        if token in self._stop_ids:
            self._reason = "stop"
            return True
        try:
            self._tokens.append(token)
            n_top = self._request.logprobs
            logprob = None if n_top is None else logprobs_of(logits, token, n_top)
            if logprob is not None:
                self._logprobs.append(logprob)
            piece = self._output.push(token, logprob)
            if piece is not None:
                self._caller.emit(piece)
        except BaseException as error:
            self._error = error
            return True
        if self._output.stopped is not None or len(self._tokens) == self._sampler.finished_at:
            self._reason = "stop"
            return True
        if len(self._tokens) >= self._limit:
            self._reason = "length"
            return True
        return False

    def _progress(self, done: int) -> None:
        n = len(self._request.tokens)
        self._caller.state = RequestState(phase="prefill", done=done, total=n)
        if self._caller.progress is not None:
            self._caller.progress(Progress(phase="prefill", done=done, total=n))

    def finish(self, seat: Seat | None) -> Outcome:
        """Emit what is left and the result; `seat` is where it ran, None if it never did."""
        if self._error is not None:
            raise self._error
        rest = self._output.finish()
        if self._output.stopped is not None:
            self._reason = "stop"
        if rest is not None:
            self._caller.emit(rest)
        result = self._result(seat)
        self._caller.state = replace(self._caller.state, phase="done")
        self._caller.emit(result)
        return "cancelled" if self._reason == "cancelled" else "done"

    def fail(self, error: BaseException) -> None:
        """Emit an error as the last event."""
        self._caller.state = replace(self._caller.state, phase="done")
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            # it would end the caller's loop as if all were well
            error = RuntimeError(f"a callback raised {type(error).__name__}")
        self._caller.emit(error)

    def _result(self, seat: Seat | None) -> GenerationResult:
        speculation = None if seat is None else seat.speculation
        repeatable = speculation is None or speculation.repeatable
        timings = Timings(
            queue_s=self._started_s - self._caller.submitted_s,
            prefill_s=self._read_s - self._started_s,
            decode_s=time.perf_counter() - self._read_s,
        )
        return GenerationResult(
            text=self._output.text,
            tokens=tuple(self._tokens),
            finish_reason=self._reason,
            usage=Usage(
                prompt_tokens=len(self._request.tokens),
                completion_tokens=len(self._tokens),
                cached_tokens=0 if seat is None else seat.n_cached,
                reasoning_tokens=count_reasoning(
                    self._tokenizer, self._request.reasoning_block, self._tokens
                ),
            ),
            timings=timings,
            seed=self._sampler.seed if repeatable else None,
            stop=self._output.stopped,
            logprobs=tuple(self._logprobs),
            speculation=None if speculation is None else speculation.stats,
            plain_reason=self._plain_reason(seat),
            reuse=None if seat is None or seat.prompt is None else self._reuse(seat.prompt.match),
        )

    def _plain_reason(self, seat: Seat | None) -> str | None:
        if not self._drafts:
            return self._no_drafter or SWITCHED_OFF
        if seat is None:
            return None
        if seat.plain_reason is not None:
            return seat.plain_reason
        return None if seat.speculation is None else seat.speculation.why_plain

    def _reuse(self, match: Match) -> PromptReuse:
        tokens, markers, n_reused = self._request.tokens, self._markers, match.n_reused
        return PromptReuse(
            n_reused=n_reused,
            n_common=match.n_common,
            stop=match.stop,
            tier=match.tier,
            holds_answer=markers is not None and holds_answer(tokens, self._boundaries, n_reused, markers),
        )
