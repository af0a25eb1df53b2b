"""From options to a drafter: which one, what it needs of the target, and its own file. Layer 6."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.arch import mtp_block_of
from pyggml_dflash.arch.base import Architecture, Capture, StateUpdate
from pyggml_dflash.arch.dflash_config import DraftConfig, draft_tensors, read_draft_config
from pyggml_dflash.engine.dflash_drafter import DFlashDrafter
from pyggml_dflash.engine.drafting import Drafter
from pyggml_dflash.engine.graph_cache import Relieve
from pyggml_dflash.engine.graphs import Forwards, Recording
from pyggml_dflash.engine.mtp_drafter import MtpDrafter
from pyggml_dflash.errors import UnsupportedModelError, UsageError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec, check_tensors, place_weights
from pyggml_dflash.options import EngineOptions

MTP_DRAFTS: Final = 3  # where acceptance stops paying for published heads; more by spec_width
SNAPSHOT_PART: Final = 0.1  # of free memory that states after every row may take


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """A drafter that will be made: its file and configuration, or the target's MTP block."""

    kind: str  # 'dflash' or 'mtp'
    max_width: int
    capture: Capture
    draft: DraftConfig | None = None
    file: GgufFile | None = None
    target_tensors: tuple[TensorSpec, ...] = ()  # beyond those of plain decoding


def plan_speculation(
    options: EngineOptions, file: GgufFile, config: ModelConfig, stack: ExitStack
) -> SpeculationPlan | None:
    """The drafter that the options ask for, checked against its target; None for plain decoding."""
    if options.spec == "off":
        return None
    if options.spec == "mtp":
        return _plan_mtp(options, file, config)
    if options.draft is None:
        return None
    if config.hidden_width != config.n_embd:
        raise UnsupportedModelError(
            f"{options.draft}: DFlash drafts read one residual stream; {config.architecture} has several"
        )
    draft_file = GgufFile.open(options.draft)
    stack.callback(draft_file.close)
    name = draft_file.get_str("general.architecture")
    if name != "dflash":
        raise UnsupportedModelError(f"{options.draft}: architecture {name!r} is no draft; known: dflash")
    n_tokens = len(file.get_strs("tokenizer.ggml.tokens"))
    draft = read_draft_config(draft_file, config, n_tokens=n_tokens)
    if options.spec_width is not None and options.spec_width > draft.block_size:
        raise UsageError(
            f"spec_width is {options.spec_width}; this draft was trained for blocks of {draft.block_size}"
        )
    width = min(16, draft.block_size) if options.spec_width is None else options.spec_width
    capture = Capture(layers=draft.target_layers)
    return SpeculationPlan(kind="dflash", max_width=width, capture=capture, draft=draft, file=draft_file)


def _plan_mtp(options: EngineOptions, file: GgufFile, config: ModelConfig) -> SpeculationPlan:
    if config.n_mtp == 0:
        raise UsageError(f"spec is 'mtp'; {file.path} has no MTP block: use 'auto' or 'off'")
    if config.n_mtp > 1:
        raise UnsupportedModelError(f"{file.path}: {config.n_mtp} MTP blocks; one is supported")
    width = MTP_DRAFTS + 1 if options.spec_width is None else options.spec_width
    tensors = tuple(mtp_block_of(config, options.mtp_convention).tensors(file))
    return SpeculationPlan(kind="mtp", max_width=width, capture=Capture(hidden=True), target_tensors=tensors)


def choose_recording(
    plan: SpeculationPlan, architecture: Architecture, config: ModelConfig, backend: Backend, free: int
) -> Recording:
    """How verify forwards are taken back: by replay on a host, where recomputing a few rows is cheaper than
    writing a state after each; by snapshots on a GPU, if they take a small part of what is free."""
    tensors = architecture.record_tensors(config, "snapshots", plan.max_width)
    small = sum(t.n_bytes for t in tensors) <= SNAPSHOT_PART * free
    update: StateUpdate = "snapshots" if small and not backend.is_host else "replay"
    return Recording(capture=plan.capture, update=update, max_width=plan.max_width)


def make_drafter(
    plan: SpeculationPlan,
    options: EngineOptions,
    backend: Backend,
    ledger: Ledger,
    forwards: Forwards,
    stack: ExitStack,
    *,
    kept_bytes: int | None = None,
    relieve: Relieve | None = None,
) -> Drafter:
    """Load what the plan names; `stack` frees it."""
    type_k, type_v = (ElementType[t.upper()] for t in (options.cache_type_k, options.cache_type_v))
    if plan.draft is None or plan.file is None:
        own_table = f"blk.{forwards.model.config.n_layer}.nextn.embed_tokens.weight"
        if forwards.gather is not None and forwards.model.weights.get(own_table) is not None:
            raise UnsupportedModelError(
                f"an MTP block with a table of its own ({own_table}) runs on the CPU only"
            )
        block = mtp_block_of(forwards.model.config, options.mtp_convention)
        mtp = MtpDrafter(
            backend,
            ledger,
            forwards,
            block,
            max_drafts=plan.max_width - 1,
            type_k=type_k,
            type_v=type_v,
            kept_bytes=kept_bytes,
            relieve=relieve,
        )
        stack.callback(mtp.close)
        return mtp
    specs = check_tensors(plan.file, draft_tensors(plan.draft, forwards.model.config.n_vocab))
    placements = place_weights(plan.file, specs, backend, repack=options.repack != "off")
    weights = LoadedWeights(plan.file, placements, backend, ledger, label="draft weights")
    stack.callback(weights.close)
    drafter = DFlashDrafter(
        backend,
        ledger,
        plan.draft,
        weights,
        forwards,
        type_k,
        type_v,
        kept_bytes=kept_bytes,
        relieve=relieve,
    )
    stack.callback(drafter.close)
    return drafter
