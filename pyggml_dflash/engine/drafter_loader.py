"""From options to a drafter: which one, what it needs of the target, and its own file. Layer 6."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pyggml_dflash.arch import mtp_block_of, with_side_block
from pyggml_dflash.arch.base import Architecture, Capture, MtpBlock, StateUpdate
from pyggml_dflash.arch.dflash_config import DraftConfig, draft_tensors, read_draft_config
from pyggml_dflash.arch.draft_forms import DraftKind, draft_kind, open_draft
from pyggml_dflash.engine.dflash_drafter import DFlashDrafter
from pyggml_dflash.engine.drafting import Drafter
from pyggml_dflash.engine.forward import Recording
from pyggml_dflash.engine.graph_cache import Relieve
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.mtp_drafter import MtpDrafter
from pyggml_dflash.errors import UnsupportedModelError, UsageError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec, check_tensors, place_weights
from pyggml_dflash.options import MAX_WIDTH, EngineOptions

MTP_DRAFTS: Final = 3  # where acceptance stops paying for published heads; more by spec_width
SNAPSHOT_PART: Final = 0.1  # of free memory that states after every row may take


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """A draft that was opened, and what it says where implementations differ."""

    path: Path
    kind: DraftKind
    block_size: int | None  # rows of a block, the newest token included; None for an MTP block
    causal: tuple[bool, ...] | None  # per layer: rows of a block see no later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """A drafter that will be made, checked against its target."""

    kind: DraftKind
    max_width: int
    capture: Capture
    draft: DraftConfig | None = None  # of a DFlash draft
    block: MtpBlock | None = None  # else
    file: TensorFile | None = None  # the draft's own; None: the block is in the target's file
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the draft's own file
    target_tensors: tuple[TensorSpec, ...] = ()  # beyond those of plain decoding

    @property
    def info(self) -> DraftInfo | None:
        """What reports show of a draft with a file of its own."""
        if self.file is None:
            return None
        block_size = None if self.draft is None else self.draft.block_size
        causal = None if self.draft is None else self.draft.causal
        return DraftInfo(path=self.file.path, kind=self.kind, block_size=block_size, causal=causal)


def plan_speculation(
    options: EngineOptions, file: GgufFile, config: ModelConfig, stack: ExitStack
) -> SpeculationPlan | None:
    """The drafter that the options ask for, checked against its target; None for plain decoding."""
    if options.spec == "off":
        return None
    own, kind = None, None
    if options.draft is not None:
        own = open_draft(options.draft)
        stack.callback(own.close)
        kind = draft_kind(own)
    elif options.spec == "mtp":
        kind = "mtp"
    if options.draft_causal != "auto" and kind != "dflash":
        raise UsageError(f"draft_causal is {options.draft_causal!r}, but there is no DFlash draft")
    if own is not None and options.spec not in ("auto", kind):
        what = "a DFlash draft" if kind == "dflash" else "an MTP block"
        raise UsageError(f"spec is {options.spec!r}, but {options.draft} is {what}; use {kind!r} or 'auto'")
    if kind == "dflash" and own is not None:
        return _plan_dflash(options, own, config, len(file.get_strs("tokenizer.ggml.tokens")))
    return _plan_mtp(options, file, own, config) if kind == "mtp" else None


def _plan_dflash(
    options: EngineOptions, own: TensorFile, config: ModelConfig, n_tokens: int
) -> SpeculationPlan:
    if config.hidden_width != config.n_embd:
        raise UnsupportedModelError(
            f"{own.path}: DFlash drafts read one residual stream; {config.architecture} has several"
        )
    draft = read_draft_config(own, config, options.draft_causal, n_tokens=n_tokens)
    if options.spec_width != "auto" and options.spec_width > draft.block_size:
        raise UsageError(
            f"spec_width is {options.spec_width}; this draft was trained for blocks of {draft.block_size}"
        )
    width = min(MAX_WIDTH, draft.block_size) if options.spec_width == "auto" else options.spec_width
    tensors = check_tensors(own, draft_tensors(draft, config.n_vocab))
    capture = Capture(layers=draft.target_layers)
    return SpeculationPlan(
        kind="dflash", max_width=width, capture=capture, draft=draft, file=own, tensors=tensors
    )


def _plan_mtp(
    options: EngineOptions, file: GgufFile, own: TensorFile | None, config: ModelConfig
) -> SpeculationPlan:
    """The MTP block of the target's file, or of a file of its own."""
    width = MTP_DRAFTS + 1 if options.spec_width == "auto" else options.spec_width
    plan = SpeculationPlan(kind="mtp", max_width=width, capture=Capture(hidden=True))
    if own is not None:
        beside = with_side_block(own, config, len(file.get_strs("tokenizer.ggml.tokens")))
        block = mtp_block_of(beside, options.mtp_convention)
        return replace(plan, file=own, tensors=check_tensors(own, block.tensors(own)), block=block)
    if config.n_mtp == 0:
        raise UsageError(
            f"spec is 'mtp'; {file.path} has no MTP block: use 'auto' or 'off', or name its file as draft"
        )
    if config.n_mtp > 1:
        raise UnsupportedModelError(f"{file.path}: {config.n_mtp} MTP blocks; one is supported")
    block = mtp_block_of(config, options.mtp_convention)
    return replace(plan, block=block, target_tensors=tuple(block.tensors(file)))


def choose_recording(
    plan: SpeculationPlan,
    architecture: Architecture,
    config: ModelConfig,
    backend: Backend,
    free: int,
    n_slots: int = 1,
) -> Recording:
    """How verify forwards are taken back: by replay on a host, where recomputing a few rows is cheaper than
    writing a state after each; by snapshots on a GPU, if those of all slots take a small part of what is
    free."""
    tensors = architecture.record_tensors(config, "snapshots", plan.max_width)
    small = n_slots * sum(t.n_bytes for t in tensors) <= SNAPSHOT_PART * free
    update: StateUpdate = "snapshots" if small and not backend.is_host else "replay"
    return Recording(capture=plan.capture, update=update, max_width=plan.max_width)


def make_drafters(
    plan: SpeculationPlan,
    options: EngineOptions,
    backend: Backend,
    ledger: Ledger,
    forwards: Forwards,
    stack: ExitStack,
    *,
    relieve: Relieve | None = None,
) -> tuple[Drafter, ...]:
    """Load what the plan names: a drafter for each slot, which share all but what they know of a sequence.

    `stack` frees them.
    """
    first = make_drafter(plan, options, backend, ledger, forwards, stack, relieve=relieve)
    others = []
    for slot in range(1, forwards.n_slots):
        others.append(first.beside(slot))
        stack.callback(others[-1].close)
    return (first, *others)


def make_drafter(
    plan: SpeculationPlan,
    options: EngineOptions,
    backend: Backend,
    ledger: Ledger,
    forwards: Forwards,
    stack: ExitStack,
    *,
    relieve: Relieve | None = None,
) -> MtpDrafter | DFlashDrafter:
    """Load what the plan names, for the first slot; `stack` frees it."""
    type_k, type_v = (ElementType[t.upper()] for t in (options.cache_type_k, options.cache_type_v))
    weights, target = forwards.model.weights, forwards.model.weights
    if plan.file is not None:
        placements = place_weights(plan.file, dict(plan.tensors), backend, repack=options.repack != "off")
        base = target if plan.kind == "mtp" else None
        weights = LoadedWeights(plan.file, placements, backend, ledger, label="draft weights", base=base)
        stack.callback(weights.close)
    if plan.draft is not None:
        dflash = DFlashDrafter(
            backend,
            ledger,
            plan.draft,
            weights,
            forwards,
            type_k,
            type_v,
            relieve=relieve,
        )
        stack.callback(dflash.close)
        return dflash
    own_table = f"blk.{forwards.model.config.n_layer}.nextn.embed_tokens.weight"
    if forwards.gather is not None and weights.get(own_table) is not None:
        raise UnsupportedModelError(
            f"an MTP block with a table of its own ({own_table}) runs on the CPU only"
        )
    assert plan.block is not None
    mtp = MtpDrafter(
        backend,
        ledger,
        forwards,
        plan.block,
        weights=weights,
        max_drafts=plan.max_width - 1,
        type_k=type_k,
        type_v=type_v,
        relieve=relieve,
    )
    stack.callback(mtp.close)
    return mtp
