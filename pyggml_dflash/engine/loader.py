"""From options to a loaded model: the one place where the parts are put together. Layer 6.

Everything that can be refused is refused before memory is taken: file, architecture, tensors,
options, device, and the bytes that context and weights will need.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.arch.base import Architecture, GraphKey, StateLayout
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafter_loader import (
    SpeculationPlan,
    choose_recording,
    make_drafter,
    plan_speculation,
)
from pyggml_dflash.engine.graphs import Forwards, Model, Recording, build_forward
from pyggml_dflash.engine.inputs import BUCKET, Inputs, bucketed
from pyggml_dflash.errors import (
    BackendError,
    ContextFitError,
    ContextOverflowError,
    DamagedFileError,
    UsageError,
)
from pyggml_dflash.ggml.device import Backend, choose_device, devices
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.placement import check_supported
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.model.weights import LoadedWeights, Placement, check_tensors, place_weights
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import GenerationRequest, Progress, ProgressCallback
from pyggml_dflash.state.slot import SlotTable

DEFAULT_MODEL: Final = Path(__file__).resolve().parent.parent / "models" / "pico-q8_0.gguf"
DEFAULT_MAX_CTX: Final = 8192
DEFAULT_CHUNK: Final = 512
N_SLOTS: Final = 1
# For one row ggml's fused attention on CPUs is slower than the plain one from about 200 cache rows on: a step
# takes 7 to 25 % longer (SmolLM2 135M, 240 to 4000 rows). Below, and for prompt chunks, it is the faster one.
# The plain one copies the values of a layer, so its use ends at a context not far above the measured ones.
CPU_PLAIN_KV: Final = range(BUCKET + 1, 16 * 1024 + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was opened, and what was chosen where an option left the choice."""

    model: Path
    name: str
    architecture: str
    device: str
    threads: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_layer: int
    chunk: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: bool
    weight_bytes: dict[str, int]  # by where they lie: 'mapped', 'uploaded', or a repacked layout
    state_bytes: int
    has_chat_template: bool
    reasoning_supported: bool
    spec: str  # 'off', or the drafter: 'dflash', 'mtp'
    rollback: str | None  # how rejected drafts are taken back: 'snapshots' or 'replay'


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready; everything native in it belongs to `core`."""

    core: EngineCore
    tokenizer: Tokenizer
    template: ChatTemplate
    info: EngineInfo
    forbidden_ids: npt.NDArray[np.int64] | None  # vocabulary rows without a token
    spec_width: int | None  # rows of every verify forward, where the user says so

    def check_length(self, request: GenerationRequest) -> None:
        """Raise `ContextOverflowError` if prompt and answer cannot fit the context."""
        needed = len(request.tokens) + max(0, (request.max_tokens or 1) - 1)
        if needed > self.info.n_ctx:
            raise ContextOverflowError(
                n_prompt=len(request.tokens), max_tokens=request.max_tokens, n_ctx=self.info.n_ctx
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options after every choice is made, before anything is allocated."""

    n_ctx: int
    chunk: int
    type_k: ElementType
    type_v: ElementType
    layout: StateLayout


def settle(options: EngineOptions, architecture: Architecture, config: ModelConfig) -> Settings:
    """Choose what options leave open; a value that cannot be used raises `UsageError`."""
    trained = config.n_ctx_train
    n_ctx = min(trained, DEFAULT_MAX_CTX) if options.max_ctx is None else options.max_ctx
    if n_ctx > trained:
        raise UsageError(f"max_ctx is {n_ctx}; this model was trained for at most {trained}")
    chunk = min(DEFAULT_CHUNK, n_ctx) if options.chunk == "auto" else options.chunk
    if chunk > n_ctx:
        raise UsageError(f"chunk is {chunk}; it must be at most the context of {n_ctx}")
    types = []
    for name in ("cache_type_k", "cache_type_v"):
        type = ElementType[getattr(options, name).upper()]
        if config.head_dim % type.block:
            raise UsageError(
                f"{name} is {type.label!r}; heads of {config.head_dim} are no whole number of its blocks "
                f"of {type.block}: use f16, bf16 or f32"
            )
        types.append(type)
    layout = architecture.state_layout(config, bucketed(n_ctx), types[0], types[1])
    return Settings(n_ctx=n_ctx, chunk=chunk, type_k=types[0], type_v=types[1], layout=layout)


def check_memory(
    settings: Settings, placements: list[Placement], config: ModelConfig, free: int, device: str
) -> None:
    """Raise `ContextFitError` if state, inputs and moved weights exceed what is free on the device."""
    moved = sum(p.source.n_bytes for p in placements if p.kind != "mapped")
    layout, n_ctx = settings.layout, settings.layout.n_ctx
    per_position = (layout.slot_bytes - layout.recurrent_bytes) // n_ctx + 2 * (settings.chunk + 1)
    logits = 4 * config.n_vocab
    fixed = moved + layout.recurrent_bytes + logits
    needed = fixed + per_position * n_ctx
    if needed > free:
        fits = max(0, (free - fixed) // max(1, per_position) // BUCKET * BUCKET)
        raise ContextFitError(asked=settings.n_ctx, fits=fits, missing=needed - free, device=device)


def load(options: EngineOptions, report: ProgressCallback) -> Loaded:
    """Open the file, check everything, then allocate and upload. Runs on the engine's thread."""
    with ExitStack() as stack:
        file = GgufFile.open(options.model or DEFAULT_MODEL)
        stack.callback(file.close)
        name, architecture = architecture_of(file)
        config = architecture.read_config(file, name)
        plan = plan_speculation(options, file, config, stack)
        more = () if plan is None else plan.target_tensors
        specs = check_tensors(file, [*architecture.tensors(config, file), *more])
        tokenizer = Tokenizer.from_metadata(file.metadata, nfc=options.nfc)
        if tokenizer.n_vocab > config.n_vocab:
            raise DamagedFileError(
                f"{file.path}: {tokenizer.n_vocab} tokens, but 'token_embd.weight' has {config.n_vocab} rows"
            )
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
        settings = settle(options, architecture, config)

        ledger = Ledger()
        backend = Backend(choose_device(options.device), threads=options.threads)
        stack.callback(backend.close)
        placements = place_weights(file, specs, backend, repack=options.repack != "off")
        check_memory(
            settings, placements, config, ledger.free(backend.name, backend.memory_free()), backend.name
        )
        weights = LoadedWeights(
            file,
            placements,
            backend,
            ledger,
            lambda done, total: report(Progress(phase="load", done=done, total=total)),
        )
        stack.callback(weights.close)
        slots = SlotTable(backend, ledger, settings.layout, N_SLOTS)
        stack.callback(slots.close)
        flash = choose_flash_attn(options, backend, ledger, Model(architecture, config, weights, True), slots)
        model = Model(architecture, config, weights, flash, plain_kv(options, backend))
        host = None if backend.is_host else _host_backend(stack, options.threads)
        free = ledger.free(backend.name, backend.memory_free())
        recording = None if plan is None else choose_recording(plan, architecture, config, backend, free)
        forwards = Forwards(
            backend, ledger, model, slots, chunk=settings.chunk, host=host, recording=recording
        )
        stack.callback(forwards.close)
        drafter = None if plan is None else make_drafter(plan, options, backend, ledger, forwards, stack)
        info = _info(
            options, file, config, settings, backend, weights, flash, slots, template, recording, plan
        )
        unused = sorted({*tokenizer.unused_ids, *range(tokenizer.n_vocab, config.n_vocab)})
        return Loaded(
            core=EngineCore(forwards, slots, ledger, settings.n_ctx, stack.pop_all(), drafter),
            tokenizer=tokenizer,
            template=template,
            info=info,
            forbidden_ids=np.array(unused, np.int64) if unused else None,
            spec_width=options.spec_width,
        )


def _host_backend(stack: ExitStack, threads: int | None) -> Backend:
    cpu = next(d for d in devices() if d.kind == "cpu")
    host = Backend(cpu, threads=threads)
    stack.callback(host.close)
    return host


def choose_flash_attn(
    options: EngineOptions, backend: Backend, ledger: Ledger, model: Model, slots: SlotTable
) -> bool:
    """Whether to use fused attention: as asked, or where the device can; a cache that needs it insists."""
    if options.flash_attn == "off":
        return False
    config = model.config
    inputs = Inputs(
        backend,
        ledger,
        model.architecture,
        config,
        max_rows=1,
        max_kv=BUCKET,
        embedded=not backend.is_host,
    )
    try:
        key = GraphKey(n_tokens=1, n_kv=BUCKET, slot=0, output="last")
        builder, _ = build_forward(backend, model, slots.tensors, inputs, key)
        try:
            check_supported(backend, builder)
        finally:
            builder.close()
    except BackendError as error:
        quantized = options.cache_type_v in ("q8_0", "q4_0")
        if options.flash_attn == "on" or quantized:
            raise BackendError(f"flash attention is not possible: {error}") from error
        return False
    finally:
        inputs.close()
    return True


def plain_kv(options: EngineOptions, backend: Backend) -> range:
    """Cache rows over which decode and verify go without flash attention where the choice is ours."""
    floats = all(t in ("f32", "f16", "bf16") for t in (options.cache_type_k, options.cache_type_v))
    return CPU_PLAIN_KV if options.flash_attn == "auto" and backend.is_host and floats else range(0)


def _info(
    options: EngineOptions,
    file: GgufFile,
    config: ModelConfig,
    settings: Settings,
    backend: Backend,
    weights: LoadedWeights,
    flash: bool,
    slots: SlotTable,
    template: ChatTemplate,
    recording: Recording | None,
    plan: SpeculationPlan | None,
) -> EngineInfo:
    return EngineInfo(
        model=file.path,
        name=file.get_str("general.name", file.path.stem),
        architecture=config.architecture,
        device=backend.name,
        threads=backend.n_threads,
        n_ctx=settings.n_ctx,
        n_ctx_train=config.n_ctx_train,
        n_vocab=config.n_vocab,
        n_layer=config.n_layer,
        chunk=settings.chunk,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        flash_attn=flash,
        weight_bytes=dict(weights.n_bytes),
        state_bytes=slots.n_bytes,
        has_chat_template=template.exists,
        reasoning_supported=template.reasoning_supported,
        spec="off" if plan is None else plan.kind,
        rollback=None if recording is None else recording.update,
    )
