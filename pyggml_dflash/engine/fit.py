"""Which context fits: measures what an engine of a given context would take, and searches. Layer 6.

Nothing is allocated and no weight is read. Every device is looked at, the host too; a device's plan has
everything that will be resident there, a prefill chunk at the end of the context, and the headroom.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Final

from pyggml_dflash.arch.base import StateLayout
from pyggml_dflash.engine.assembly import (
    DEFAULT_MAX_CTX,
    Assembly,
    Blueprint,
    Settings,
    assemble,
    first_ctx,
    settle,
)
from pyggml_dflash.engine.snapshot_plan import full_state_bytes, reserved_bytes
from pyggml_dflash.errors import (
    ContextFitError,
    UnsupportedModelError,
    UsageError,
    human_bytes,
    room_on,
)
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.weights import LoadedWeights
from pyggml_dflash.options import KVType, Margin, split_max_ctx
from pyggml_dflash.plan.chunk import ChunkPlan, DeviceShare, binding_share, fit_chunk
from pyggml_dflash.plan.context import ContextChoice, ContextFit, Probe, choose_context, step_for
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.state.snapshot import LABEL as SNAPSHOTS

LOG: Final = logging.getLogger(__name__)
CAP_STEP: Final = 2**20  # of a cap that is proposed
FLOOR_ROWS: Final = 256  # smallest chunk that a context is given up for
MIN_GPU_HEADROOM: Final = 256 * 2**20  # driver and kernels take memory that no allocator tells
MIN_HOST_HEADROOM: Final = 512 * 2**20  # work buffers of CPU kernels, graph headers, other programs
GRAPHS: Final = ("graphs", "draft graphs", "graph scratch")  # labels of what is measured
WITHOUT_GRAPHS: Final = ChunkPlan(n_ctx=0, chunk=0, available=0, required=0, position_bytes=0)
MAPPED: Final = " (mapped)"  # end of the labels of weights that stay in the file
SMALLER_TYPES: Final[tuple[KVType, ...]] = ("f16", "q8_0", "q4_0")


class Planner:
    """Plans contexts for one blueprint; owns dry weights, so `close` it before the blueprint's devices."""

    def __init__(self, blueprint: Blueprint, ledger: Ledger, probe: MemoryProbe | None = None) -> None:
        """`ledger`: the real one, for what is free. `probe`: of a planner with the same weights."""
        self.blueprint, self._ledger = blueprint, ledger
        self.options, self.config = options, _ = blueprint.options, blueprint.config
        self._margin = Margin.parse(options.fit_margin)
        pads = options.slots > 1  # products of several rows, see `graph_needs`
        probe = MemoryProbe(blueprint.backend) if probe is None else probe
        self._probe = probe.of((options.cache_type_k, options.cache_type_v, pads))
        self._dry = Ledger(dry=True)
        self._weights: LoadedWeights = blueprint.load_weights(self._dry)
        self._free: dict[str, int] = {}
        self.read_free()

    @property
    def is_auto(self) -> bool:
        """True if the context is to be found."""
        return self.options.max_ctx is not None and split_max_ctx(self.options.max_ctx)[0]

    def close(self) -> None:
        """Free headers of tensors; there is nothing else."""
        self._weights.close()

    def read_free(self) -> None:
        """Ask every device what it has; what the engine holds already counts as free for its plan."""
        for backend in self.blueprint.backends:
            labels = self._ledger.by_label(backend.name)
            self._free[backend.name] = backend.memory_free() + sum(labels.values()) - mapped_bytes(labels)

    def choose(self, *, most: int | None = None) -> ContextChoice:
        """The largest context that fits, up to `most`; a number given by the user is tried alone."""
        start = first_ctx(self.options, self.config)
        if self.is_auto:
            return self.search(start if most is None else min(start, most))
        self._check_least(start)
        plan = self.plan_at(start)
        fits = plan.fits
        return ContextChoice(
            plan=plan if fits else None, trace=(Probe.of(plan),), smallest_miss=None if fits else plan
        )

    def search(self, start: int) -> ContextChoice:
        """The largest context up to `start` that fits, whatever was asked for."""
        return choose_context(self._begin(start), self.plan_at)

    def largest(self, start: int, like: ChunkPlan) -> ChunkPlan | None:
        """The plan of the context that `search` finds; None if none fits.

        Where a context has no room for what is resident beside graphs that are too small, it is a miss and
        its graphs are not measured. `like`: a plan of a similar engine, for a guess of how much it misses.
        """
        known = WITHOUT_GRAPHS  # graphs of a smaller context, which are no larger

        def plan_at(n_ctx: int) -> ChunkPlan:
            nonlocal known
            settings = self.settings(n_ctx)
            if not self._plan(settings, known).fits:
                return self._plan(settings, like if known is WITHOUT_GRAPHS else known)
            plan = self._plan(settings)
            known = plan if plan.fits else known
            return plan

        return choose_context(self._begin(start), plan_at).plan

    def _begin(self, start: int) -> ContextFit:
        least = self._check_least(start)
        if isinstance(self.options.chunk, int):
            least = max(least, self.options.chunk)
        return ContextFit.starting_at(start, n_ctx_train=self.config.n_ctx_train, min_ctx=least)

    def _check_least(self, start: int) -> int:
        least = self.options.min_ctx or 0
        if least > start:
            raise UsageError(f"min_ctx is {least}; the largest context to try is {start}")
        return least

    def settings(self, n_ctx: int, chunk: int | None = None) -> Settings:
        """Choices for a context; without a chunk the smallest useful one, or the one asked for."""
        found = self._settled(n_ctx)
        if isinstance(self.options.chunk, int):
            return found
        floor = max(FLOOR_ROWS, self.blueprint.streaming.rows)
        return replace(found, chunk=min(found.chunk, floor) if chunk is None else chunk)

    def _settled(self, n_ctx: int) -> Settings:
        """Choices for a context, with the largest chunk."""
        b = self.blueprint
        return settle(self.options, b.architecture, self.config, n_ctx=n_ctx, usual_chunk=b.usual_chunk)

    def plan_at(self, n_ctx: int) -> ChunkPlan:
        """What a context takes with the smallest useful chunk, measured."""
        return self._plan(self.settings(n_ctx))

    def with_chunk(self, plan: ChunkPlan) -> ChunkPlan:
        """A plan that fits, with the largest chunk that has room too."""
        most = self._settled(plan.n_ctx).chunk
        if plan.chunk == most:
            return plan

        def taken(rows: int) -> int | None:
            larger = self._plan(self.settings(plan.n_ctx, rows))
            return larger.required if larger.fits else None

        room = max(share.available for share in plan.shares)
        chunk = fit_chunk(plan.n_ctx, room, 0, taken, max_rows=most, headroom=0).chunk
        return self._plan(self.settings(plan.n_ctx, max(chunk, plan.chunk)))

    def _plan(self, settings: Settings, like: ChunkPlan | None = None) -> ChunkPlan:
        """A plan with measured graphs, or with those of another plan."""
        terms, state_bytes = self._terms(settings, like)
        shares = tuple(
            self._share(b.name, terms[b.name], settings, self._ledger.caps.get(b.name))
            for b in self.blueprint.backends
        )
        tight = binding_share(shares)
        growing = sum(tight.terms.get(label, 0) for label in ("state", "draft cache", "inputs", SNAPSHOTS))
        copies = 2 if SNAPSHOTS in tight.terms else 1
        recurrent = self._slot_bytes(settings.layout, tight.device, grows=False)
        fixed = copies * self.options.slots * recurrent
        return ChunkPlan(
            n_ctx=settings.n_ctx,
            chunk=settings.chunk,
            available=tight.available,
            required=tight.required,
            position_bytes=max(0, growing - fixed) // settings.layout.n_ctx + 1,
            device=tight.device,
            snapshot_bytes=state_bytes,
            shares=shares,
        )

    def _share(
        self, device: str, terms: Mapping[str, int], settings: Settings, cap: int | None
    ) -> DeviceShare:
        """One device's part. The system drops mapped pages when it needs them, so a context given as a number
        is not refused for them; one that is to be found leaves them in memory."""
        available = self._free[device] + (0 if self.is_auto else mapped_bytes(terms))
        available = available if cap is None else min(available, cap)
        first = sum(n for label, n in terms.items() if "weights" in label or label == "reserve")
        first += self._slot_bytes(settings.layout, device)
        kind = next(b.info.kind for b in self.blueprint.backends if b.name == device)
        floor = MIN_GPU_HEADROOM if kind in ("gpu", "rpc") else MIN_HOST_HEADROOM if cap is None else 0
        headroom = self._margin.of(max(0, available - first), floor=min(floor, available // 4))
        return DeviceShare(device=device, available=available, headroom=headroom, terms=terms)

    def _slot_bytes(self, layout: StateLayout, device: str, *, grows: bool = True) -> int:
        """Bytes of one slot on a device; without `grows` only those that do not depend on the context."""
        home = self.blueprint.home
        return sum(
            t.n_bytes for t in layout.tensors if home(t.name).name == device and (grows or not t.grows)
        )

    def _terms(self, settings: Settings, like: ChunkPlan | None) -> tuple[dict[str, dict[str, int]], int]:
        """Bytes by device and name of an engine with these settings, and of a stored state of its context."""
        b, ledger = self.blueprint, Ledger(dry=True)
        with ExitStack() as stack:
            parts = assemble(b, self._weights, settings, ledger, stack)
            found = {
                x.name: Counter(self._dry.by_label(x.name)) + Counter(ledger.by_label(x.name))
                for x in b.backends
            }
            target = found[b.backend.name]
            for x in b.backend.all:
                found[x.name].update(self._graphs(parts, x.name) if like is None else graphs_of(like, x.name))
            if self.options.device_reserve_mib:
                target["reserve"] = self.options.device_reserve_mib * 2**20
            if b.host is not None:
                found[b.host.name]["embedding rows"] = 4 * b.config.n_embd * settings.chunk
            state_bytes = full_state_bytes(settings, parts)
            reserved = reserved_bytes(b, state_bytes) if self.is_auto else 0
            if reserved:
                target[SNAPSHOTS] = reserved
        return {name: dict(terms) for name, terms in found.items()}, state_bytes

    def _graphs(self, parts: Assembly, device: str) -> dict[str, int]:
        """What graphs take on a device, measured."""
        probe = self._probe.on(device)
        found = {"graphs": parts.forwards.needs(probe)}
        if parts.drafters:
            found["draft graphs"] = parts.drafters[0].needs(probe)
        if probe.scratch:
            found["graph scratch"] = probe.scratch
        return found

    def refuse(self, choice: ContextChoice) -> ContextFitError:
        """The error for a search without an answer: what lacks, and what would fit instead."""
        miss = choice.smallest_miss
        assert miss is not None
        return ContextFitError(
            asked=miss.n_ctx,
            fits=self._beside_mapped(miss) if self.is_auto else self._largest_below(miss),
            missing=miss.missing,
            device=miss.device,
            smaller_types=self._with_smaller_types(miss),
            drafting=self.blueprint.speculation is not None,
            cap=self.binding_cap(miss),
            larger_cap=self._larger_cap(miss),
        )

    def binding_cap(self, miss: ChunkPlan) -> int | None:
        """The cap of the device that binds; None if the device itself has no more."""
        cap = self._ledger.caps.get(miss.device)
        return cap if cap == miss.available else None

    def _larger_cap(self, miss: ChunkPlan) -> int | None:
        """A cap with which the context fits; None where a cap is not all that is in the way."""
        cap = self.binding_cap(miss)
        if cap is None or sum(share.balance < 0 for share in miss.shares) != 1:
            return None
        terms = binding_share(miss.shares).terms
        settings = self.settings(miss.n_ctx, miss.chunk)
        while True:
            share = self._share(miss.device, terms, settings, cap)
            if share.balance >= 0:
                return cap
            if share.available < cap:
                return None
            cap = -(-share.required // CAP_STEP) * CAP_STEP  # of what is added, the headroom takes a part

    def _beside_mapped(self, miss: ChunkPlan) -> int:
        """A context that fits as a number, for which the system may drop mapped weights; 0: none does."""
        if not any(mapped_bytes(share.terms) for share in miss.shares):
            return 0
        n = min(first_ctx(self.options, self.config), DEFAULT_MAX_CTX)
        options = replace(self.options, max_ctx=n, min_ctx=None)
        planner = Planner(replace(self.blueprint, options=options), self._ledger, self._probe)
        with closing(planner):
            plan = planner.plan_at(n)
            return n if plan.fits else planner._largest_below(plan)

    def _largest_below(self, miss: ChunkPlan) -> int:
        step = step_for(self.config.n_ctx_train)
        start = (miss.n_ctx - 1) // step * step
        plan = self.largest(start, miss) if start > (self.options.min_ctx or 0) else None
        return 0 if plan is None else plan.n_ctx

    def _with_smaller_types(self, miss: ChunkPlan) -> dict[str, int]:
        """Contexts up to the one missed that fit with smaller types of the cache, by type."""
        most = miss.n_ctx
        slot_bytes = self.settings(most).layout.slot_bytes
        found: dict[str, int] = {}
        for name in SMALLER_TYPES:
            with ExitStack() as stack:
                variant = self.variant(name, self.options.slots, stack)
                if variant is None or variant.settings(most).layout.slot_bytes >= slot_bytes:
                    continue
                plan = variant.largest(most, miss)
                if plan is not None:
                    found[name] = plan.n_ctx
        return found

    def without_drafter(self, reason: str) -> Planner:
        """A planner of the same engine without its drafter."""
        return Planner(self.blueprint.without_drafter(reason), self._ledger, self._probe)

    def variant(self, cache_type: KVType, slots: int, stack: ExitStack) -> Planner | None:
        """A planner for other types of keys and values and a number of slots; None: they cannot be used."""
        if cache_type in ("q8_0", "q4_0") and not self.blueprint.flash_attn:
            return None
        options = replace(
            self.options, slots=slots, min_ctx=None, cache_type_k=cache_type, cache_type_v=cache_type
        )
        try:
            settle(options, self.blueprint.architecture, self.config)
        except UsageError:
            return None
        planner = Planner(replace(self.blueprint, options=options), self._ledger, self._probe)
        stack.callback(planner.close)
        return planner


def find_fit(blueprint: Blueprint, ledger: Ledger, stack: ExitStack) -> tuple[Planner, ContextChoice]:
    """A context, and the planner that chose it, which `stack` closes.

    What nobody asked for is left out, with the reason: where nothing fits beside it copies of experts, then a
    drafter; and a drafter that the devices cannot compute.
    """
    planner = Planner(blueprint, ledger)
    while True:
        stack.callback(planner.close)
        drafts = planner.blueprint.choice.may_be_left_out
        try:
            choice = planner.choose()
        except UnsupportedModelError as error:
            if not drafts:
                raise
            planner = planner.without_drafter(str(error))
            continue
        miss, streams = choice.smallest_miss, planner.blueprint.streaming.may_be_left_out
        if choice.plan is not None or miss is None or not (drafts or streams):
            return planner, choice
        more = f"{human_bytes(miss.missing)} more than {room_on(miss.device, planner.binding_cap(miss))}"
        if streams:
            reason = f"copies would take {more}"
            LOG.info("experts are not streamed: %s", reason)
            planner = Planner(planner.blueprint.without_streaming(reason), ledger)
        else:
            planner = planner.without_drafter(f"drafting would take {more}")


def graphs_of(plan: ChunkPlan, device: str) -> dict[str, int]:
    """What graphs take on a device in a plan; nothing in a plan without shares."""
    terms = next((share.terms for share in plan.shares if share.device == device), {})
    return {label: terms[label] for label in GRAPHS if label in terms}


def mapped_bytes(labels: Mapping[str, int]) -> int:
    """Bytes of weights that stay in the mapped file."""
    return sum(n for label, n in labels.items() if label.endswith(MAPPED))
