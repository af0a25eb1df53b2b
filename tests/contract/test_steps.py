"""The contract of steps, kept by a fake engine, by the real one on a CPU, with drafts too, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.loader import load
from pyggml_dflash.engine.step import Admission
from pyggml_dflash.options import EngineOptions, Spec
from tests.contract.steps import GRANULE, N_SLOTS, FakeEngine, StepContract
from tests.tiny import Tiny, write_tiny

MODELS = {name: Tiny(architecture=name) for name in ("llama", "qwen35", "qwen35moe", "qwen4exp")}
N_VOCAB = MODELS["llama"].n_vocab


class TestFake(StepContract):
    @pytest.fixture
    def engine(self) -> FakeEngine:
        return FakeEngine()


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steps"), MODELS[request.param])


def open_core(model: Path, device: str, *, spec: Spec = "off") -> EngineCore:
    options = EngineOptions(
        model=model,
        max_ctx=256,
        slots=N_SLOTS,
        chunk=GRANULE,
        device=device,
        threads=1,
        cache_type_k="f32",
        cache_type_v="f32",
        spec=spec,
    )
    return load(options, lambda _: None).core


@pytest.fixture(scope="module")
def on_the_cpu(model: Path) -> Iterator[EngineCore]:
    core = open_core(model, "CPU")
    yield core
    core.close()


@pytest.fixture(scope="module")
def on_a_gpu(model: Path, gpu: str) -> Iterator[EngineCore]:
    core = open_core(model, gpu)
    yield core
    core.close()


def emptied(core: EngineCore) -> Iterator[EngineCore]:
    """The core, with every slot free again afterwards."""
    yield core
    for id in range(core.n_slots):
        core.retire(id)


class TestOnTheCpu(StepContract):
    n_vocab = N_VOCAB

    @pytest.fixture
    def engine(self, on_the_cpu: EngineCore) -> Iterator[EngineCore]:
        yield from emptied(on_the_cpu)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    model = write_tiny(tmp_path_factory.mktemp("drafting"), replace(MODELS["qwen35"], n_mtp=1))
    core = open_core(model, "CPU", spec="mtp")
    yield core
    core.close()


class TestWithDrafts(StepContract):
    """Steps that give a slot up to three tokens."""

    n_vocab = N_VOCAB

    @pytest.fixture
    def engine(self, drafting: EngineCore) -> Iterator[EngineCore]:
        yield from emptied(drafting)

    def asked(self, n: int, seed: int = 1, limit: int = 64) -> Admission:
        return replace(super().asked(n, seed, limit), drafts=True, width=3)


@pytest.mark.gpu
class TestOnAGpu(StepContract):
    n_vocab = N_VOCAB

    @pytest.fixture
    def engine(self, on_a_gpu: EngineCore) -> Iterator[EngineCore]:
        yield from emptied(on_a_gpu)
