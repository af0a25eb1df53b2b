"""One request from prompt to answer on the engine's thread. Layer 6."""

from __future__ import annotations

import time
from typing import Protocol

from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.loader import Loaded
from pyggml_dflash.engine.output import OutputAssembler
from pyggml_dflash.engine.sampling import Sampler, best, logprobs_of
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.model.tokenizer import TextDecoder
from pyggml_dflash.requests import (
    SWITCHED_OFF,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Progress,
    ProgressCallback,
    TextPiece,
    Timings,
    TokenLogprob,
    Usage,
)


class Caller(Protocol):
    """Where pieces go, and whether anybody still wants them."""

    progress: ProgressCallback | None
    submitted_s: float

    @property
    def cancelled(self) -> bool:
        """True once the answer is no longer wanted."""

    def emit(self, event: TextPiece) -> None:
        """Take a piece."""


class Generation:
    """The state of one running request. Used once."""

    def __init__(self, loaded: Loaded, request: GenerationRequest) -> None:
        self._core, self._request = loaded.core, request
        self._stop_ids = frozenset() if request.ignore_eos else loaded.tokenizer.stop_ids
        self._sampler = Sampler(
            request.sampling, request.tokens, n_vocab=loaded.info.n_vocab, forbidden=loaded.forbidden_ids
        )
        self._output = OutputAssembler(
            TextDecoder(loaded.tokenizer, continuation=request.continues_text), request.stop
        )
        room = self._core.n_ctx - len(request.tokens) + 1
        self._limit = room if request.max_tokens is None else min(room, request.max_tokens)
        self._drafts, self._spec_width = loaded.drafts(request), loaded.width(request)
        self._no_drafter = loaded.info.spec_reason
        self._speculation: Speculation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def run(self, caller: Caller) -> GenerationResult:
        """Prefill, then decode until the answer ends; pieces go to the caller as they become certain."""
        started = time.perf_counter()
        slot = self._core.slots[0]
        slot.reset()
        logits = self._prefill(caller)
        prefilled = time.perf_counter()
        reason: FinishReason = "cancelled" if logits is None else self._decode(caller, logits)
        rest = self._output.finish()
        if self._output.stopped is not None:
            reason = "stop"
        if rest is not None:
            caller.emit(rest)
        return self._result(
            reason,
            Timings(
                queue_s=started - caller.submitted_s,
                prefill_s=prefilled - started,
                decode_s=time.perf_counter() - prefilled,
            ),
        )

    def _prefill(self, caller: Caller) -> Logits | None:
        tokens, core = self._request.tokens, self._core
        n, chunk, slot = len(tokens), core.chunk, core.slots[0]
        logits: Logits | None = None
        core.trims.begin(slot.n_past, n)
        if caller.progress is not None:
            caller.progress(Progress(phase="prefill", done=0, total=n))
        for start in range(0, n, chunk):
            if caller.cancelled:
                return None
            stop = min(n, start + chunk)
            ahead = tokens[stop : stop + chunk]
            part, last = tokens[start:stop], stop == n
            logits = core.prefill(slot, part, last=last, ahead=ahead, drafting=self._drafts)
            if caller.progress is not None:
                caller.progress(Progress(phase="prefill", done=stop, total=n))
        return logits

    def _decode(self, caller: Caller, logits: Logits) -> FinishReason:
        core, sampler, slot = self._core, self._sampler, self._core.slots[0]
        decode, pick = core.decode, sampler.pick if sampler.needs_logits else best
        if self._drafts:
            self._speculation = core.speculation(sampler, self._spec_width, self._stop_ids)
        if self._speculation is not None:
            return self._decode_runs(caller, logits, self._speculation)
        while True:
            if caller.cancelled:
                return "cancelled"
            token = pick(logits)
            sampler.accept(token)
            reason = self._take(caller, token, logits)
            if reason is not None:
                return reason
            logits = decode(slot, token)

    def _decode_runs(self, caller: Caller, logits: Logits, speculation: Speculation) -> FinishReason:
        if caller.cancelled:
            return "cancelled"
        token = self._sampler.pick(logits)
        self._sampler.accept(token)
        reason = self._take(caller, token, logits)
        if reason is not None:
            return reason
        core, limit = self._core, self._limit - 1
        for run in speculation.runs(core.slots[0], token, core.n_ctx, limit=limit):
            for chosen in run:
                reason = self._take(caller, chosen.token, chosen.logits)
                if reason is not None:
                    return reason
            if caller.cancelled:
                return "cancelled"
        return "length"

    def _take(self, caller: Caller, token: int, logits: Logits) -> FinishReason | None:
        """Make `token` part of the answer; why the answer ends here, or None if it goes on."""
        if token in self._stop_ids:
            return "stop"
        self._tokens.append(token)
        n_top = self._request.logprobs
        logprob = None if n_top is None else logprobs_of(logits, token, n_top)
        if logprob is not None:
            self._logprobs.append(logprob)
        piece = self._output.push(token, logprob)
        if piece is not None:
            caller.emit(piece)
        if self._output.stopped is not None:
            return "stop"
        return "length" if len(self._tokens) >= self._limit else None

    def _result(self, reason: FinishReason, timings: Timings) -> GenerationResult:
        repeatable = self._speculation is None or self._speculation.repeatable
        return GenerationResult(
            text=self._output.text,
            tokens=tuple(self._tokens),
            finish_reason=reason,
            usage=Usage(prompt_tokens=len(self._request.tokens), completion_tokens=len(self._tokens)),
            timings=timings,
            seed=self._sampler.seed if repeatable else None,
            stop=self._output.stopped,
            logprobs=tuple(self._logprobs),
            speculation=None if self._speculation is None else self._speculation.stats,
            plain_reason=self._plain_reason(),
        )

    def _plain_reason(self) -> str | None:
        if self._speculation is not None:
            return self._speculation.why_plain
        return None if self._drafts else self._no_drafter or SWITCHED_OFF
