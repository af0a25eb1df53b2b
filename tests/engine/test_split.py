"""A model over several devices computes what it computes on one, to the bit.

Devices are the CPU and workers on this machine: the same kernels, behind memory that nobody else can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from pyggml_dflash import Engine, UsageError
from pyggml_dflash.api import route_stats
from pyggml_dflash.options import EngineOptions
from tests.drafts.drafted import draft_file
from tests.engine.tiny import QWEN35, opened, prompt
from tests.engine.workers import Worker, workers
from tests.reference.opened import Floats, continued, on_the_cpu, open_core
from tests.reference.stored import model_file
from tests.tiny import Tiny, tokens, write_tiny

IDS: Final = tokens(300, seed=11)  # goes beyond the first 256 cache rows
N_PROMPT: Final = 270
LAYERS: Final = ("llama", "qwen3", "qwen35", "qwen35moe", "qwen4exp")
EXPERTS: Final = ("qwen35moe", "qwen4exp")
ORDERS: Final = ("cpu+worker", "worker+cpu", "worker+worker", "cpu+worker+worker")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Worker, ...]]:
    with workers(2) as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(folder, Tiny(architecture=name, n_mtp=1 if name.startswith("qwen35") else 0))
        for name in LAYERS
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], pair: tuple[Worker, ...]) -> dict[tuple[str, str], Floats]:
    """Logits of every model on the CPU and on a worker, each by itself."""
    return {
        (name, device): logits(replace(on_the_cpu(models[name]), device=of(device, pair)))
        for name in LAYERS
        for device in ("cpu", "worker")
    }


def of(name: str, pair: tuple[Worker, ...]) -> str:
    return "CPU" if name == "cpu" else pair[0].name


def named(order: str, pair: tuple[Worker, ...]) -> tuple[str, ...]:
    """The devices of an order such as 'cpu+worker'."""
    left = [worker.name for worker in pair]
    return tuple("CPU" if name == "cpu" else left.pop(0) for name in order.split("+"))


def logits(options: EngineOptions) -> Floats:
    """Those of a prompt, of its continuation, and those that a prompt's end and decoded tokens have."""
    with open_core(options) as core:
        whole = core.logits(IDS)
        return np.concatenate([whole, np.array(list(continued(core, IDS[:N_PROMPT], IDS[N_PROMPT:])))])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", LAYERS)
def test_layers_over_several_devices_give_the_logits_of_one(
    models: dict[str, Path],
    alone: dict[tuple[str, str], Floats],
    pair: tuple[Worker, ...],
    model: str,
    order: str,
) -> None:
    options = replace(on_the_cpu(models[model]), device=None, devices=named(order, pair))
    np.testing.assert_array_equal(logits(options), alone[model, order.split("+")[0]])


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("model", EXPERTS)
def test_experts_on_another_device_give_the_logits_of_one(
    models: dict[str, Path],
    alone: dict[tuple[str, str], Floats],
    pair: tuple[Worker, ...],
    model: str,
    order: str,
) -> None:
    target, expert = named(order, pair)
    options = replace(on_the_cpu(models[model]), device=target, expert_device=expert)
    np.testing.assert_array_equal(logits(options), alone[model, order.split("+")[0]])


@pytest.mark.parametrize("model", ["llama", "qwen35moe", "qwen4exp"])
def test_half_links_round_a_prompts_rows_and_not_those_of_tokens(
    models: dict[str, Path], alone: dict[tuple[str, str], Floats], pair: tuple[Worker, ...], model: str
) -> None:
    apart = {"devices": ("CPU", pair[0].name), "device": None}
    if model != "llama":
        apart = {"device": "CPU", "expert_device": pair[0].name}
    options = replace(on_the_cpu(models[model], chunk=300), link_type="f16", **apart)
    with open_core(options) as core:
        many = core.logits(IDS)
    assert 0 < np.abs(many - alone[model, "cpu"][: len(IDS)]).max() < 0.02  # of a standard deviation of 1
    with open_core(replace(options, chunk=64)) as core:
        few = core.logits(IDS)
    np.testing.assert_array_equal(few, alone[model, "cpu"][: len(IDS)])


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("device", "nope"),
        ("devices", ("CPU", "nope")),
        ("expert_device", "nope"),
        ("kv_overflow_device", "nope"),
        ("expert_device", "rpc://127.0.0.1:1/x"),
    ],
)
def test_an_unknown_device_is_refused_with_the_option_that_names_it(option: str, given: Any) -> None:
    name = given if isinstance(given, str) else given[-1]
    with pytest.raises(UsageError, match=f"^{option} is {name!r}; "):
        Engine.open(**{"device": None, option: given})


def generated(engine: Engine, **options: Any) -> list[int]:
    return list(engine.generate(prompt(40), max_tokens=40, ignore_eos=True, **options).tokens)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafting_over_several_devices_leaves_the_text_of_plain_decoding_on_one(
    pair: tuple[Worker, ...], tmp_path: Path, kind: str, order: str
) -> None:
    model = model_file("qwen35-tiny", "F32", tmp_path)
    with opened(model, repack="off") as engine:
        plain = generated(engine)
    options: dict[str, Any] = {"spec": "mtp", "spec_width": 4}
    if kind == "dflash":
        options = {"draft": draft_file("dflash-fitted-tiny", tmp_path), "spec_width": 4}
    with opened(model, device=None, devices=named(order, pair), repack="off", **options) as engine:
        result = engine.generate(prompt(40), max_tokens=40, ignore_eos=True)
    assert list(result.tokens) == plain
    assert result.speculation is not None
    assert result.speculation.drafted > 0


def test_what_lies_where_is_what_the_plan_says(pair: tuple[Worker, ...]) -> None:
    with opened(QWEN35, device=None, devices=("CPU", pair[0].name), tensor_split=(1, 3)) as engine:
        held = engine.memory()
        info = engine.info
    assert (info.devices, info.split) == (("CPU", pair[0].name), "layers")
    assert held["CPU"]["state"] < held[pair[0].name]["state"]
    assert "inputs" not in held[pair[0].name]


@pytest.mark.parametrize("split", ["layers", "experts", "hot experts"])
@pytest.mark.parametrize("model", EXPERTS)
def test_an_mtp_block_drafts_for_experts_that_are_elsewhere(
    pair: tuple[Worker, ...], tmp_path: Path, model: str, split: str
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture=model, n_mtp=1))
    apart: dict[str, Any] = {"device": "CPU", "expert_device": pair[0].name}
    if split == "layers":
        apart = {"device": None, "devices": ("CPU", pair[0].name)}
    if split == "hot experts":
        route_stats(on_the_cpu(path), [IDS]).write(tmp_path / "picks.csv")
        apart |= {"expert_placement": tmp_path / "picks.csv"}
    ids = tokens(40, seed=9)
    with opened(path, repack="off") as engine:
        plain = engine.generate(ids, max_tokens=40, ignore_eos=True).tokens
    with opened(path, repack="off", spec="mtp", spec_width=4, **{"device": None, **apart}) as engine:
        result = engine.generate(ids, max_tokens=40, ignore_eos=True)
    assert result.tokens == plain
    assert result.speculation is not None
    assert result.speculation.drafted > 0


@pytest.mark.parametrize("option", ["devices", "tensor_split"])
def test_what_is_no_sequence_of_devices_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is 5; it must be a tuple"):
        Engine.open(**{option: 5})  # type: ignore[arg-type]
