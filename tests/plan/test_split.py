"""A placement is what was asked for, or the first that fits; what cannot be is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyggml_dflash.engine.split import as_asked
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.split import (
    GIB,
    DeviceRoom,
    ModelSize,
    SplitPlan,
    SplitRequest,
    plan_split,
    share_layers,
)


def room(name: str, kind: str, free_gib: float) -> DeviceRoom:
    return DeviceRoom(name=name, kind=kind, free=int(free_gib * GIB))


def model(*, layer: float = 1.0, experts: float = 0.0, n_layer: int = 4) -> ModelSize:
    """A model of so many GiB per layer, and of experts per layer."""
    return ModelSize(
        architecture="qwen35moe" if experts else "qwen3",
        layers=(int(layer * GIB),) * n_layer,
        experts=(int(experts * GIB),) * n_layer,
        outer=GIB // 2,
        state=GIB // 4,
    )


CPU, BIG, SMALL = room("CPU", "cpu", 64), room("CUDA0", "gpu", 24), room("CUDA1", "gpu", 12)


def plan(*rooms: DeviceRoom, size: ModelSize, **asked: Any) -> SplitPlan:
    return plan_split(SplitRequest(**asked), rooms, size)


@pytest.mark.parametrize(
    ("n_layer", "parts", "counts"),
    [
        (4, (1, 3), [1, 3]),
        (48, (1, 1), [24, 24]),
        (7, (1, 1, 1), [2, 3, 2]),
        (4, (1, 1000), [1, 3]),
        (3, (1000, 1, 1), [1, 1, 1]),
        (10, (0.5, 0.25, 0.25), [5, 3, 2]),
    ],
)
def test_layers_are_shared_out_in_runs_with_at_least_one_for_each_device(
    n_layer: int, parts: tuple[float, ...], counts: list[int]
) -> None:
    shared = share_layers(n_layer, parts)
    assert list(shared) == sorted(shared)
    assert [shared.count(i) for i in range(len(parts))] == counts


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="2 layers cannot be split over 3 devices"):
        share_layers(2, (1, 1, 1))


# what was asked for


def test_named_devices_share_the_layers_by_the_parts_asked_for() -> None:
    found = plan(SMALL, BIG, size=model(), devices=("CUDA1", "CUDA0"), parts=(1.0, 3.0))
    assert (found.kind, found.devices, found.layers) == ("layers", ("CUDA1", "CUDA0"), (0, 1, 1, 1))


def test_without_parts_free_memory_shares_the_layers() -> None:
    found = plan(BIG, SMALL, size=model(n_layer=6), devices=("CUDA0", "CUDA1"))
    assert found.layers == (0, 0, 0, 0, 1, 1)


def test_a_layer_has_its_weights_and_its_state_on_one_device_and_the_head_is_behind_the_last() -> None:
    found = plan(BIG, SMALL, size=model(), devices=("CUDA0", "CUDA1"), parts=(1.0, 1.0))
    names = (
        "token_embd.weight",
        "rope_freqs.weight",
        "blk.1.attn_q.weight",
        "blk.1.k",
        "blk.2.attn_q.weight",
    )
    assert [found.device_of(name) for name in names] == [0, 0, 0, 0, 1]
    assert [found.device_of(n) for n in ("blk.2.v", "output.weight", "output_norm.weight")] == [1, 1, 1]


def test_only_the_routed_experts_go_to_the_expert_device() -> None:
    found = plan(BIG, CPU, size=model(experts=8), target="CUDA0", expert="cpu")
    assert (found.kind, found.devices) == ("experts", ("CUDA0", "CPU"))
    names = ("ffn_up_exps.weight", "ffn_down_exps.scale", "ffn_gate_inp.weight", "ffn_up_shexp.weight", "k")
    assert [found.device_of(f"blk.3.{name}") for name in names] == [1, 1, 0, 0, 0]


def test_keys_and_values_of_some_layers_may_lie_elsewhere_and_nothing_else() -> None:
    asked = plan(BIG, CPU, size=model(), target="CUDA0", kv="CPU")
    assert (asked.devices, asked.kv_device) == (("CUDA0", "CPU"), 1)
    found = replace(asked, kv_layers=frozenset({3}))
    names = ("blk.3.k", "blk.3.v", "blk.3.memory", "blk.3.attn_k.weight", "blk.2.k")
    assert [found.device_of(name) for name in names] == [1, 1, 0, 0, 0]


def test_experts_and_overflow_may_share_a_device() -> None:
    found = plan(BIG, CPU, size=model(experts=8), target="CUDA0", expert="CPU", kv="CPU")
    assert (found.devices, found.expert, found.kv_device) == (("CUDA0", "CPU"), 1, 1)


def test_an_mtp_block_behind_the_trunk_stays_with_the_target() -> None:
    asked = plan(BIG, CPU, size=model(experts=8), target="CUDA0", expert="CPU")
    assert asked.device_of("blk.4.ffn_up_exps.weight") == 0
    layers = plan(BIG, SMALL, size=model(), devices=("CUDA0", "CUDA1"))
    assert layers.device_of("blk.4.attn_q.weight") == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"devices": ("CUDA0", "cuda0")}, "names 'CUDA0' twice"),
        ({"devices": ("CUDA0", "CUDA1"), "target": "CUDA0"}, "pass one of them"),
        ({"devices": ("CUDA0", "CUDA1"), "split": "none"}, "split is 'none', but devices names 2"),
        ({"split": "layers", "devices": ("CUDA0",)}, "needs two devices or more, and there is CUDA0"),
        ({"split": "experts"}, "this qwen3 model has no routed experts"),
        ({"expert": "CPU"}, "this qwen3 model has no routed experts"),
        ({"expert": "CPU", "split": "layers"}, "expert_device is 'CPU', but split is 'layers'"),
        ({"devices": ("CUDA0", "CUDA1"), "kv": "CPU"}, "with split 'layers' state lies"),
        ({"target": "CUDA0", "kv": "cuda0"}, "kv_overflow_device is 'cuda0', which is the target"),
        ({"parts": (1.0, 3.0)}, "tensor_split shares out layers"),
        ({"devices": ("CUDA0", "CUDA1"), "parts": (1.0,)}, "tensor_split has 1 parts; devices names 2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(asked: dict[str, Any], message: str) -> None:
    names = [name.lower() for name in asked.get("devices", ())]
    rooms = [d for d in (BIG, SMALL, CPU) if not names or d.name.lower() in names]
    with pytest.raises(UsageError, match=message):
        plan(*rooms, size=model(), **asked)


def test_experts_need_another_device_than_the_target() -> None:
    with pytest.raises(UsageError, match="the devices must differ"):
        plan(BIG, CPU, size=model(experts=1), target="CUDA0", expert="cuda0")


# the automatic choice


def test_the_roomiest_gpu_holds_a_model_that_fits_there() -> None:
    found = plan(CPU, SMALL, BIG, size=model(layer=4))
    assert (found.kind, found.devices) == ("none", ("CUDA0",))
    assert "CUDA0 has 24.0 GiB free" in found.reason


def test_layers_go_over_the_gpus_that_hold_the_model_together() -> None:
    found = plan(CPU, SMALL, BIG, size=model(layer=7))
    assert (found.kind, found.devices, found.layers) == ("layers", ("CUDA0", "CUDA1"), (0, 0, 0, 1))
    assert "2 GPUs have 36.0 GiB together" in found.reason


def test_experts_go_beside_a_gpu_that_holds_the_rest() -> None:
    found = plan(CPU, BIG, size=model(layer=2, experts=9))
    assert (found.kind, found.devices) == ("experts", ("CUDA0", "CPU"))
    assert "enough for 12.8 GiB without experts" in found.reason


def test_a_model_that_no_split_helps_goes_to_the_roomiest_gpu() -> None:
    found = plan(CPU, SMALL, BIG, size=model(layer=100))
    assert (found.kind, found.devices) == ("none", ("CUDA0",))
    assert "no split helps" in found.reason


def test_what_was_chosen_can_be_asked_for() -> None:
    options = EngineOptions()
    layers = plan(CPU, SMALL, BIG, size=model(layer=7))
    asked = as_asked(options, layers)
    assert (asked.devices, asked.tensor_split) == (("CUDA0", "CUDA1"), (3.0, 1.0))
    again = plan(BIG, SMALL, size=model(layer=7), devices=asked.devices, parts=asked.tensor_split)
    assert (again.kind, again.layers) == ("layers", layers.layers)
    asked = as_asked(options, plan(CPU, BIG, size=model(layer=2, experts=9)))
    assert (asked.device, asked.expert_device) == ("CUDA0", "CPU")
    assert as_asked(options, plan(CPU, BIG, size=model())) == options


def test_without_a_gpu_the_cpu_holds_everything() -> None:
    assert plan(CPU, size=model(layer=100)).devices == ("CPU",)


@pytest.mark.parametrize(("weights", "need"), [(1, 3), (30, 33), (100, 104)])
def test_what_a_model_needs_is_its_weights_and_a_tenth_within_limits(weights: int, need: int) -> None:
    size = ModelSize(architecture="qwen3", layers=(weights * GIB,), experts=(0,), outer=0, state=0)
    assert size.need == need * GIB
