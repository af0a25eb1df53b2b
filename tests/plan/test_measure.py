"""What is measured without memory is what is allocated, for every architecture and every kind of graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.assembly import Assembly, assemble, draw, open_model, settle
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import GraphAllocator
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.model.weights import LoadedWeights
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.measure import MemoryProbe, last_of_each_run
from tests.engine.apart import program
from tests.reference.opened import OnOff, on_the_cpu
from tests.sparse import SHAPE_27B, write_sparse
from tests.tiny import Tiny, write_tiny

CHUNK = 64


def models() -> dict[str, Tiny]:
    """Each architecture, with an MTP block where there can be one."""
    found = {name: Tiny(architecture=name) for name in sorted(ARCHITECTURES)}
    return {name: replace(tiny, n_mtp=1) if tiny.has_delta_nets else tiny for name, tiny in found.items()}


@pytest.fixture(scope="module", params=list(models()))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("measure"), models()[request.param])


@contextmanager
def made(options: EngineOptions, ledger: Ledger) -> Iterator[tuple[Assembly, Backend]]:
    """An engine's parts as the loader makes them; with a dry ledger they take no memory."""
    with ExitStack() as stack:
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        weights = LoadedWeights(blueprint.file, list(blueprint.placements), blueprint.backend, ledger)
        stack.callback(weights.close)
        settings = settle(options, blueprint.architecture, blueprint.config)
        parts = assemble(blueprint, weights, settings, ledger, stack)
        yield parts, blueprint.backend


def with_mtp(options: EngineOptions) -> EngineOptions:
    """The same with drafts, where the model can."""
    assert options.model is not None
    return replace(options, spec="mtp") if options.model.name.startswith(("qwen35", "qwen4exp")) else options


def keys(parts: Assembly) -> list[GraphKey]:
    """Prefill, decode and verify graphs, here and there in the context."""
    found = [
        GraphKey(n_tokens=n, n_kv=n_kv, slot=0, output=output, capture=capture)
        for n, n_kv in ((1, 256), (1, 1024), (2, 768), (16, 1024), (64, 512), (64, 1024))
        for output in ("last", "all", "none")
        for capture in {False, bool(parts.drafters)}
    ]
    recording = parts.forwards.recording
    if recording is not None:
        found += [
            GraphKey(n_tokens=n, n_kv=1024, slot=0, output="all", update=recording.update, capture=True)
            for n in range(2, recording.max_width + 1)
        ]
    return found


def allocated(backend: Backend, builder: GraphBuilder) -> int:
    """What a fresh allocator takes for a graph."""
    allocator = GraphAllocator(backend, Ledger(), "test")
    try:
        allocator.place(builder)
        return allocator.n_bytes
    finally:
        allocator.close()
        builder.close()


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_graph_takes_what_was_measured_without_memory(model: Path, flash_attn: OnOff) -> None:
    options = with_mtp(on_the_cpu(model, flash_attn=flash_attn, chunk=CHUNK))
    with made(options, Ledger()) as (real, backend), made(options, Ledger(dry=True)) as (dry, _):
        probe = MemoryProbe(backend)
        for key in keys(real):
            measured = probe.graph(key, lambda key=key: dry.forwards.builder(key))  # type: ignore[misc]
            assert measured.compute == allocated(backend, real.forwards.builder(key)), key
            assert measured.metadata > 0


def test_parts_without_memory_charge_what_real_ones_do(model: Path) -> None:
    for options in (on_the_cpu(model, chunk=CHUNK), with_mtp(on_the_cpu(model, chunk=CHUNK))):
        ledger, dry = Ledger(), Ledger(dry=True)
        with made(options, ledger), made(options, dry):
            assert dry.by_label("CPU") == ledger.by_label("CPU")
            assert dry.charged("CPU") > 0
        assert dry.charged("CPU") == ledger.charged("CPU") == 0


def test_a_graph_is_measured_once_for_each_key(model: Path) -> None:
    with made(on_the_cpu(model, chunk=CHUNK), Ledger(dry=True)) as (parts, backend):
        n_built = 0

        def build() -> GraphBuilder:
            nonlocal n_built
            n_built += 1
            return parts.forwards.builder(key)

        key = keys(parts)[0]
        probe = MemoryProbe(backend)
        assert probe.graph(key, build) == probe.graph(key, build)
        assert (n_built, probe.largest([(key, build)])) == (1, probe.graph(key, build).compute)
        assert probe.largest([]) == 0


FIT = """
import resource, sys
from pathlib import Path
from pyggml_dflash.engine.fit_report import fit_report
from pyggml_dflash.options import EngineOptions
fit_report(EngineOptions(threads=1, device="CPU", max_ctx="auto"))  # what is imported once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = EngineOptions(
    model=Path(sys.argv[1]), max_ctx="auto", threads=1, device="CPU", device_cap={"CPU": 32 * 2**30}
)
report = fit_report(options)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(report.n_ctx, len(report.trace), grown // 1024)
"""


def test_a_large_model_is_fitted_without_reading_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "27b.gguf"
    weights = write_sparse(path, SHAPE_27B)
    on_disk = path.stat().st_blocks
    done = program(FIT, path)
    assert done.returncode == 0, done.stderr
    n_ctx, n_probes, grown_mib = map(int, done.stdout.split())
    assert 4096 <= n_ctx <= 262_144
    assert n_probes <= 11
    assert 2**20 * grown_mib < weights / 20
    assert path.stat().st_blocks == on_disk


@pytest.mark.parametrize("text", ["a", "aab", "abc", "aaaaabbc", "abbbbbbbbbbb"])
@pytest.mark.parametrize("start", [0, 3])
def test_the_last_of_each_run_is_found(text: str, start: int) -> None:
    expected = [
        i for i in range(start, start + len(text)) if text[i - start] != (text[i - start + 1 :] + "-")[0]
    ]
    assert last_of_each_run(lambda i: text[i - start], start, start + len(text)) == expected
    assert last_of_each_run(lambda i: text[i - start], start, start) == []
