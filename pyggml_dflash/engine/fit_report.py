"""Where every byte of a fitted context goes, and how it was found: a frozen report. Layer 6."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from pyggml_dflash.engine.assembly import Blueprint, draw, first_ctx, open_model
from pyggml_dflash.engine.fit import SMALLER_TYPES, Planner
from pyggml_dflash.engine.kv_overflow import find_fit_with_overflow
from pyggml_dflash.engine.snapshot_plan import with_snapshots
from pyggml_dflash.engine.split import as_asked, described
from pyggml_dflash.errors import UsageError, cap_text
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.template_file import read_template
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.chunk import ChunkPlan, DeviceShare
from pyggml_dflash.plan.context import ContextChoice, Probe

SLOT_COUNTS: Final = (1, 2, 4)
# given otherwise, what the search is about, or without a part in what fits
OTHER_FLAGS: Final = {"trim_interval": "--prefill-pool-trim-tokens", "chat_template": "--chat-template-file"}
FOUND: Final = ("model", "max_ctx", "min_ctx", "chunk", "queue_limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAlternative:
    """The context that another type of keys and values, or another number of slots, would get."""

    cache_type: str
    slots: int
    n_ctx: int  # 0: none fits


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Which context fits a model on its devices, the memory it takes there, and the probes behind it."""

    model: Path
    architecture: str
    requested: int | str
    n_ctx: int  # 0: what was asked for does not fit
    n_ctx_train: int
    chunk: int
    slots: int
    cache_type_k: str
    cache_type_v: str
    spec: str
    placement: str  # what lies where, and why
    stream_rows: int  # fewest rows of a forward for which experts in host memory are copied; 0: never
    devices: tuple[DeviceShare, ...]  # of the context found; of the smallest one tried when none fits
    trace: tuple[Probe, ...]
    flags: tuple[str, ...]  # that open the same engine without a search
    alternatives: tuple[FitAlternative, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """True if there is a context."""
        return self.n_ctx > 0


def fit_report(options: EngineOptions) -> FitReport:
    """Fit a context without running or loading anything; weights are not read.

    Refuses what `load` refuses, except a context that does not fit: the report says so.
    """
    read_template(options.chat_template)
    with ExitStack() as stack:
        ledger = Ledger(caps=options.device_cap)
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        started = time.perf_counter()
        planner, choice = find_fit_with_overflow(blueprint, ledger, stack)
        plan = None
        if choice.plan is not None:
            plan, _ = with_snapshots(planner.blueprint, planner.with_chunk(choice.plan))
        alternatives = _alternatives(planner, choice)
        seconds = time.perf_counter() - started
        return make_report(planner, plan, choice, seconds=seconds, alternatives=alternatives)


def _alternatives(planner: Planner, choice: ContextChoice) -> tuple[FitAlternative, ...]:
    """Every type of keys and values by every number of slots; what needs no search is not searched again."""
    found: list[FitAlternative] = []
    for cache_type in SMALLER_TYPES:
        for slots in SLOT_COUNTS:
            with ExitStack() as stack:
                variant = planner.variant(cache_type, slots, stack)
                if variant is None:
                    continue
                try:
                    plan = _largest(variant, choice, stack)
                except UsageError:  # a chunk or a smallest context that this one cannot have
                    continue
                n_ctx = 0 if plan is None else plan.n_ctx
                found.append(FitAlternative(cache_type=cache_type, slots=slots, n_ctx=n_ctx))
    return tuple(found)


def _largest(planner: Planner, choice: ContextChoice, stack: ExitStack) -> ChunkPlan | None:
    """The largest context that fits, with the drafter or, if nobody named it, without."""
    start, like = planner.config.n_ctx_train, choice.plan or choice.smallest_miss
    assert like is not None
    plan = planner.largest(start, like)
    if plan is None and planner.blueprint.choice.may_be_left_out:
        plan = stack.enter_context(closing(planner.without_drafter(""))).largest(start, like)
    return plan


def make_report(
    planner: Planner,
    plan: ChunkPlan | None,
    choice: ContextChoice,
    *,
    seconds: float,
    alternatives: Sequence[FitAlternative] = (),
) -> FitReport:
    """The report of a search that is over; `plan` has the final chunk, None when nothing fits."""
    shown = plan or choice.smallest_miss
    assert shown is not None
    b, options = planner.blueprint, planner.options
    spec = "off" if b.speculation is None else b.speculation.kind
    return FitReport(
        model=b.file.path,
        architecture=planner.config.architecture,
        requested=first_ctx(options, planner.config) if options.max_ctx is None else options.max_ctx,
        n_ctx=0 if plan is None else plan.n_ctx,
        n_ctx_train=planner.config.n_ctx_train,
        chunk=shown.chunk,
        slots=options.slots,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        spec=spec,
        placement=described(b.split),
        stream_rows=b.streaming.rows,
        devices=shown.shares,
        trace=choice.trace,
        flags=() if plan is None else _flags(_as_chosen(b), plan),
        alternatives=tuple(alternatives),
        seconds=seconds,
    )


def _as_chosen(blueprint: Blueprint) -> EngineOptions:
    """Options that ask for the placement that was chosen."""
    options = as_asked(blueprint.options, blueprint.split)
    streaming = blueprint.streaming
    if not streaming.is_possible:
        return options
    memory = options.expert_memory if streaming.rows else "pageable"
    return replace(options, stream_experts=streaming.rows, expert_memory=memory)


def _flags(options: EngineOptions, plan: ChunkPlan) -> tuple[str, ...]:
    """Command-line flags that open this engine again, without what is the default."""
    found = ["--max-ctx", str(plan.n_ctx), "--chunk", str(plan.chunk)]
    for option in fields(options):
        value = getattr(options, option.name)
        default = {} if option.name == "device_cap" else option.default
        if option.name not in FOUND and value != default:
            found += _flag(option.name, value)
    return tuple(found)


def _flag(name: str, value: object) -> list[str]:
    """An option that is not at its default as it is written on the command line."""
    if isinstance(value, dict):
        return [word for cap in value.items() for word in ("--device-cap", cap_text(*cap))]
    if isinstance(value, tuple):
        value = ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    flag = OTHER_FLAGS.get(name) or f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name}"]
    return [flag, str(value)]
