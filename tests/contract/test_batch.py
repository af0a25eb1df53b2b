"""A row of a batch is what it would be alone, bit by bit, whoever is beside it: for every architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.batching import Batching
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.invariance import measure_batching
from pyggml_dflash.ggml.arena import read_bytes, write
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import WeightKind
from pyggml_dflash.options import KVType
from pyggml_dflash.state.slot import Slot
from tests.reference.opened import Floats, OnOff, Parts, assembled, on_the_cpu
from tests.tiny import Tiny, tokens, write_tiny

ROUNDING = 3e-5  # logits have a standard deviation of 1; 6e-6 was measured
# Of qwen4exp the first attends to everything, the second through a mask, the others over gathered copies;
# the third enters its second bucket of cache rows on the way.
N_PROMPT = (3, 100, 253, 600)
# Slots by step. Every slot runs as often as there are tokens in its answer.
TURNS = ((0, 1), (2, 0), (1, 2, 3), (3, 1, 0, 2), (3, 2), (1, 3), (0, 1, 2, 3), (2, 1, 0), (3,), (0,))
N_ANSWER = 6


def models() -> dict[str, Tiny]:
    """Each architecture; hybrids with a delta net as the last layer too."""
    wide = {"n_ff": 96, "shared_ff": 64, "net_head_dim": 32, "low_rank": 32, "ngram_dim": 32, "index_dim": 32}
    found = {name: Tiny(architecture=name, budget=64, **wide) for name in sorted(ARCHITECTURES)}  # type: ignore[arg-type]
    for name, tiny in list(found.items()):
        if tiny.has_delta_nets:
            found[f"{name}-delta-net-last"] = replace(tiny, n_layer=3)
    return found


MODELS = models()


@pytest.fixture(scope="module", params=list(MODELS))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return MODELS[request.param]


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def model(request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    elements = {"": ElementType[request.param]}
    return write_tiny(tmp_path_factory.mktemp("batch"), replace(tiny, elements=elements))


@pytest.fixture(scope="module", params=["on", "off"])
def flash_attn(request: pytest.FixtureRequest) -> OnOff:
    return "on" if request.param == "on" else "off"


@contextmanager
def opened(
    model: Path, *, flash_attn: OnOff = "on", cache: KVType = "f32", n_slots: int = 4
) -> Iterator[Parts]:
    """Parts with room for `N_PROMPT` and answers."""
    options = on_the_cpu(
        model, max_ctx=768, chunk=256, flash_attn=flash_attn, cache_type_k=cache, cache_type_v=cache
    )
    with assembled(options, n_slots=n_slots) as parts:
        yield parts


def measured(parts: Parts) -> Batching:
    """What was found out about batches, which is in use from now on."""
    found = measure_batching(parts.forwards, parts.slots.slots, parts.backend, parts.ledger)
    parts.forwards.use(found)
    return found


def begin(parts: Parts) -> list[dict[str, bytes]]:
    """A prompt in every slot; returns the states behind them."""
    for slot, n in zip(parts.slots.slots, N_PROMPT, strict=True):
        start(parts, slot, tokens(n, seed=slot.id))
    return states_of(parts)


def begin_again(parts: Parts, states: list[dict[str, bytes]]) -> None:
    """What `begin` returned, put into every slot."""
    for slot, n, state in zip(parts.slots.slots, N_PROMPT, states, strict=True):
        for name, data in state.items():
            write(parts.slots.tensors[name], memoryview(data), slot.id * len(data))
        slot.resume(n, tokens(n, seed=slot.id))


def start(parts: Parts, slot: Slot, prompt: Sequence[int]) -> None:
    slot.reset()
    for first in range(0, len(prompt), parts.forwards.chunk):
        part = prompt[first : first + parts.forwards.chunk]
        parts.forwards.prefill(slot, part, "none")
        slot.commit(len(part))


def answer(slot: Slot) -> list[int]:
    """What is decoded in a slot, whatever the logits say."""
    return tokens(N_ANSWER, seed=100 + slot.id)


def states_of(parts: Parts) -> list[dict[str, bytes]]:
    """By slot, what its part of every state tensor holds."""
    return [
        {
            t.name: read_bytes(parts.slots.tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
            for t in parts.slots.layout.tensors
        }
        for slot in parts.slots.slots
    ]


def decode_alone(parts: Parts) -> list[list[Floats]]:
    """By slot, the logits after each token of its answer, one slot after the other."""
    found: list[list[Floats]] = [[] for _ in parts.slots.slots]
    for slot, rows in zip(parts.slots.slots, found, strict=True):
        for token in answer(slot):
            rows.append(parts.forwards.decode(slot, token).copy())
            slot.commit(1)
    return found


def decode_in_turns(parts: Parts) -> list[list[Floats]]:
    """The same in batches."""
    slots = parts.slots.slots
    found: list[list[Floats]] = [[] for _ in slots]
    for turn in TURNS:
        some = [slots[i] for i in turn]
        logits = parts.forwards.decode_batch(some, [answer(slot)[len(found[slot.id])] for slot in some])
        for slot, row in zip(some, logits, strict=True):
            found[slot.id].append(row.copy())
            slot.commit(1)
    return found


@dataclass(frozen=True, slots=True)
class Alone:
    """What slots compute that decode one after the other."""

    states: list[dict[str, bytes]]  # behind the prompts
    logits: list[list[Floats]]
    after: list[dict[str, bytes]]  # behind the answers


def run_alone(parts: Parts) -> Alone:
    """Prompts and answers, one slot after the other."""
    return Alone(begin(parts), decode_alone(parts), states_of(parts))


@pytest.fixture(scope="module")
def alone(model: Path, flash_attn: OnOff) -> Alone:
    with opened(model, flash_attn=flash_attn) as parts:
        assert measured(parts).exact
        return run_alone(parts)


def test_a_row_of_a_batch_is_what_it_is_alone(model: Path, flash_attn: OnOff, alone: Alone) -> None:
    with opened(model, flash_attn=flash_attn) as parts:
        batching = measured(parts)
        assert (batching.exact, batching.rows) == (True, 4), batching.reason
        begin_again(parts, alone.states)
        np.testing.assert_array_equal(decode_in_turns(parts), alone.logits)
        assert states_of(parts) == alone.after


@pytest.mark.parametrize("cache", ["f16", "bf16", "q8_0", "q4_0"])
def test_the_type_of_the_cache_does_not_show(model: Path, cache: KVType) -> None:
    with opened(model, cache=cache) as parts:
        assert measured(parts).exact
        alone = run_alone(parts)
        begin_again(parts, alone.states)
        np.testing.assert_array_equal(decode_in_turns(parts), alone.logits)


def test_batches_that_were_not_measured_differ_by_rounding_only(
    model: Path, flash_attn: OnOff, alone: Alone
) -> None:
    with opened(model, flash_attn=flash_attn) as parts:
        begin_again(parts, alone.states)
        np.testing.assert_allclose(decode_in_turns(parts), alone.logits, rtol=0, atol=ROUNDING)


def test_more_slots_than_may_go_together_take_turns(model: Path, flash_attn: OnOff, alone: Alone) -> None:
    with opened(model, flash_attn=flash_attn) as parts:
        batching = measured(parts)
        for most in (1, 2, 3):
            parts.forwards.use(replace(batching, rows=most))
            begin_again(parts, alone.states)
            np.testing.assert_array_equal(decode_in_turns(parts), alone.logits)


def test_a_device_that_lacks_operations_computes_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then convolutions, the indexer and the streams are composed of others."""

    def composing(
        backend: Backend, max_nodes: int, doubled: Set[WeightKind], *, stream_rows: int
    ) -> GraphBuilder:
        return GraphBuilder(max_nodes, lambda op: False, doubled)

    monkeypatch.setattr("pyggml_dflash.engine.forward.builder_for", composing)
    with opened(model) as parts:
        assert measured(parts).exact
        alone = run_alone(parts)
        begin_again(parts, alone.states)
        np.testing.assert_array_equal(decode_in_turns(parts), alone.logits)


def n_operations(forwards: Forwards, slots: Sequence[int]) -> int:
    """Of a forward of one row of each; copies are among them."""
    parts = tuple(forwards._row_key(slot, 5, capture=False) for slot in slots)
    builder = forwards.builder(GraphKey.batch(parts))
    try:
        return builder.n_nodes
    finally:
        builder.close()


def test_any_pair_of_slots_is_the_same_work_from_step_to_step(model: Path) -> None:
    """B27: each set of slots has a graph of its own, of as many operations, built once per bucket."""
    pairs = ((0, 1), (0, 2), (1, 3), (2, 3))
    with opened(model) as parts:
        forwards, slots = parts.forwards, parts.slots.slots
        for slot in slots:
            start(parts, slot, tokens(5, seed=slot.id))
        n_built = []
        for pair in pairs * 5:
            before = forwards.built.n
            forwards.decode_batch([slots[i] for i in pair], [7, 8])
            n_built.append(forwards.built.n - before)
            for i in pair:
                slots[i].commit(1)
        assert n_built == [1] * len(pairs) + [0] * (4 * len(pairs))
        assert len({n_operations(forwards, pair) for pair in pairs}) == 1


def test_a_forward_of_many_rows_stays_below_the_bound_on_its_operations(
    model: Path, flash_attn: OnOff
) -> None:
    with opened(model, flash_attn=flash_attn) as parts:
        forwards, architecture, config = parts.forwards, parts.model.architecture, parts.model.config
        for n_past in (0, 100, 500):
            keys = tuple(forwards._row_key(i, n_past, capture=False) for i in range(4))
            for n in (2, 4):
                builder = forwards.builder(GraphKey.batch(keys[:n]))
                assert 0 < builder.n_nodes < architecture.max_nodes(config, n)
                builder.close()
