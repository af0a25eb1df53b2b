"""From options to devices: what a model's parts weigh, which device gets which, opening them. Layer 6."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml.device import Backend, DeviceInfo, devices, named_device
from pyggml_dflash.ggml.placement import can_compute
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.hot_experts import expert_bytes
from pyggml_dflash.model.weights import TensorSpec
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.hot_experts import HotPlan, RouteStats, choose_hot
from pyggml_dflash.plan.split import LAYER, ROUTED, DeviceRoom, ModelSize, SplitPlan, SplitRequest, plan_split
from pyggml_dflash.plan.streaming import Streaming, StreamRequest, choose_streaming

LOG: Final = logging.getLogger(__name__)


def model_size(
    file: TensorFile, specs: dict[str, TensorSpec], config: ModelConfig, state_bytes: int
) -> ModelSize:
    """Bytes of the parts of a model that can lie apart; gathered rows stay in the file and count nothing."""
    layers, experts, outer = [0] * config.n_layer, [0] * config.n_layer, 0
    for name, spec in specs.items():
        n_bytes = 0 if spec.use == "rows" else file.tensors[name].n_bytes
        match = LAYER.match(name)
        if match is None or int(match[1]) >= config.n_layer:
            outer += n_bytes
        elif ROUTED in name:
            experts[int(match[1])] += n_bytes
        else:
            layers[int(match[1])] += n_bytes
    return ModelSize(
        architecture=config.architecture,
        layers=tuple(layers),
        experts=tuple(experts),
        outer=outer,
        state=state_bytes,
    )


def choose_split(options: EngineOptions, size: ModelSize) -> tuple[SplitPlan, tuple[DeviceInfo, ...]]:
    """The placement of a model, and its devices in the plan's order."""
    present = devices()
    named = {name: named_device(name, present, option=option) for name, option in _named(options).items()}
    infos = {info.name: info for info in named.values()} | {d.name: d for d in present}
    listed = [named[name] for name in options.devices] or list(infos.values())
    if options.expert_device is not None and named[options.expert_device] not in listed:
        listed.append(named[options.expert_device])
    request = SplitRequest(
        split=options.split,
        devices=tuple(named[name].name for name in options.devices),
        target=None if options.device is None else named[options.device].name,
        expert=None if options.expert_device is None else named[options.expert_device].name,
        parts=options.tensor_split,
        kv=None if options.kv_overflow_device is None else named[options.kv_overflow_device].name,
    )
    caps = options.device_cap
    rooms = [
        DeviceRoom(name=d.name, kind=d.kind, free=min(d.memory_free, caps.get(d.name, d.memory_free)))
        for d in listed
    ]
    plan = plan_split(request, rooms, size)
    if len(plan.devices) == 1 and options.link_type != "f32":
        raise UsageError(
            f"link_type is {options.link_type!r}, but {plan.devices[0]} has the whole model: "
            "no rows go to another device"
        )
    if len(plan.devices) > 1:
        LOG.info("placement: %s", described(plan))
    return plan, tuple(infos[name] for name in plan.devices)


def choose_hot_experts(
    options: EngineOptions, split: SplitPlan, file: TensorFile, config: ModelConfig
) -> HotPlan | None:
    """Which experts are copied to the target, if counts are given; counts of another model are refused."""
    if options.expert_placement is None:
        return None
    if split.kind != "experts" or config.moe is None:
        raise UsageError("expert_placement is given, but no other device has the experts: pass expert_device")
    stats = RouteStats.read(options.expert_placement)
    moe = config.moe
    stats.check(n_layer=config.n_layer, n_expert=moe.n_expert, n_used=moe.n_used)
    if options.slots > 1:
        LOG.warning(
            "expert_placement is not used with %d slots: which rows run together would show in the text",
            options.slots,
        )
        return None
    sizes = [expert_bytes(file, i, moe.n_expert) for i in range(config.n_layer)]
    plan = choose_hot(stats, sizes, options.expert_budget_mib * 2**20)
    LOG.info(
        "%d of %d experts are copied to %s: %.2f GiB, %.1f%% of the picks counted",
        plan.n_copies,
        stats.picks.size,
        split.devices[0],
        plan.n_bytes / 2**30,
        100 * plan.coverage,
    )
    return plan if plan.n_copies else None


def choose_copies(
    options: EngineOptions,
    split: SplitPlan,
    backend: Backend,
    file: TensorFile,
    specs: dict[str, TensorSpec],
    most_rows: int,
) -> Streaming:
    """For which forwards experts are streamed to the target, logged; in ordinary memory if it has no pinned.

    `most_rows`: of a forward of a prompt.
    """
    routed = [
        (name, spec) for name, spec in specs.items() if split.expert and split.device_of(name) == split.expert
    ]
    lacking = (
        f"{name!r} of type {file.tensors[name].type.label}"
        for name, spec in routed
        if not can_compute(backend, file.tensors[name].type, spec.shape, spec.use)
    )
    streaming = choose_streaming(
        StreamRequest(
            rows=options.stream_experts,
            memory=options.expert_memory,
            repacks=options.repack == "on",
            most_rows=most_rows,
            target=backend.info.kind,
            experts=backend.all[split.expert].info.kind if split.kind == "experts" else None,
            lacks=next(lacking, None),
        )
    )
    return _told(streaming, backend, most_rows) if streaming.rows else streaming


def _told(streaming: Streaming, target: Backend, most_rows: int) -> Streaming:
    """The choice, logged; without pinned memory where the target has none."""
    if streaming.pinned and target.pinned_buffer_type is None:
        LOG.warning("%s has no pinned memory: experts lie in ordinary memory", target.name)
        streaming = streaming.in_ordinary_memory
    memory = "pinned host memory" if streaming.pinned else "host memory"
    what = f"forwards of {streaming.rows} rows and more copy experts from {memory} to {target.name}"
    if most_rows < streaming.rows:
        LOG.warning("%s; those of this engine have at most %d", what, most_rows)
    else:
        LOG.info("%s", what)
    return streaming


def _named(options: EngineOptions) -> dict[str, str]:
    """The first option that names each device, by that name."""
    found = dict.fromkeys(options.devices, "devices")
    for option in ("device", "expert_device", "kv_overflow_device"):
        name = getattr(options, option)
        if name is not None:
            found.setdefault(name, option)
    return found


def described(plan: SplitPlan) -> str:
    """A placement and its reason in a line."""
    parts = ", ".join(_part(plan, i) for i in range(len(plan.devices)))
    return f"{parts} ({plan.reason})"


def as_asked(options: EngineOptions, plan: SplitPlan) -> EngineOptions:
    """Options that ask for what a plan chose for them."""
    if options.split != "auto" or options.devices or options.device or options.expert_device:
        return options
    if plan.kind == "experts":
        return replace(options, device=plan.devices[0], expert_device=plan.devices[plan.expert])
    if plan.kind == "layers":
        counts = tuple(float(len(plan.layers_of(i))) for i in range(len(plan.devices)))
        return replace(options, devices=plan.devices, tensor_split=counts)
    return options


def _part(plan: SplitPlan, device: int) -> str:
    if plan.kind == "none" and device == 0:
        return f"all layers on {plan.devices[0]}"
    layers = plan.layers_of(device)
    if not layers:
        what = "experts" if device == plan.expert else "keys and values that do not fit"
        return f"{what} on {plan.devices[device]}"
    return f"layers {layers[0]} to {layers[-1]} on {plan.devices[device]}"


def open_backends(infos: tuple[DeviceInfo, ...], options: EngineOptions, stack: ExitStack) -> Backend:
    """A backend on the first device, with those on the others as its peers; `stack` closes them."""
    threads, half, limit_s = options.threads, options.link_type == "f16", options.worker_timeout_s
    peers = []
    for info in infos[1:]:
        peers.append(Backend(info, threads=threads, timeout_s=limit_s))
        stack.callback(peers[-1].close)
    target = Backend(infos[0], threads=threads, peers=tuple(peers), half_links=half, timeout_s=limit_s)
    stack.callback(target.close)
    return target
