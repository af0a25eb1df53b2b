"""What an engine is made of: what is known before memory is taken, and putting the parts together. Layer 6.

`draw` opens devices and refuses what cannot be used. `assemble` makes the parts of one
context, with a real ledger to run them and with a dry one to measure them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.arch.base import Architecture, GraphKey, StateLayout
from pyggml_dflash.engine.drafter_loader import SpeculationPlan, choose_recording, make_drafters
from pyggml_dflash.engine.drafting import Drafter
from pyggml_dflash.engine.forward import Model, Recording, build_forward
from pyggml_dflash.engine.graph_cache import Relieve
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.inputs import BUCKET, Inputs, bucketed
from pyggml_dflash.engine.prompt_streams import PromptStreams, choose_streams
from pyggml_dflash.engine.spec_choice import DEFAULT_MODEL, SpecChoice, choose_speculation
from pyggml_dflash.engine.split import (
    choose_copies,
    choose_hot_experts,
    choose_split,
    model_size,
    open_backends,
)
from pyggml_dflash.engine.step import granule_of
from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.ggml.device import Backend, devices
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.placement import check_supported
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.hot_experts import HotExperts
from pyggml_dflash.model.weights import (
    LoadedWeights,
    LoadProgress,
    Placement,
    TensorSpec,
    check_tensors,
    place_weights,
)
from pyggml_dflash.options import EngineOptions, split_max_ctx
from pyggml_dflash.plan.hot_experts import HotPlan
from pyggml_dflash.plan.split import SplitPlan
from pyggml_dflash.plan.streaming import CHUNK, NO_STREAMING, Streaming
from pyggml_dflash.state.slot import SlotTable

DEFAULT_MAX_CTX: Final = 8192
DEFAULT_CHUNK: Final = 512
# For one row ggml's fused attention on CPUs is slower than the plain one from about 200 cache rows on: a step
# takes 7 to 25 % longer (SmolLM2 135M, 240 to 4000 rows). Below, and for prompt chunks, it is the faster one.
# The plain one copies the values of a layer, so its use ends at a context not far above the measured ones.
CPU_PLAIN_KV: Final = range(BUCKET + 1, 16 * 1024 + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options after every choice is made, before anything is allocated."""

    n_ctx: int
    chunk: int
    type_k: ElementType
    type_v: ElementType
    layout: StateLayout


def first_ctx(options: EngineOptions, config: ModelConfig) -> int:
    """The context asked for; where it is to be found, the largest to try."""
    trained = config.n_ctx_train
    if options.max_ctx is None:
        return min(trained, DEFAULT_MAX_CTX)
    is_auto, n = split_max_ctx(options.max_ctx)
    if is_auto:
        return min(trained, n or trained)
    assert n is not None
    if n > trained:
        raise UsageError(f"max_ctx is {n}; this model was trained for at most {trained}")
    return n


def settle(
    options: EngineOptions,
    architecture: Architecture,
    config: ModelConfig,
    *,
    n_ctx: int | None = None,
    usual_chunk: int = DEFAULT_CHUNK,
) -> Settings:
    """Choose what options leave open; a value that cannot be used raises `UsageError`.

    `n_ctx`: the context, where it was found otherwise. `usual_chunk`: rows, where nobody asked for some.
    """
    n_ctx = first_ctx(options, config) if n_ctx is None else n_ctx
    chunk = min(usual_chunk, n_ctx) if isinstance(options.chunk, str) else options.chunk
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """An engine before memory is taken: files are mapped, devices open, every choice but the context made."""

    options: EngineOptions
    file: GgufFile
    architecture: Architecture
    config: ModelConfig
    backend: Backend
    host: Backend | None  # where embedding rows are gathered, if not on `backend`
    split: SplitPlan
    hot: HotPlan | None  # experts that are copied to the target
    streaming: Streaming  # which forwards copy all of them there
    placements: tuple[Placement, ...]
    choice: SpecChoice  # of a drafter
    recording: Recording | None
    flash_attn: bool

    @property
    def speculation(self) -> SpeculationPlan | None:
        """The drafter that will be made."""
        return self.choice.plan

    @property
    def streams(self) -> PromptStreams:
        """How chunks of a prompt are divided."""
        kinds = [backend.info.kind for backend in self.backend.all]
        return choose_streams(self.options, self.split, kinds, self.streaming.rows)

    def without_drafter(self, reason: str) -> Blueprint:
        """The same engine, decoding plainly, and why."""
        assert self.speculation is not None
        own = {spec.name for spec in self.architecture.tensors(self.config, self.file)}
        more = {spec.name for spec in self.speculation.target_tensors} - own
        placements = tuple(p for p in self.placements if p.name not in more)
        return replace(self, choice=self.choice.without(reason), recording=None, placements=placements)

    @property
    def usual_chunk(self) -> int:
        """Most rows of a chunk that nobody asked for."""
        rows = self.streaming.rows
        return max(CHUNK, rows) if rows else DEFAULT_CHUNK

    def without_streaming(self, reason: str) -> Blueprint:
        """The same engine, its experts computing where they lie, and why."""
        found = replace(self, streaming=self.streaming.without(reason))
        routed = {p.name: p.spec for p in self.placements if p.device and p.device == self.split.expert}
        again = {p.name: p for p in _placed(found.options, self.file, routed, self.backend, self.split)}
        return replace(found, placements=tuple(again.get(p.name, p) for p in self.placements))

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Every backend, that of the target first."""
        found = self.backend.all
        return found if self.host is None or self.host in found else (*found, self.host)

    def home(self, name: str) -> Backend:
        """The backend that holds what has this name, of a layer or outside of layers."""
        return self.backend.all[self.split.device_of(name)]

    def model(self, weights: LoadedWeights) -> Model:
        """What forwards are built from."""
        return Model(
            self.architecture,
            self.config,
            weights,
            self.flash_attn,
            plain_kv(self.options, self.backend),
            stream_rows=self.streaming.rows,
            tiles=has_tiles(self.options, self.backend),
        )

    def load_weights(self, ledger: Ledger, progress: LoadProgress | None = None) -> LoadedWeights:
        """The weights, with copies of hot experts; with a dry ledger they are measured, not loaded."""
        weights = LoadedWeights(self.file, list(self.placements), self.backend, ledger, progress)
        if self.hot is None:
            return weights
        assert self.config.moe is not None
        try:
            n_expert = self.config.moe.n_expert
            weights.adopt(HotExperts(self.file, self.hot.layers, n_expert, self.backend, ledger))
        except BaseException:
            weights.close()
            raise
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model file that is checked: what it holds, and the draft that goes with it."""

    file: GgufFile
    architecture: Architecture
    config: ModelConfig
    specs: dict[str, TensorSpec]
    choice: SpecChoice


def open_model(options: EngineOptions, stack: ExitStack) -> ModelFile:
    """Open the files and read their numbers; `stack` closes them."""
    file = GgufFile.open(options.model or DEFAULT_MODEL)
    stack.callback(file.close)
    name, architecture = architecture_of(file)
    config = architecture.read_config(file, name)
    choice = choose_speculation(options, file, config, stack)
    more = () if choice.plan is None else choice.plan.target_tensors
    specs = check_tensors(file, [*architecture.tensors(config, file), *more])
    return ModelFile(file=file, architecture=architecture, config=config, specs=specs, choice=choice)


def draw(options: EngineOptions, model: ModelFile, stack: ExitStack, ledger: Ledger) -> Blueprint:
    """Open devices and decide where everything goes; `stack` closes them. Allocates nothing."""
    file, architecture, config, plan = model.file, model.architecture, model.config, model.choice.plan
    if (
        options.max_ctx is not None
        and split_max_ctx(options.max_ctx)[0]
        and not architecture.supports_auto_ctx
    ):
        raise UsageError(
            f"max_ctx is {options.max_ctx!r}; architecture {config.architecture!r} has no plan: pass a number"
        )
    state_bytes = settle(options, architecture, config).layout.slot_bytes
    split, infos = choose_split(options, model_size(file, model.specs, config, state_bytes))
    backend = open_backends(infos, options, stack)
    _check_caps(options, backend.all)
    streaming = choose_copies(options, split, backend, file, model.specs, _most_rows(options, config))
    placements = _placed(options, file, model.specs, backend, split, streaming)
    moved = (p.source.n_bytes for p in placements if p.kind != "mapped" and p.device == 0)
    taken = sum(moved) + 2**20 * options.device_reserve_mib
    free = max(0, ledger.free(backend.name, backend.memory_free()) - taken)
    return Blueprint(
        options=options,
        file=file,
        architecture=architecture,
        config=config,
        backend=backend,
        host=None if backend.is_host else _host_backend(backend, stack, options.threads),
        split=split,
        hot=choose_hot_experts(options, split, file, config),
        streaming=streaming,
        placements=placements,
        choice=model.choice,
        recording=None
        if plan is None
        else choose_recording(plan, architecture, config, backend, free, options.slots),
        flash_attn=choose_flash_attn(options, model, backend, placements, split),
    )


def _most_rows(options: EngineOptions, config: ModelConfig) -> int:
    """Rows that a forward of a prompt may have where experts are streamed."""
    usual = max(CHUNK, options.stream_experts if isinstance(options.stream_experts, int) else 0)
    chunk = options.chunk if isinstance(options.chunk, int) else usual
    return granule_of(min(chunk, first_ctx(options, config)), options.slots)


def _placed(
    options: EngineOptions,
    file: GgufFile,
    specs: dict[str, TensorSpec],
    backend: Backend,
    split: SplitPlan,
    streaming: Streaming = NO_STREAMING,
) -> tuple[Placement, ...]:
    """Where weights go; experts that are streamed lie in memory that other devices can copy."""
    routed = [n for n in specs if split.kind == "experts" and split.device_of(n) == split.expert]
    beside_cpu = backend.info.kind not in ("cpu", "rpc")  # decoding waits for the devices, not for products
    is_plain = bool(streaming.rows) or (beside_cpu and options.repack == "auto")
    return tuple(
        place_weights(
            file,
            specs,
            backend,
            repack=options.repack != "off",
            device_of=split.device_of,
            plain=frozenset(routed if is_plain else ()),
            pinned=streaming.pinned,
        )
    )


def _check_caps(options: EngineOptions, backends: tuple[Backend, ...]) -> None:
    """Refuse a cap of a device that is not there: it would do nothing."""
    present = [device.name for device in devices()] + [b.name for b in backends if b.info.kind == "rpc"]
    for name in options.device_cap:
        if name not in present:
            raise UsageError(f"device_cap names {name!r}; this build has {', '.join(present)}")


def _host_backend(target: Backend, stack: ExitStack, threads: int | None) -> Backend:
    """The CPU among the target's peers, or one of its own."""
    for peer in target.peers:
        if peer.is_host:
            return peer
    cpu = next(d for d in devices() if d.kind == "cpu")
    host = Backend(cpu, threads=threads)
    stack.callback(host.close)
    return host


def choose_flash_attn(
    options: EngineOptions,
    opened: ModelFile,
    backend: Backend,
    placements: tuple[Placement, ...],
    split: SplitPlan,
) -> bool:
    """Whether to use fused attention: as asked, or where the device can; a cache that needs it insists."""
    architecture, config = opened.architecture, opened.config
    if options.flash_attn == "off":
        return False
    layout = settle(options, architecture, config).layout
    dry = Ledger(dry=True)
    with ExitStack() as stack:
        weights = LoadedWeights(opened.file, list(placements), backend, dry)
        stack.callback(weights.close)
        slots = SlotTable(backend, dry, layout, 1, lambda name: backend.all[split.device_of(name)])
        stack.callback(slots.close)
        embedded = not backend.is_host
        inputs = Inputs(backend, dry, architecture, config, max_rows=1, max_kv=BUCKET, embedded=embedded)
        stack.callback(inputs.close)
        key = GraphKey(n_tokens=1, n_kv=BUCKET, slot=0, output="last")
        model = Model(architecture, config, weights, True)
        builder, _ = build_forward(backend, model, slots.tensors, inputs, key)
        stack.callback(builder.close)
        try:
            check_supported(backend, builder)
        except BackendError as error:
            if options.flash_attn == "on" or options.cache_type_v in ("q8_0", "q4_0"):
                raise BackendError(f"flash attention is not possible: {error}") from error
            return False
    return True


def plain_kv(options: EngineOptions, backend: Backend) -> range:
    """Cache rows over which decode and verify go without flash attention where the choice is ours."""
    floats = all(t in ("f32", "f16", "bf16") for t in (options.cache_type_k, options.cache_type_v))
    return CPU_PLAIN_KV if options.flash_attn == "auto" and backend.is_host and floats else range(0)


def has_tiles(options: EngineOptions, backend: Backend) -> bool:
    """Whether flash attention somewhere reads such caches in tiles, and row by row where rows are too few."""
    in_tiles = options.cache_type_k == options.cache_type_v in ("f32", "f16")
    return in_tiles and any(each.has_tiles for each in backend.all)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that belong to one context; a stack owns them."""

    slots: SlotTable
    forwards: Forwards
    drafters: tuple[Drafter, ...]  # one per slot, or none


def assemble(
    blueprint: Blueprint,
    weights: LoadedWeights,
    settings: Settings,
    ledger: Ledger,
    stack: ExitStack,
    *,
    relieve: Relieve | None = None,
) -> Assembly:
    """Make slots, forwards and drafters; with a dry ledger they can be measured only. `stack` frees them."""
    b = blueprint
    slots = SlotTable(b.backend, ledger, settings.layout, b.options.slots, b.home)
    stack.callback(slots.close)
    forwards = Forwards(
        b.backend,
        ledger,
        b.model(weights),
        slots,
        chunk=settings.chunk,
        host=b.host,
        recording=b.recording,
        relieve=relieve,
        home=b.home,
        streams=b.streams,
    )
    stack.callback(forwards.close)
    if b.speculation is None:
        return Assembly(slots, forwards, ())
    drafters = make_drafters(
        b.speculation,
        b.options,
        b.backend,
        ledger,
        forwards,
        stack,
        relieve=relieve,
    )
    return Assembly(slots, forwards, drafters)
