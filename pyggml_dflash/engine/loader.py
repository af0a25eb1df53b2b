"""From options to a loaded model: the one place where the parts are put together. Layer 6.

Everything that can be refused is refused before memory is taken: file, architecture, tensors,
options, device, and the bytes that context and weights will need.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from pyggml_dflash.engine.assembly import Assembly, Blueprint, assemble, draw, open_model
from pyggml_dflash.engine.constraint import Constraints
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.fit import Planner
from pyggml_dflash.engine.fit_report import FitReport, make_report
from pyggml_dflash.engine.invariance import measure_batching
from pyggml_dflash.engine.kv_overflow import find_fit_with_overflow
from pyggml_dflash.engine.loaded import EngineInfo, Loaded
from pyggml_dflash.engine.pool_scratch import measure_pools, with_pools
from pyggml_dflash.engine.prefill import BackendPools, PoolTrims
from pyggml_dflash.engine.prompt_streams import note_undivided
from pyggml_dflash.engine.reuse import Reuse
from pyggml_dflash.engine.reuse_loader import open_reuse
from pyggml_dflash.engine.snapshot_plan import with_snapshots
from pyggml_dflash.engine.spec_choice import note_unused
from pyggml_dflash.engine.split import described
from pyggml_dflash.engine.step import granule_of
from pyggml_dflash.engine.step_costs import learn_costs
from pyggml_dflash.errors import DamagedFileError, DeviceMemoryError
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.template_file import read_template
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.model.weights import LoadedWeights
from pyggml_dflash.options import EngineOptions, Spec
from pyggml_dflash.plan.chunk import ChunkPlan
from pyggml_dflash.plan.context import ContextChoice, step_for
from pyggml_dflash.requests import Progress, ProgressCallback
from pyggml_dflash.state.cuts import TurnMarkers
from pyggml_dflash.state.disk_tier import make_folder

LOG: Final = logging.getLogger(__name__)


def load(
    options: EngineOptions,
    report: ProgressCallback,
    parked: EngineCore | None = None,
    template: ChatTemplate | None = None,
) -> Loaded:
    """Open the file, check everything, fit the context, then allocate. Runs on the engine's thread.

    `parked`: the core of the same engine before; its stored states go on, and stay whole if this fails.
    `template`: what it read of a file with a chat template, which may have changed since.
    """
    kept = None if parked is None else parked.reuse
    source = read_template(options.chat_template) if template is None else None
    with ExitStack() as stack:
        model = open_model(options, stack)
        file, config = model.file, model.config
        tokenizer = Tokenizer.from_metadata(file.metadata, nfc=options.nfc)
        if tokenizer.n_vocab > config.n_vocab:
            raise DamagedFileError(
                f"{file.path}: {tokenizer.n_vocab} tokens, but 'token_embd.weight' has {config.n_vocab} rows"
            )
        if template is None:
            template = ChatTemplate.from_metadata(file.metadata, tokenizer, given=source)
        if options.kv_cache_dir is not None:
            make_folder(options.kv_cache_dir)
        ledger = Ledger(caps=options.device_cap) if parked is None else parked.ledger
        built = build(draw(options, model, stack, ledger), ledger, stack, report)
        _choose_decoding(built, ledger)
        info, markers = _info(built, template), TurnMarkers.of(tokenizer.find)
        constraints = Constraints(tokenizer)
        unused = sorted({*tokenizer.unused_ids, *range(tokenizer.n_vocab, config.n_vocab)})
        return Loaded(
            core=_core(built, ledger, stack, kept),
            tokenizer=tokenizer,
            template=template,
            info=info,
            fit=built.fit,
            forbidden_ids=np.array(unused, np.int64) if unused else None,
            markers=markers,
            constraints=constraints,
            spec_width=options.spec_width,
        )


def reload(options: EngineOptions, parked: Loaded, report: ProgressCallback) -> Loaded:
    """Load what was parked with everything as it was found then; it is not fitted again."""
    info = parked.info
    found = None if info.draft is None else info.draft.path  # also where nobody named it
    chosen = replace(
        options,
        max_ctx=info.n_ctx,
        min_ctx=None,
        chunk=info.chunk,
        stream_experts=info.stream_rows,
        expert_memory=options.expert_memory if info.stream_rows else "pageable",
        draft=options.draft or found,
        spec=cast("Spec", info.spec),
    )
    template = None if options.chat_template is None else parked.template
    loaded = load(chosen, report, parked.core, template)
    loaded.core.add_counts(parked.core)
    return replace(loaded, fit=parked.fit, info=replace(loaded.info, spec_reason=info.spec_reason))


def _choose_decoding(built: Built, ledger: Ledger) -> None:
    """Find out how slots may decode together."""
    options, backend, parts = built.blueprint.options, built.blueprint.backend, built.parts
    vary = options.allow_batch_variance
    parts.forwards.use(
        measure_batching(parts.forwards, parts.slots.slots, backend, ledger, allow_variance=vary)
    )


def _core(built: Built, ledger: Ledger, stack: ExitStack, kept: Reuse | None) -> EngineCore:
    """What runs the parts; it takes over what `stack` frees."""
    blueprint, parts = built.blueprint, built.parts
    backend, slots, forwards, drafters = blueprint.backend, parts.slots, parts.forwards, parts.drafters
    control = learn_costs(forwards, drafters[0], slots.slots[0], blueprint.options) if drafters else None
    rows = granule_of(built.fit.chunk, built.fit.slots)
    with ExitStack() as failing:
        reuse = open_reuse(
            blueprint,
            slots,
            ledger,
            limit=built.stored_bytes,
            rows=rows,
            paddings=forwards.batching.paddings,
            kept=kept,
        )
        if reuse is not None:
            if reuse is not kept:
                failing.callback(reuse.close)
            reuse.bind(slots, backend, chunk=rows)
            stack.callback(reuse.unbind)
        core = EngineCore(
            forwards,
            slots,
            ledger,
            built.fit.n_ctx,
            stack.pop_all(),
            drafters,
            trims=built.trims,
            control=control,
            reuse=reuse,
        )
        failing.pop_all()
    return core


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What was allocated for a blueprint, and the plan that it follows."""

    blueprint: Blueprint
    fit: FitReport
    weights: LoadedWeights
    parts: Assembly
    trims: PoolTrims
    stored_bytes: int  # most that stored states may take


def build(blueprint: Blueprint, ledger: Ledger, stack: ExitStack, report: ProgressCallback) -> Built:
    """Fit the context, load the weights, look again at what is free, and make everything else."""
    with ExitStack() as planners:
        return _build(blueprint, ledger, stack, report, planners)


def _build(
    blueprint: Blueprint, ledger: Ledger, stack: ExitStack, report: ProgressCallback, planners: ExitStack
) -> Built:
    started = time.perf_counter()
    planner, choice = find_fit_with_overflow(blueprint, ledger, planners)
    if choice.plan is None:
        raise planner.refuse(choice)
    blueprint = planner.blueprint
    fitted_s = time.perf_counter() - started
    _reserve(blueprint, ledger, stack)
    weights = blueprint.load_weights(
        ledger, lambda done, total: report(Progress(phase="load", done=done, total=total))
    )
    stack.callback(weights.close)
    planner, choice = _verified(planner, choice, planners)
    while True:
        plan = choice.plan
        assert plan is not None
        try:
            plan, trims, parts = _allocated(planner, plan, weights, ledger, stack)
            break
        except DeviceMemoryError as error:
            if planner.blueprint.choice.may_be_left_out:
                planner, choice = _without_drafter(planner, choice, str(error), planners)
                continue
            smaller = _smaller(planner, plan.n_ctx) if planner.is_auto else None
            if smaller is None:
                raise
            choice = smaller
    plan, stored_bytes = with_snapshots(planner.blueprint, plan)
    fit = make_report(planner, plan, choice, seconds=fitted_s)
    LOG.info(
        "fit: %d tokens x %d slots (trained %d, %d probes, chunk %d)",
        fit.n_ctx,
        fit.slots,
        fit.n_ctx_train,
        len(fit.trace),
        fit.chunk,
    )
    note_undivided(parts.forwards.streams, granule_of(fit.chunk, fit.slots))
    note_unused(planner.blueprint.options, planner.blueprint.speculation)
    return Built(
        blueprint=planner.blueprint,
        fit=fit,
        weights=weights,
        parts=parts,
        trims=trims,
        stored_bytes=stored_bytes,
    )


def _reserve(blueprint: Blueprint, ledger: Ledger, stack: ExitStack) -> None:
    """Take memory that nobody uses, so that a large device acts as a small one."""
    n_bytes = blueprint.options.device_reserve_mib * 2**20
    if n_bytes:
        arena = TensorArena(blueprint.backend, ledger, "reserve", n_tensors=1)
        stack.callback(arena.close)
        arena.declare("reserve", ElementType.I32, n_bytes // 4)
        arena.allocate()


def _verified(planner: Planner, choice: ContextChoice, planners: ExitStack) -> tuple[Planner, ContextChoice]:
    """The choice, if it still fits now that the weights are there; the headroom may be used up by then."""
    assert choice.plan is not None
    planner.read_free()
    plan = planner.plan_at(choice.plan.n_ctx)
    if all(share.balance + share.headroom >= 0 for share in plan.shares):
        return planner, choice
    again = planner.choose(most=plan.n_ctx)
    if again.plan is not None:
        return planner, again
    if not planner.blueprint.choice.may_be_left_out:
        raise planner.refuse(again)
    return _verified(
        *_without_drafter(planner, choice, "there is no room beside the weights", planners), planners
    )


def _without_drafter(
    planner: Planner, choice: ContextChoice, reason: str, planners: ExitStack
) -> tuple[Planner, ContextChoice]:
    """The same context, decoding plainly."""
    assert choice.plan is not None
    plain = planners.enter_context(closing(planner.without_drafter(reason)))
    return plain, replace(choice, plan=plain.plan_at(choice.plan.n_ctx))


def _allocated(
    planner: Planner, plan: ChunkPlan, weights: LoadedWeights, ledger: Ledger, stack: ExitStack
) -> tuple[ChunkPlan, PoolTrims, Assembly]:
    """Everything beside the weights; a failure frees what was made of it."""
    plan, blueprint = planner.with_chunk(plan), planner.blueprint
    interval = blueprint.options.trim_interval or 0
    pools = BackendPools(blueprint.backend.all, ledger)
    trims = PoolTrims(pools, interval, chunk=plan.chunk)
    with ExitStack() as attempt:
        parts = assemble(
            blueprint,
            weights,
            planner.settings(plan.n_ctx, plan.chunk),
            ledger,
            attempt,
            relieve=trims.relieve,
        )
        if blueprint.backend.info.kind in ("gpu", "igpu"):
            scratch = measure_pools(parts.forwards, parts.slots.slots[0], pools)
            plan = with_pools(plan, scratch, pools.memory_free())
        stack.push(attempt.pop_all())
    return plan, trims, parts


def _smaller(planner: Planner, n_ctx: int) -> ContextChoice | None:
    """A context by a quarter smaller than one that could not be allocated after all, if it fits."""
    step = step_for(planner.config.n_ctx_train)
    most = (n_ctx - 1 - n_ctx // 4) // step * step  # the system does not tell how much it lacks
    if most < max(step, planner.options.min_ctx or 0):
        return None
    planner.read_free()
    choice = planner.choose(most=most)
    if choice.plan is None:
        return None
    LOG.warning("a context of %d cannot be allocated; %d is tried", n_ctx, choice.plan.n_ctx)
    return choice


def _info(built: Built, template: ChatTemplate) -> EngineInfo:
    blueprint = built.blueprint
    options, file, config, fit = blueprint.options, blueprint.file, blueprint.config, built.fit
    choice, recording, batching = blueprint.choice, blueprint.recording, built.parts.forwards.batching
    return EngineInfo(
        model=file.path,
        name=file.get_str("general.name", file.path.stem),
        architecture=config.architecture,
        device=blueprint.backend.name,
        backend=blueprint.backend.info.registry,
        devices=tuple(backend.name for backend in blueprint.backend.all),
        split=blueprint.split.kind,
        placement=described(blueprint.split),
        threads=blueprint.backend.n_threads,
        n_ctx=fit.n_ctx,
        n_ctx_train=config.n_ctx_train,
        n_vocab=config.n_vocab,
        tokenizer=file.get_str("tokenizer.ggml.pre", file.get_str("tokenizer.ggml.model", "")),
        n_layer=config.n_layer,
        slots=options.slots,
        chunk=fit.chunk,
        stream_rows=blueprint.streaming.rows,
        granule=granule_of(fit.chunk, options.slots),
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        flash_attn=blueprint.flash_attn,
        weight_bytes=dict(built.weights.n_bytes),
        state_bytes=built.parts.slots.n_bytes,
        has_chat_template=template.exists,
        chat_template_file=options.chat_template,
        tools_supported=template.tools_supported,
        reasoning_supported=template.reasoning_supported,
        spec="off" if choice.plan is None else choice.plan.kind,
        spec_reason=choice.reason,
        max_width=1 if recording is None else recording.max_width,
        decode_mode=batching.mode,
        decode_rows=batching.rows,
        decode_reason=batching.reason,
        joined_rows=max(0, built.parts.forwards.prompt_limits.most_rows),
        joined_reason=batching.joined_reason,
        exact_width=batching.verify_rows,
        rollback=None if recording is None else recording.update,
        draft=None if choice.plan is None else choice.plan.info,
    )
