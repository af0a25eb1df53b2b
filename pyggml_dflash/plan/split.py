"""Which device holds which part of a model: as asked, or chosen from what is free. Layer 3.

Pure: reads a list of devices and the sizes of a model's parts, and opens nothing. The first device of a plan
is the target: inputs, whatever is outside of layers but the head, and drafters live there. State lives where
its layer computes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pyggml_dflash.errors import UsageError, human_bytes

SplitKind = Literal["none", "experts", "layers"]
GIB: Final = 2**30
ROUTED: Final = "_exps."  # in the names of what belongs to routed experts
HEADS: Final = ("output.", "output_norm.", "output_hc_")  # behind the last layer
LAYER: Final = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """A device that may take part: its kind as ggml says, and its free bytes."""

    name: str
    kind: str
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Bytes of a model's parts: per layer without and with only the routed experts, and everything else."""

    architecture: str
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    outer: int
    state: int  # of a first slot, estimated

    @property
    def need(self) -> int:
        """What one device must have free to hold all of it: weights, a slot, and a tenth of the weights."""
        return self.margin + self.state + self.weights

    @property
    def weights(self) -> int:
        """Every weight."""
        return sum(self.layers) + sum(self.experts) + self.outer

    @property
    def margin(self) -> int:
        """Room for graphs and scratch: a tenth of the weights, from 2 up to 4 GiB."""
        return max(2 * GIB, min(4 * GIB, self.weights // 10))

    @property
    def has_experts(self) -> bool:
        """True if there are routed experts."""
        return any(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """What the user asked for; None and empty leave the choice."""

    split: SplitKind | Literal["auto"] = "auto"
    devices: tuple[str, ...] = ()
    target: str | None = None
    expert: str | None = None
    parts: tuple[float, ...] = ()  # of the layers, by device
    kv: str | None = None  # for keys and values that the target has no room for


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Where everything goes; devices by their place in `devices`, the target first."""

    kind: SplitKind
    devices: tuple[str, ...]
    layers: tuple[int, ...]  # per trunk layer
    expert: int = 0  # what holds the routed experts
    kv_device: int | None = None  # what may hold keys and values that the target has no room for
    kv_layers: frozenset[int] = frozenset()  # whose keys and values lie there
    reason: str = ""

    def device_of(self, name: str) -> int:
        """Where a tensor goes, by its name; an MTP block behind the trunk is the target's."""
        match = LAYER.match(name)
        if match is None:
            return self.layers[-1] if name.startswith(HEADS) else 0
        layer = int(match[1])
        if layer >= len(self.layers):
            return 0
        if self.kv_device is not None and layer in self.kv_layers and name[match.end() :] in ("k", "v"):
            return self.kv_device
        return self.expert if self.kind == "experts" and ROUTED in name else self.layers[layer]

    def layers_of(self, device: int) -> tuple[int, ...]:
        """The layers that compute on a device."""
        return tuple(i for i, at in enumerate(self.layers) if at == device)


def share_layers(n_layer: int, parts: Sequence[float]) -> tuple[int, ...]:
    """For each layer the device it goes to: runs of layers in proportion to `parts`, at least one each."""
    if n_layer < len(parts):
        raise UsageError(f"{n_layer} layers cannot be split over {len(parts)} devices")
    total, ends = sum(parts), list[int]()
    for i in range(len(parts)):
        end = round(n_layer * sum(parts[: i + 1]) / total)
        least, most = (ends[-1] if ends else 0) + 1, n_layer - (len(parts) - 1 - i)
        ends.append(max(least, min(end, most)))
    return tuple(sum(i >= end for end in ends[:-1]) for i in range(n_layer))


def plan_split(request: SplitRequest, rooms: Sequence[DeviceRoom], size: ModelSize) -> SplitPlan:
    """The placement that was asked for, or the first that fits; what cannot be raises `UsageError`.

    `rooms`: the devices named, in that order, or every device of the build where none is.
    """
    plan = _plan(request, rooms, size)
    return plan if request.kv is None else _with_kv(plan, request.kv)


def _with_kv(plan: SplitPlan, name: str) -> SplitPlan:
    """The plan with a device for keys and values beside the target."""
    if plan.kind == "layers":
        raise UsageError(
            f"kv_overflow_device is {name!r}; with split 'layers' state lies where layers compute"
        )
    lower = [device.lower() for device in plan.devices]
    if name.lower() == lower[0]:
        raise UsageError(
            f"kv_overflow_device is {name!r}, which is the target as well; the devices must differ"
        )
    if name.lower() in lower:
        return replace(plan, kv_device=lower.index(name.lower()))
    return replace(plan, devices=(*plan.devices, name), kv_device=len(lower))


def _plan(request: SplitRequest, rooms: Sequence[DeviceRoom], size: ModelSize) -> SplitPlan:
    _check(request, size)
    kind = _asked(request)
    if kind == "layers":
        chosen = rooms if request.devices else [d for d in rooms if d.kind in ("gpu", "igpu")]
        if len(chosen) < 2:
            raise UsageError(
                "split is 'layers'; it needs two devices or more, and there is "
                f"{_names(chosen) or 'no GPU'}: name them with --devices"
            )
        return _by_layers(chosen, size, request.parts, "asked for")
    if kind == "experts":
        return _by_experts(request, rooms, size, "asked for")
    if kind == "none" or request.target is not None or len(request.devices) == 1:
        return _alone(_target(request, rooms), size, "asked for" if request.target else "split is 'none'")
    return _automatic(rooms, size)


def _check(request: SplitRequest, size: ModelSize) -> None:
    names = [name.lower() for name in request.devices]
    for name in request.devices:
        if names.count(name.lower()) > 1:
            raise UsageError(f"devices names {name!r} twice; each part needs a device of its own")
    if request.devices and request.target is not None:
        raise UsageError(f"both devices and device {request.target!r} are given; pass one of them")
    if len(request.devices) > 1 and request.split == "none":
        raise UsageError(
            f"split is 'none', but devices names {len(request.devices)}; pass one, or another split"
        )
    if request.expert is not None:
        _check_expert(request, size)
    if request.split == "experts" and not size.has_experts:
        raise UsageError(f"split is 'experts'; this {size.architecture} model has no routed experts")
    if request.parts:
        _check_parts(request)


def _check_expert(request: SplitRequest, size: ModelSize) -> None:
    expert = request.expert
    if request.split in ("none", "layers"):
        raise UsageError(
            f"expert_device is {expert!r}, but split is {request.split!r}; use 'experts' or 'auto'"
        )
    if not size.has_experts:
        raise UsageError(f"expert_device is {expert!r}; this {size.architecture} model has no routed experts")
    if len(request.devices) > 1:
        raise UsageError(
            "expert_device and several devices are given; pass --device for the rest of the model"
        )


def _check_parts(request: SplitRequest) -> None:
    if _asked(request) != "layers":
        raise UsageError("tensor_split shares out layers; it needs split 'layers' and its devices")
    if len(request.parts) != len(request.devices):
        n_parts, n_devices = len(request.parts), len(request.devices)
        raise UsageError(f"tensor_split has {n_parts} parts; devices names {n_devices}: one part for each")


def _asked(request: SplitRequest) -> str:
    """The kind of split that the request comes to: 'auto' if it says nothing."""
    if request.split != "auto":
        return request.split
    if request.expert is not None:
        return "experts"
    return "layers" if len(request.devices) > 1 else "auto"


def _target(request: SplitRequest, rooms: Sequence[DeviceRoom]) -> DeviceRoom:
    """The device named as the target, else the roomiest GPU, else an integrated one, else the CPU."""
    named = request.target or (request.devices[0] if request.devices else None)
    if named is not None:
        return next(d for d in rooms if d.name.lower() == named.lower())
    gpus = [d for d in rooms if d.kind == "gpu"]
    if gpus:
        return max(gpus, key=lambda d: d.free)
    for kind in ("igpu", "cpu"):
        for device in rooms:
            if device.kind == kind:
                return device
    raise UsageError(f"no device can compute; this build has {_names(rooms)}")


def _alone(device: DeviceRoom, size: ModelSize, reason: str) -> SplitPlan:
    return SplitPlan(kind="none", devices=(device.name,), layers=(0,) * len(size.layers), reason=reason)


def _by_layers(
    rooms: Sequence[DeviceRoom], size: ModelSize, parts: Sequence[float], reason: str
) -> SplitPlan:
    shares = parts or [max(1, d.free) for d in rooms]
    layers = share_layers(len(size.layers), shares)
    return SplitPlan(kind="layers", devices=tuple(d.name for d in rooms), layers=layers, reason=reason)


def _by_experts(
    request: SplitRequest, rooms: Sequence[DeviceRoom], size: ModelSize, reason: str
) -> SplitPlan:
    target = _target(request, rooms)
    others = [d for d in rooms if d.name != target.name and d.kind in ("gpu", "igpu", "cpu", "rpc")]
    if request.expert is not None:
        named = [d for d in rooms if d.name.lower() == request.expert.lower()]
        others = [d for d in named if d.name != target.name]
        if not others:
            raise UsageError(
                f"expert_device is {request.expert!r}, which is the target as well; the devices must differ"
            )
    if not others:
        raise UsageError(f"split is 'experts'; it needs a device beside {target.name}, and there is none")
    gpus = [d for d in others if d.kind == "gpu" and d.free >= sum(size.experts)]
    expert = max(gpus, key=lambda d: d.free) if gpus else max(others, key=lambda d: d.free)
    layers = (0,) * len(size.layers)
    return SplitPlan(
        kind="experts", devices=(target.name, expert.name), layers=layers, expert=1, reason=reason
    )


def _automatic(rooms: Sequence[DeviceRoom], size: ModelSize) -> SplitPlan:
    """One device if it holds the model; else layers over GPUs; else experts elsewhere; else one device."""
    request, need = SplitRequest(), human_bytes(size.need)
    target = _target(request, rooms)
    if target.kind != "gpu" or target.free >= size.need:
        return _alone(
            target, size, f"{target.name} has {human_bytes(target.free)} free; {need} would be enough"
        )
    gpus = sorted((d for d in rooms if d.kind == "gpu"), key=lambda d: -d.free)
    lacks = f"{target.name} has {human_bytes(target.free)} free of {need}"
    together = sum(d.free for d in gpus)
    if len(gpus) > 1 and together >= size.need and len(size.layers) >= len(gpus):
        reason = f"{lacks}; {len(gpus)} GPUs have {human_bytes(together)} together"
        return _by_layers(gpus, size, (), reason)
    others = [d for d in rooms if d.name != target.name and d.kind in ("gpu", "igpu", "cpu")]
    dense = size.need - sum(size.experts)
    if size.has_experts and target.free >= dense and any(d.free >= sum(size.experts) for d in others):
        return _by_experts(request, rooms, size, f"{lacks}, enough for {human_bytes(dense)} without experts")
    return _alone(target, size, f"{lacks}, and no split helps")


def _names(rooms: Sequence[DeviceRoom]) -> str:
    return ", ".join(d.name for d in rooms)
