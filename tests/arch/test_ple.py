"""The n-gram embedding adds what its definition says, whatever the chunks, slots and rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from pyggml_dflash.arch.base import Commit, StateTensor, StateUpdate
from pyggml_dflash.arch.qwen4exp.ngram import NgramConfig
from pyggml_dflash.arch.qwen4exp.ple import (
    commit_ple,
    ple,
    ple_record,
    ple_specs,
    ple_state,
    slot_history,
)
from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.arena import TensorArena, read, write
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.weights import BlockWeights, LoadedWeights, check_tensors, place_weights
from tests.reference.blocks import FLOATS, encoded
from tests.reference.ngram import ple as defined

Floats = NDArray[np.float32]
Keep = Literal["commit", "record"]
N_EMBD, N_STREAM, N_SLOTS, MAX_ROWS, EPS = 48, 4, 3, 64, 1e-6
TOLERANCE = 2e-5  # values are up to 20


def config(n_gram: int = 3, n_taps: int = 4) -> NgramConfig:
    """Rows of 5 times 8, so that their width is not the model's."""
    n = n_gram - 1
    return NgramConfig(
        layer=1,
        n_gram=n_gram,
        row_dim=40 // n,
        n_taps=n_taps,
        eos_id=0,
        multipliers=(1,) * n_gram,
        sizes=(7,) * n,
        offsets=(0,) * n,
    )


def random_weights(config: NgramConfig, seed: int = 0) -> dict[str, Floats]:
    """By their names after 'blk.1.', shaped as in NumPy."""
    rng, n_all = np.random.default_rng(seed), N_EMBD * N_STREAM
    shapes = {
        "ple_key.weight": (n_all, config.width),
        "ple_value.weight": (N_EMBD, config.width),
        "ple_conv1d.weight": (n_all, config.n_taps),
    }
    found = {name: rng.standard_normal(shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    norms = (f"ple_norm_{x}.weight" for x in ("key", "query", "conv"))
    found |= {name: np.exp(0.3 * rng.standard_normal(n_all)) for name in norms}
    return {name: values.astype(np.float32) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class Module:
    """The module of one file with its slots' histories and a record, on the CPU."""

    config: NgramConfig
    backend: Backend
    weights: BlockWeights
    tensors: Mapping[str, Tensor]  # state and record by name, and the inputs 'rows' and 'residual'

    def run(
        self, rows: Floats, residual: Floats, *, slot: int = 0, n_slots: int = 1, keep: Keep = "commit"
    ) -> Floats:
        """What the module adds, [n_tokens, stream, n_embd]; commits the history or records the window."""
        n_tokens = len(rows)

        def build(g: GraphBuilder) -> Tensor:
            x = g.view(self.tensors["rows"], (rows.shape[1], n_tokens), (4 * rows.shape[1],), 0)
            shape = (N_EMBD, N_STREAM, n_tokens)
            r = g.view(self.tensors["residual"], shape, (4 * N_EMBD, 4 * N_EMBD * N_STREAM), 0)
            history = slot_history(g, self.config, self.tensors, slot, n_slots)
            scan = ple(g, self.weights, self.config, x, r, history, EPS)
            if keep == "commit":
                scan.commit(g, history)
            else:
                scan.record(g, self.config, self.tensors)
            return g.reshape(scan.increment, N_EMBD * N_STREAM, n_tokens)

        write(self.tensors["rows"], np.ascontiguousarray(rows))
        write(self.tensors["residual"], np.ascontiguousarray(residual))
        return self._compute(build).reshape(n_tokens, N_STREAM, N_EMBD)

    def commit(self, *, slot: int, width: int, n_keep: int, update: StateUpdate = "snapshots") -> None:
        """Keep the first rows of the forward recorded last."""

        def build(g: GraphBuilder) -> Tensor:
            commit = Commit(slot=slot, update=update, width=width, n_keep=n_keep)
            commit_ple(g, self.config, self.tensors, self.tensors, commit)
            return g.cont(self.tensors["rows"])

        self._compute(build)

    def history(self, slot: int) -> Floats:
        """[n_history, n_embd * stream]."""
        found: Floats = read(self.tensors["blk.1.ple_conv"])[0, slot]
        return found

    def _compute(self, build: Callable[[GraphBuilder], Tensor]) -> Floats:
        with ExitStack() as stack:
            g = GraphBuilder(256)
            stack.callback(g.close)
            out = g.output(build(g))
            allocator = GraphAllocator(self.backend, Ledger(), "ple")
            stack.callback(allocator.close)
            return np.array(StepGraph(self.backend, g, (out,), allocator).run()[0])


def write_file(
    folder: Path,
    weights: Mapping[str, Floats],
    *,
    taps: ElementType = ElementType.F32,
    streams_apart: bool = False,
) -> Path:
    """The module's tensors as a file."""
    writer = GgufWriter()
    for name, values in weights.items():
        if name == "ple_conv1d.weight":
            data = encoded(taps, values) if taps in FLOATS else np.zeros(4 * values.size, np.uint8)
            writer.add_raw(f"blk.1.{name}", data, shape=values.shape[::-1], element=taps)
        else:
            apart = streams_apart and "norm" in name
            writer.add_tensor(f"blk.1.{name}", values.reshape(N_STREAM, N_EMBD) if apart else values)
    return writer.write(folder / "m.gguf")[0]


@contextmanager
def opened(path: Path, config: NgramConfig) -> Iterator[Module]:
    """The module, its histories zero."""
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        specs = check_tensors(file, ple_specs(file, config, N_EMBD, N_STREAM))
        backend, ledger = Backend(choose_device("CPU"), threads=1), Ledger()
        stack.callback(backend.close)
        weights = LoadedWeights(file, place_weights(file, specs, backend, repack=True), backend, ledger)
        stack.callback(weights.close)
        state = ple_state(config, N_EMBD, N_STREAM)
        record = ple_record(config, N_EMBD, N_STREAM, MAX_ROWS)
        arena = TensorArena(backend, ledger, "ple", n_tensors=4)
        stack.callback(arena.close)
        tensors = {
            state.name: arena.declare(state.name, state.type, *state.shape, N_SLOTS),
            record.name: arena.declare(record.name, record.type, *record.shape),
            "rows": arena.declare("rows", ElementType.F32, config.width, MAX_ROWS),
            "residual": arena.declare("residual", ElementType.F32, N_EMBD, N_STREAM, MAX_ROWS),
        }
        arena.allocate(zero=True)
        yield Module(config, backend, weights.block(1), tensors)


def random_rows(config: NgramConfig, n: int, seed: int = 1) -> tuple[Floats, Floats]:
    """Rows of the table and residual for `n` tokens."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, config.width)).astype(np.float32)
    return rows, (3 * rng.standard_normal((n, N_STREAM, N_EMBD))).astype(np.float32)


def expected(
    weights: Mapping[str, Floats], rows: Floats, residual: Floats, n_gram: int
) -> NDArray[np.float64]:
    double = {name: values.astype(np.float64) for name, values in weights.items()}
    return defined(double, rows.astype(np.float64), residual.astype(np.float64), n_gram, EPS)


@pytest.mark.parametrize(("n_gram", "n_taps"), [(2, 2), (3, 4), (3, 2), (5, 4), (2, 7)])
@pytest.mark.parametrize("chunk", [1, 2, 5, 9, 10, 40])
def test_the_increment_is_the_defined_one_for_any_chunk_size(
    tmp_path: Path, n_gram: int, n_taps: int, chunk: int
) -> None:
    cfg = config(n_gram, n_taps)
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, 40)
    with opened(write_file(tmp_path, weights), cfg) as module:
        parts = [
            module.run(rows[i : i + chunk], residual[i : i + chunk], slot=1) for i in range(0, 40, chunk)
        ]
        assert not module.history(0).any()
        assert not module.history(2).any()
    wanted = expected(weights, rows, residual, n_gram)
    assert np.abs(wanted).max() > 3
    np.testing.assert_allclose(np.concatenate(parts), wanted, rtol=0, atol=TOLERANCE)


def test_a_score_of_zero_lets_half_of_the_value_through(tmp_path: Path) -> None:
    cfg = config()
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, 1)
    weights["ple_norm_conv.weight"][:] = 0
    with opened(write_file(tmp_path, weights), cfg) as module:
        found = module.run(rows, np.zeros_like(residual))
        value = rows @ weights["ple_value.weight"].T
        np.testing.assert_allclose(found, np.repeat(0.5 * value[:, None], N_STREAM, 1), atol=1e-6)


@pytest.mark.parametrize("score", [3e-7, -3e-7, 2e-6, -2e-6])
def test_a_tiny_score_counts_as_at_least_a_millionth(tmp_path: Path, score: float) -> None:
    cfg = config()
    weights, (rows, _) = random_weights(cfg), random_rows(cfg, 1)
    key = (weights["ple_key.weight"] @ rows[0]).reshape(1, N_STREAM, N_EMBD)
    weights["ple_norm_key.weight"] = np.full(N_EMBD * N_STREAM, score / np.sqrt(N_EMBD), np.float32)
    weights["ple_norm_query.weight"][:] = 1
    weights["ple_norm_conv.weight"][:] = 0
    with opened(write_file(tmp_path, weights), cfg) as module:
        found = module.run(rows, key)
    np.testing.assert_allclose(found, expected(weights, rows, key, 3), rtol=0, atol=2e-6)
    gate = 1 / (1 + np.exp(-np.sign(score) * np.sqrt(max(abs(score), 1e-6))))
    value = rows @ weights["ple_value.weight"].T
    np.testing.assert_allclose(found[0], gate * np.repeat(value, N_STREAM, 0), rtol=0, atol=4e-6)


@pytest.mark.parametrize("taps", [ElementType.F16, ElementType.BF16])
def test_convolutions_in_half_precision_are_read(tmp_path: Path, taps: ElementType) -> None:
    cfg = config()
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, 12)
    weights["ple_conv1d.weight"] = np.round(weights["ple_conv1d.weight"] * 64) / np.float32(64)
    with opened(write_file(tmp_path, weights, taps=taps), cfg) as module:
        found = module.run(rows, residual)
    np.testing.assert_allclose(found, expected(weights, rows, residual, 3), rtol=0, atol=TOLERANCE)


def test_norms_may_have_a_dimension_for_the_streams(tmp_path: Path) -> None:
    cfg = config()
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, 12)
    with opened(write_file(tmp_path, weights, streams_apart=True), cfg) as module:
        found = module.run(rows, residual)
    np.testing.assert_allclose(found, expected(weights, rows, residual, 3), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("n", [1, 4, 20])
def test_sequences_in_one_graph_are_as_each_alone(tmp_path: Path, n: int) -> None:
    cfg = config()
    weights = random_weights(cfg)
    inputs = [random_rows(cfg, 2 * n, seed=s) for s in (5, 6)]
    with opened(write_file(tmp_path, weights), cfg) as module:
        for part in (slice(0, n), slice(n, 2 * n)):
            rows = np.concatenate([x[0][part] for x in inputs])
            residual = np.concatenate([x[1][part] for x in inputs])
            found = module.run(rows, residual, slot=1, n_slots=2)
            for i, (all_rows, all_residual) in enumerate(inputs):
                wanted = expected(weights, all_rows, all_residual, 3)[part]
                np.testing.assert_allclose(found[i * n : (i + 1) * n], wanted, rtol=0, atol=TOLERANCE)
        assert not module.history(0).any()


@pytest.mark.parametrize("n_keep", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("update", ["snapshots", "replay"])
def test_rows_taken_back_leave_no_trace(tmp_path: Path, n_keep: int, update: StateUpdate) -> None:
    cfg, width = config(), 12
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, 7 + width)
    rejected_rows, rejected_residual = random_rows(cfg, width, seed=9)
    kept = slice(7, 7 + n_keep)
    rejected_rows[:n_keep], rejected_residual[:n_keep] = rows[kept], residual[kept]
    with opened(write_file(tmp_path, weights), cfg) as module:
        module.run(rows[:7], residual[:7], slot=2)
        before = module.history(2).copy()
        module.run(rejected_rows, rejected_residual, slot=2, keep="record")
        assert module.history(2).tolist() == before.tolist()
        module.commit(slot=2, width=width, n_keep=n_keep, update=update)
        rolled_back = module.history(2).copy()
        module.run(rows[:7], residual[:7], slot=0)
        module.run(rows[kept], residual[kept], slot=0)
        np.testing.assert_allclose(rolled_back, module.history(0), rtol=0, atol=TOLERANCE)
        assert np.abs(rolled_back - before).max() > 0.1


def test_a_row_beyond_the_reach_of_the_convolution_is_forgotten(tmp_path: Path) -> None:
    cfg = config()
    weights, (rows, residual) = random_weights(cfg), random_rows(cfg, cfg.n_history)
    with opened(write_file(tmp_path, weights), cfg) as module:
        module.run(*random_rows(cfg, 30, seed=8), slot=1)
        for slot in (0, 1):
            module.run(rows, residual, slot=slot)
        assert module.history(0).tolist() == module.history(1).tolist()


# the tensors


def test_state_and_record_have_room_for_what_the_convolution_reaches() -> None:
    assert ple_state(config(), 2560, 4) == StateTensor(
        name="blk.1.ple_conv", type=ElementType.F32, shape=(10240, 9), grows=False
    )
    assert ple_state(config(), 2560, 4).n_bytes == 368_640
    assert ple_record(config(), 2560, 4, 7).shape == (10240, 16)


@pytest.mark.parametrize("name", sorted(random_weights(config())))
def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path, name: str) -> None:
    cfg = config()
    weights = random_weights(cfg)
    shape = list(weights[name].shape[::-1])
    values = weights.pop(name)
    with (
        pytest.raises(DamagedFileError, match=rf"tensor 'blk\.1\.{name}' is missing"),
        opened(write_file(tmp_path, weights), cfg),
    ):
        pass
    weights[name] = np.concatenate([values, values])
    wrong = [*shape[:-1], 2 * shape[-1]]
    with (
        pytest.raises(DamagedFileError) as raised,
        opened(write_file(tmp_path, weights), cfg),
    ):
        pass
    assert f"tensor 'blk.1.{name}' has shape {wrong}; expected {shape}" in str(raised.value)


def test_a_convolution_of_integers_is_refused(tmp_path: Path) -> None:
    cfg = config()
    path = write_file(tmp_path, random_weights(cfg), taps=ElementType.I32)
    with (
        pytest.raises(UnsupportedModelError, match=r"'blk\.1\.ple_conv1d\.weight' has type i32"),
        opened(path, cfg),
    ):
        pass
