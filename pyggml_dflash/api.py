"""The public face: `Engine` opens a model and generates text. Layer 7.

Every method may be called from any thread. Native memory belongs to one thread inside the engine; requests
are queued to it and take a slot in order, as many at a time as there are slots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pyggml_dflash.batch import Batch, BatchItem, BatchRequest, BatchResult
from pyggml_dflash.engine.constraint import JSON_SPACE
from pyggml_dflash.engine.convert import ConvertedDraft, convert_draft
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.fit_report import FitAlternative, FitReport
from pyggml_dflash.engine.fit_report import fit_report as make_fit_report
from pyggml_dflash.engine.forced import AllLogits, Scores
from pyggml_dflash.engine.loaded import EngineInfo, Loaded
from pyggml_dflash.engine.loader import load, reload
from pyggml_dflash.engine.loop import EngineThread
from pyggml_dflash.engine.report import ModelReport, TensorShare, inspect_model
from pyggml_dflash.engine.route_stats import route_stats
from pyggml_dflash.engine.rpc_worker import serve_worker
from pyggml_dflash.engine.spec_choice import DEFAULT_MODEL
from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml.device import DeviceInfo, backend_features, devices, worker_devices
from pyggml_dflash.model.answer import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    ParsedAnswer,
    ReasoningDelta,
    ToolCall,
)
from pyggml_dflash.model.answer_parser import AnswerParser
from pyggml_dflash.model.template_file import read_template
from pyggml_dflash.model.tool_grammar import tool_grammar
from pyggml_dflash.model.tools import Tool, read_tools
from pyggml_dflash.options import (
    TRIM_VARIABLE,
    Auto,
    DraftCausal,
    EngineOptions,
    HostMemory,
    KVType,
    LinkType,
    MtpConvention,
    SamplingOptions,
    Spec,
    Split,
    Switch,
    as_path,
    check_callback,
    check_flag,
    check_int,
    check_text,
    parse_trim_interval,
    refusal,
)
from pyggml_dflash.plan.chunk import DeviceShare
from pyggml_dflash.plan.context import Probe
from pyggml_dflash.plan.hot_experts import RouteStats
from pyggml_dflash.requests import (
    Constraint,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    ProgressCallback,
    ReasoningBlock,
    TextPiece,
    TokenLogprob,
    check_constraint,
)
from pyggml_dflash.snapshots import Snapshots
from pyggml_dflash.streams import AsyncTextStream, TextStream

LOG: Final = logging.getLogger(__name__)
Prompt: TypeAlias = "str | Sequence[int]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a text under the model, token by token; the first token has none."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = field(repr=False)  # of tokens[1:]

    @property
    def logprob(self) -> float:
        """Natural log of the whole text's probability, given its first token."""
        return sum(t.logprob for t in self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        with np.errstate(over="ignore"):  # infinity says it
            return float(np.exp(-self.logprob / max(1, len(self.logprobs))))


def _as_tuple(values: Any) -> Any:
    """A sequence as a tuple; anything else as it is, for the options to refuse."""
    return tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else values


def _path(file: object, name: str) -> Path | None:
    return None if file is None else as_path(name, file)


def fit_report(options: EngineOptions | None = None) -> FitReport:
    """The context that fits and where every byte of it goes, without loading or running anything.

    Refuses what opening an engine refuses, except a context that does not fit: the report says so.
    """
    return make_fit_report(_checked(options))


def _checked(options: object) -> EngineOptions:
    if options is None:
        return EngineOptions()
    if not isinstance(options, EngineOptions):
        raise refusal("options", options, "they must be EngineOptions or None")
    return options


def _from_environment(options: EngineOptions) -> EngineOptions:
    """The options, with the trim interval that the environment asks for where they leave it open."""
    text = os.environ.get(TRIM_VARIABLE)
    if options.trim_interval is not None or text is None:
        return options
    interval = parse_trim_interval(text)
    if interval is None:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        LOG.warning("%s is %r, no number of tokens; pools are not trimmed in prompts", TRIM_VARIABLE, shown)
    return replace(options, trim_interval=interval or 0)


def _load(options: EngineOptions, report: ProgressCallback, parked: Loaded | None) -> Loaded:
    return load(options, report) if parked is None else reload(options, parked, report)


def _close_leaked(thread: EngineThread) -> None:
    thread.close()  # first, since the warning may be an error
    warnings.warn("an Engine was not closed", ResourceWarning, stacklevel=2)


class Engine:
    """A loaded model. Use as a context manager, or call `close`.

    Open one with `Engine.open("model.gguf", max_ctx=8192)`, or with `Engine(EngineOptions(...))`.
    Opening raises `ModelFileError`, `ContextFitError`, `DeviceMemoryError` or `UsageError`, each before
    anything is left allocated.
    """

    def __init__(
        self, options: EngineOptions | None = None, *, progress: ProgressCallback | None = None
    ) -> None:
        check_callback("progress", progress)
        self.options = chosen = _from_environment(_checked(options))
        self._thread = EngineThread(chosen)
        # Also runs when the interpreter ends, so that no thread computes while libraries are taken down. It
        # is there before the thread is, since an interrupt may come anywhere.
        self._net = weakref.finalize(self, _close_leaked, self._thread)
        try:
            self._loaded: Loaded = self._thread.start(partial(_load, chosen), progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        max_ctx: int | str | None = None,
        min_ctx: int | None = None,
        slots: int = 1,
        queue_limit: int | None = None,
        prefill_share: float = 1.0,
        admission_coalesce_ms: int = 0,
        allow_batch_variance: bool = False,
        chunk: int | Auto = "auto",
        device: str | None = None,
        devices: Sequence[str] = (),
        split: Split = "auto",
        tensor_split: Sequence[float] = (),
        expert_device: str | None = None,
        link_type: LinkType = "f32",
        prompt_streams: int | Auto = "auto",
        kv_overflow_device: str | None = None,
        expert_placement: str | Path | None = None,
        expert_budget_mib: int = 8192,
        stream_experts: int | Auto = "auto",
        expert_memory: HostMemory = "pageable",
        worker_timeout_s: int = 600,
        device_cap: Mapping[str, int] | None = None,
        device_reserve_mib: int = 0,
        fit_margin: str = "10%",
        threads: int | None = None,
        cache_type_k: KVType = "f16",
        cache_type_v: KVType = "f16",
        flash_attn: Switch = "auto",
        repack: Switch = "auto",
        draft: str | Path | None = None,
        draft_causal: DraftCausal = "auto",
        spec: Spec = "auto",
        spec_width: int | Auto = "auto",
        mtp_convention: MtpConvention = "all-streams",
        trim_interval: int | Auto | None = None,
        prefix_cache_max_mib: int | Auto = "auto",
        prefix_cache_entries: int = 32,
        snapshot_memory: HostMemory = "pageable",
        kv_cache_dir: str | Path | None = None,
        kv_cache_budget: int = 4096,
        kv_cache_min_tokens: int = 512,
        chat_template: str | Path | None = None,
        nfc: bool = True,
        progress: ProgressCallback | None = None,
    ) -> Engine:
        """Load a model; without one, the small model that ships with the package.

        Arguments are the fields of `EngineOptions`. `progress` is called on the engine's thread while
        weights load and prompts are read.
        """
        options = EngineOptions(
            model=_path(model, "model"),
            max_ctx=max_ctx,
            min_ctx=min_ctx,
            slots=slots,
            queue_limit=queue_limit,
            prefill_share=prefill_share,
            admission_coalesce_ms=admission_coalesce_ms,
            allow_batch_variance=allow_batch_variance,
            chunk=chunk,
            device=device,
            devices=(devices,) if isinstance(devices, str) else _as_tuple(devices),
            split=split,
            tensor_split=_as_tuple(tensor_split),
            expert_device=expert_device,
            link_type=link_type,
            prompt_streams=prompt_streams,
            kv_overflow_device=kv_overflow_device,
            expert_placement=_path(expert_placement, "expert_placement"),
            expert_budget_mib=expert_budget_mib,
            stream_experts=stream_experts,
            expert_memory=expert_memory,
            worker_timeout_s=worker_timeout_s,
            device_cap={} if device_cap is None else device_cap,
            device_reserve_mib=device_reserve_mib,
            fit_margin=fit_margin,
            threads=threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            flash_attn=flash_attn,
            repack=repack,
            draft=_path(draft, "draft"),
            draft_causal=draft_causal,
            spec=spec,
            spec_width=spec_width,
            mtp_convention=mtp_convention,
            trim_interval=trim_interval,
            prefix_cache_max_mib=prefix_cache_max_mib,
            prefix_cache_entries=prefix_cache_entries,
            snapshot_memory=snapshot_memory,
            kv_cache_dir=_path(kv_cache_dir, "kv_cache_dir"),
            kv_cache_budget=kv_cache_budget,
            kv_cache_min_tokens=kv_cache_min_tokens,
            chat_template=_path(chat_template, "chat_template"),
            nfc=nfc,
        )
        return cls(options, progress=progress)

    @property
    def info(self) -> EngineInfo:
        """What was opened and what was chosen where an option said 'auto'."""
        return self._loaded.info

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
        reasoning_block: ReasoningBlock | None = None,
        progress: ProgressCallback | None = None,
    ) -> TextStream:
        """Continue a text or token ids, piece by piece.

        `spec` and `spec_width` change how tokens are drafted, within what the engine was opened with. Without
        `cache_prompt` no stored state is continued, and none is stored; the answer is the same. `constraint`
        holds from the first token on, or behind the `reasoning_block`. Raises
        `ContextOverflowError` if prompt and answer cannot fit, before anything is computed.
        """
        check_callback("progress", progress)
        request = self._request(
            prompt,
            max_tokens,
            sampling,
            stop,
            logprobs,
            (spec, spec_width),
            cache_prompt=cache_prompt,
            ignore_eos=ignore_eos,
            constraint=constraint,
            reasoning_block=reasoning_block,
        )
        return TextStream(self._thread.submit(request, progress), self)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
        reasoning_block: ReasoningBlock | None = None,
        progress: ProgressCallback | None = None,
    ) -> GenerationResult:
        """Continue a text or token ids and return the whole answer."""
        with self.stream(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            spec=spec,
            spec_width=spec_width,
            cache_prompt=cache_prompt,
            ignore_eos=ignore_eos,
            constraint=constraint,
            reasoning_block=reasoning_block,
            progress=progress,
        ) as stream:
            return stream.result

    async def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        keep_head: bool = False,
        ignore_eos: bool = False,
        continues_text: bool = True,
        constraint: Constraint | None = None,
        reasoning_block: ReasoningBlock | None = None,
        progress: ProgressCallback | None = None,
    ) -> AsyncTextStream:
        """Queue a prompt and return its answer's stream; the event loop stays free.

        `keep_head`: many conversations share the first turn, as they do with tools. `continues_text`
        False: the answer is a turn of its own, as after a rendered chat. `progress` is called on the engine's
        thread. Raises `ContextOverflowError` as `stream` does.
        """
        check_callback("progress", progress)
        prepare = partial(
            self._request,
            cache_prompt=cache_prompt,
            keep_head=keep_head,
            ignore_eos=ignore_eos,
            continues_text=continues_text,
            constraint=constraint,
            reasoning_block=reasoning_block,
        )
        drafting = spec, spec_width
        request = await asyncio.to_thread(prepare, prompt, max_tokens, sampling, stop, logprobs, drafting)
        handle = self._thread.submit(request, progress, loop=asyncio.get_running_loop())
        return AsyncTextStream(handle, self)

    async def astream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
        reasoning_block: ReasoningBlock | None = None,
    ) -> AsyncIterator[TextPiece]:
        """`stream` for asyncio: the event loop stays free; leaving the loop early cancels."""
        stream = await self.submit(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            spec=spec,
            spec_width=spec_width,
            cache_prompt=cache_prompt,
            ignore_eos=ignore_eos,
            constraint=constraint,
            reasoning_block=reasoning_block,
        )
        try:
            async for piece in stream:
                yield piece
        finally:
            stream.cancel()

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool | None = None,
        reasoning_budget: int = -1,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`.

        A `reasoning_budget` of 0 switches reasoning off where the template can.
        """
        template = self._loaded.template
        check_int("reasoning_budget", reasoning_budget, -1)
        if reasoning_budget == 0:
            if reasoning:
                raise UsageError("reasoning is True, but reasoning_budget is 0")
            reasoning = False if template.reasoning_supported else reasoning
        return template.render(
            messages, tools=tools, reasoning=reasoning, add_generation_prompt=add_generation_prompt
        )

    def answer_parser(self, prompt: str, *, tools: Sequence[Mapping[str, Any]] | None = None) -> AnswerParser:
        """What takes the answer to a rendered `prompt` apart, as its text comes or as a whole.

        `tools` are those that the prompt offers and that may be called: none, and nothing is a call.
        """
        check_text("prompt", prompt)
        form = self._loaded.template.form
        return AnswerParser(form, read_tools(tools), is_open=form.is_open(prompt))

    def reasoning_block(self, prompt: str, budget: int = -1) -> ReasoningBlock | None:
        """The reasoning that the answer to a rendered `prompt` begins with or may; None if it has none.

        `budget`: tokens after which it is closed; -1 for any number.
        """
        check_text("prompt", prompt)
        check_int("reasoning_budget", budget, -1)
        return self._loaded.template.form.block(prompt, budget)

    def tool_constraint(
        self, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
    ) -> Constraint:
        """What makes an answer one call of a tool or, if they may be `parallel`, several; of `name` just one.

        UsageError: no such tool, or one whose schema no answer can be held to.
        """
        form, read = self._loaded.template.form, read_tools(tools)

        def made(of: Sequence[Tool], name: str | None) -> Constraint:
            grammar = tool_grammar(form, of, name=name, parallel=parallel, space=JSON_SPACE)
            return Constraint(kind="grammar", text=grammar)

        constraint = made(read, name)
        try:
            self.check_constraint(constraint)
        except UsageError:
            for tool in read if name is None else ():  # which of them?
                try:
                    self.check_constraint(made([tool], None))
                except UsageError as error:
                    raise UsageError(f"tool {tool.name!r}: {error}") from error
            raise
        return constraint

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise the `UsageError` that says why no answer can be held to it; requests need not do it again."""
        self._thread.check_open()
        check_constraint(constraint)
        self._loaded.constraints.matcher(constraint)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool | None = None,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
        reasoning_budget: int = -1,
        progress: ProgressCallback | None = None,
    ) -> TextStream:
        """Answer a conversation, piece by piece.

        The rendered prompt is tokenized as it is: a BOS stands where the template writes one. `constraint`
        holds behind the reasoning, which ends after `reasoning_budget` tokens; -1 for any number.
        """
        check_callback("progress", progress)
        prompt = self.render_chat(
            messages, tools=tools, reasoning=reasoning, reasoning_budget=reasoning_budget
        )
        request = self._request(
            self.tokenize(prompt, add_special=False),
            max_tokens,
            sampling,
            stop,
            logprobs,
            (spec, spec_width),
            cache_prompt=cache_prompt,
            keep_head=bool(tools),
            ignore_eos=ignore_eos,
            continues_text=False,
            constraint=constraint,
            reasoning_block=self.reasoning_block(prompt, reasoning_budget),
        )
        return TextStream(self._thread.submit(request, progress), self)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool | None = None,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        spec: Spec | None = None,
        spec_width: int | Auto | None = None,
        cache_prompt: bool = True,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
        reasoning_budget: int = -1,
    ) -> GenerationResult:
        """Answer a conversation of `{"role": ..., "content": ...}` messages."""
        with self.stream_chat(
            messages,
            tools=tools,
            reasoning=reasoning,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            spec=spec,
            spec_width=spec_width,
            cache_prompt=cache_prompt,
            ignore_eos=ignore_eos,
            constraint=constraint,
            reasoning_budget=reasoning_budget,
        ) as stream:
            return stream.result

    def batch(self, requests: Iterable[BatchItem], *, ordered: bool = True) -> Batch:
        """Answer many requests, as many at a time as there are slots; iterate over the results.

        A request is a text or token ids to continue, the messages of a chat, or a `BatchRequest`; they are
        taken one by one while somebody iterates. One that fails is a result with its error. `ordered` False:
        results come as they get ready. Leaving the `with` block of the batch cancels what still runs.
        """
        check_flag("ordered", ordered)
        return Batch(self, requests, ordered=ordered)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds what the model expects at the start (BOS)."""
        self._thread.check_open()
        return self._loaded.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        self._thread.check_open()
        return self._loaded.tokenizer.decode(self._loaded.check_tokens(tokens), skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token's text, which may be a part of a character."""
        self._thread.check_open()
        return self._loaded.tokenizer.token_bytes(*self._loaded.check_tokens([token]))

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Teacher-forced logits, float32 [n_tokens, n_vocab]: row i is the prediction after token i."""
        ids = self._loaded.check_tokens(tokens)
        self._loaded.check_length(len(ids))
        if not ids:
            self._thread.check_open()
            return np.empty((0, self.info.n_vocab), np.float32)
        return self._thread.read(AllLogits(ids))

    def score(self, text: Prompt, *, top: int = 0) -> Score:
        """Log-probability of every token of a text after its first, with `top` alternatives each."""
        ids = self._loaded.check_tokens(self.tokenize(text) if isinstance(text, str) else text)
        if len(ids) < 2:
            raise UsageError(f"a text of {len(ids)} tokens has nothing to score; at least 2 are needed")
        check_int("top", top, 0, 100)
        self._loaded.check_length(len(ids))
        return Score(tokens=ids, logprobs=self._thread.read(Scores(ids, top)))

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes held now, by device and by what they are for."""
        return self._thread.call(lambda core, _: core.memory(), when_parked=True)

    def fit_report(self) -> FitReport:
        """How the context was chosen, and where every byte goes."""
        return self._loaded.fit

    def stats(self) -> EngineStats:
        """What the engine does now, and did since it was opened: requests, slots, stored states,
        scratch pools and their trims, memory of devices."""
        return self._thread.stats()

    def trim(self) -> int:
        """Give cached blocks of legacy scratch pools back to the driver; returns the bytes released."""

        def released(core: EngineCore, _: object) -> int:
            before = sum(trim.released_bytes for trim in core.stats().trims)
            core.release_scratch()
            return sum(trim.released_bytes for trim in core.stats().trims) - before

        return self._thread.call(released)

    @property
    def snapshots(self) -> Snapshots:
        """The stored states that prompts continue."""
        return Snapshots(self._thread)

    @property
    def alive(self) -> bool:
        """True until `close`; False also after a failure that ended the engine's thread."""
        return self._thread.alive

    @property
    def parked(self) -> bool:
        """True between `park` and `unpark`."""
        return self._thread.parked

    def park(self, *, cancel: bool = False) -> None:
        """Give the memory of devices back: weights, slots, graphs. Process, options, context and chunk stay.

        From now on requests are refused with `EngineParked`; those there are end first, or are cancelled.
        States stored in system memory stay, too; a folder takes what it lacks. What is free of the process's
        heap goes back to the system, where the C library can do that, as glibc can. Nothing happens if it is
        parked.
        """
        check_flag("cancel", cancel)
        self._thread.park(cancel=cancel)

    def unpark(self, *, progress: ProgressCallback | None = None) -> None:
        """Load the model again, with the context and the chunk it had; nothing is fitted again.

        Raises what opening raises; the engine stays parked then. Nothing happens if it is not parked.
        """
        check_callback("progress", progress)
        self._loaded = self._thread.unpark(progress)

    def close(self) -> None:
        """Cancel what runs and free everything; a second call does nothing."""
        self._thread.close()
        self._net.detach()  # last, so that an interrupt before leaves the net

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        sampling: SamplingOptions | None,
        stop: Sequence[str],
        logprobs: int | None,
        drafting: tuple[Spec | None, int | Auto | None],
        *,
        cache_prompt: bool = True,
        keep_head: bool = False,
        ignore_eos: bool = False,
        continues_text: bool = True,
        constraint: Constraint | None = None,
        reasoning_block: ReasoningBlock | None = None,
    ) -> GenerationRequest:
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            raise refusal("stop", stop, "it must be a sequence of strings")
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        request = GenerationRequest(
            tokens=self._loaded.check_tokens(tokens),
            max_tokens=max_tokens,
            sampling=SamplingOptions() if sampling is None else sampling,
            stop=tuple(stop),
            logprobs=logprobs,
            spec=drafting[0],
            spec_width=drafting[1],
            ignore_eos=ignore_eos,
            continues_text=continues_text,
            cache_prompt=cache_prompt,
            keep_head=keep_head,
            constraint=constraint,
            reasoning_block=reasoning_block,
        )
        self._loaded.check(request)
        return request


__all__ = [
    "DEFAULT_MODEL",
    "AnswerEvent",
    "AnswerParser",
    "AsyncTextStream",
    "Batch",
    "BatchItem",
    "BatchRequest",
    "BatchResult",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "ConvertedDraft",
    "DeviceInfo",
    "DeviceShare",
    "Engine",
    "EngineInfo",
    "FitAlternative",
    "FitReport",
    "Messages",
    "ModelReport",
    "ParsedAnswer",
    "Probe",
    "Prompt",
    "ReasoningDelta",
    "RouteStats",
    "Score",
    "Snapshots",
    "TensorShare",
    "TextStream",
    "ToolCall",
    "backend_features",
    "convert_draft",
    "devices",
    "fit_report",
    "inspect_model",
    "read_template",
    "route_stats",
    "serve_worker",
    "worker_devices",
]
