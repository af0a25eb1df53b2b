"""Batches between verify forwards: what a drafter reads, and sequences that take back rows of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash import Engine
from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.invariance import measure_batching
from pyggml_dflash.ggml.arena import read_bytes, zero
from pyggml_dflash.options import Spec
from pyggml_dflash.state.slot import Slot
from tests.drafts.drafted import MAX_WIDTH, Floats, Target, open_target
from tests.engine.tiny import QWEN35, opened, prompt
from tests.reference.stored import model_file

MODELS = ("llama-tiny", "qwen3-tiny", "qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")
UPDATES: tuple[StateUpdate, ...] = ("snapshots", "replay")
GARBAGE = (7, 200, 7, 7, 33, 2, 7)
# Prompts of two sequences, and what both do in turns: rows that a verify forward has and keeps, or 0 and 0
# for a token decoded together with the other. The first sequence enters its second bucket of cache rows.
N_PROMPT = (247, 31)
STEPS = (
    ((8, 3), (4, 1)),
    ((0, 0), (0, 0)),
    ((2, 2), (7, 5)),
    ((0, 0), (0, 0)),
    ((0, 0), (0, 0)),
    ((8, 8), (3, 1)),
    ((0, 0), (0, 0)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(
    scope="module", params=[(name, flash) for name in MODELS for flash in ("on", "off")], ids="-".join
)
def target(request: pytest.FixtureRequest, folder: Path) -> Iterator[Target]:
    name, flash_attn = request.param
    path = model_file(name, "F32", folder)
    with open_target(path, n_slots=4, flash_attn=flash_attn) as target:
        yield target


@pytest.fixture(params=UPDATES)
def forwards(target: Target, request: pytest.FixtureRequest) -> Iterator[Forwards]:
    with recording(target, request.param) as forwards:
        yield forwards


@contextmanager
def recording(target: Target, update: StateUpdate) -> Iterator[Forwards]:
    """Forwards that decode as was measured, with all that the target has for drafters."""
    layers = () if target.config.architecture == "qwen4exp" else (1, target.config.n_layer - 1)
    capture = Capture(layers=layers, hidden=target.config.delta_net is not None)
    with target.recording(capture, update) as forwards:
        slots = target.slots.slots
        forwards.use(measure_batching(forwards, slots, target.backend, target.ledger))
        assert forwards.batching.rows == len(slots)
        yield forwards


def text(slot: int) -> list[int]:
    found: list[int] = np.random.default_rng(slot).integers(0, 250, 320).tolist()
    return found


def start(forwards: Forwards, slot: Slot, tokens: Sequence[int]) -> None:
    slot.reset()
    for first in range(0, len(tokens), forwards.chunk):
        part = tokens[first : first + forwards.chunk]
        forwards.prefill(slot, part, "none")
        slot.commit(len(part))


def recurrent_bytes(target: Target, slot: Slot) -> bytes:
    """A slot's recurrent state; a ring of keys is none, it is written ahead as cache rows are."""
    return b"".join(
        read_bytes(target.slots.tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
        for t in target.slots.layout.tensors
        if not (t.grows or t.name.endswith("index_raw"))
    )


def verify(forwards: Forwards, slot: Slot, tokens: list[int], width: int, keep: int) -> Floats:
    right = tokens[slot.n_past : slot.n_past + keep]
    logits = forwards.verify(slot, [*right, *GARBAGE][:width]).copy()
    forwards.commit(slot, width=width, n_keep=keep)
    slot.commit(keep)
    return logits[:keep]


def run(forwards: Forwards, slots: Sequence[Slot], which: Sequence[int]) -> list[list[Floats]]:
    """Logits of the sequences `which`, in these slots; those that decode do it together."""
    found: list[list[Floats]] = [[] for _ in which]
    for slot, i in zip(slots, which, strict=True):
        start(forwards, slot, text(i)[: N_PROMPT[i]])
    for step in STEPS:
        for slot, i, rows in zip(slots, which, found, strict=True):
            width, keep = step[i]
            if width:
                rows += [*verify(forwards, slot, text(i), width, keep)]
        if not step[0][0]:
            logits = forwards.decode_batch(
                slots, [text(i)[s.n_past] for s, i in zip(slots, which, strict=True)]
            )
            for slot, row, rows in zip(slots, logits, found, strict=True):
                rows.append(row.copy())
                slot.commit(1)
    return found


def test_sequences_that_take_rows_back_do_not_show_in_each_other(target: Target, forwards: Forwards) -> None:
    slots = target.slots.slots
    alone, states = [], []
    for i in (0, 1):
        alone.append(run(forwards, [slots[2]], [i])[0])
        states.append(recurrent_bytes(target, slots[2]))
    for where in ((0, 1), (3, 1)):
        some = [slots[i] for i in where]
        together = run(forwards, some, [0, 1])
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one, other)
        assert [recurrent_bytes(target, slot) for slot in some] == states


def test_every_slot_takes_rows_back_as_the_first_does(target: Target, forwards: Forwards) -> None:
    results = []
    for slot in target.slots.slots:
        logits = run(forwards, [slot], [0])[0]
        results.append((np.array(logits).tobytes(), recurrent_bytes(target, slot)))
        slot.reset()
    assert results == results[:1] * len(results)


@pytest.mark.parametrize("captured", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_a_batch_records_the_rows_asked_for(
    target: Target, forwards: Forwards, captured: tuple[int, ...]
) -> None:
    """Each where those of its slot wait."""
    slots = target.slots.slots[:3]
    names = [name for name in ("features", "hidden") if name in forwards.record]

    def prepare() -> None:
        forwards.recorded[:] = [forwards.space.own(i).first for i in range(forwards.n_slots)]
        for name in names:
            zero(forwards.record[name])
        for slot in slots:
            start(forwards, slot, text(slot.id)[:20])
        forwards.prefill(slots[0], text(9)[:5], "none", capture=True)  # rows that must not be touched
        start(forwards, slots[0], text(0)[:20])
        forwards.recorded[:] = [forwards.space.own(i).first + 3 for i in range(forwards.n_slots)]

    def recorded() -> dict[str, bytes]:
        return {name: read_bytes(forwards.record[name], 0, forwards.record[name].n_bytes) for name in names}

    prepare()
    before = recorded()
    for i in captured:
        forwards.decode(slots[i], 5 + i, capture=True)
    expected = recorded()
    assert expected != before
    prepare()
    forwards.decode_batch(slots, [5, 6, 7])
    assert recorded() == before
    prepare()
    forwards.decode_batch(slots, [5, 6, 7], capture=captured)
    assert recorded() == expected


SHARES = ([2, 3], [3, 1, 2], [1, 4, 2, 3])  # rows of each slot
KEPT = ([1, 3], [2, 1, 2], [1, 1, 2, 3])


@pytest.mark.parametrize(("shares", "kept"), [*zip(SHARES, KEPT, strict=True)])
def test_rows_of_several_slots_are_what_each_gets_alone(
    target: Target, forwards: Forwards, shares: list[int], kept: list[int]
) -> None:
    """B25: bit by bit, and each keeps another number of its rows, the windows of convolutions included.

    Logits, what is recorded for a drafter, and the state that those rows leave which are kept.
    """
    slots = target.slots.slots[: len(shares)]
    depths = (5, 66, 20, 251)

    def tokens(slot: Slot, n: int) -> list[int]:
        return text(slot.id)[slot.n_past : slot.n_past + n]

    def recorded(slot: Slot, n: int) -> list[bytes]:
        first, found = forwards.space.own(slot.id).first, []
        for name, behind in (("features", 0), ("hidden", 1)):
            if name in forwards.record:
                row = forwards.record[name].strides[1]
                found.append(read_bytes(forwards.record[name], (first + behind) * row, n * row))
        return found

    def after(slot: Slot) -> tuple[bytes, bytes]:
        state = recurrent_bytes(target, slot)
        return state, forwards.decode(slot, text(slot.id)[slot.n_past]).tobytes()

    forwards.recorded[:] = [forwards.space.own(i).first for i in range(forwards.n_slots)]
    alone, seen, states = [], [], []
    for slot, n, n_keep in zip(slots, shares, kept, strict=True):
        start(forwards, slot, text(slot.id)[: depths[slot.id]])
        alone.append(forwards.verify(slot, tokens(slot, n)).tobytes())
        seen.append(recorded(slot, n))
        forwards.commit(slot, width=n, n_keep=n_keep)
        slot.commit(n_keep)
        states.append(after(slot))
    for slot in slots:
        start(forwards, slot, text(slot.id)[: depths[slot.id]])
    for repeat in range(2):  # rows that are taken back leave nothing
        logits = forwards.verify_ragged(slots, [tokens(s, n) for s, n in zip(slots, shares, strict=True)])
        assert [recorded(slot, n) for slot, n in zip(slots, shares, strict=True)] == seen, repeat
    first = 0
    for place, (slot, n, n_keep) in enumerate(zip(slots, shares, kept, strict=True)):
        assert logits[first : first + n].tobytes() == alone[place]
        first += n
        forwards.commit(slot, width=n, n_keep=n_keep, place=place)
        slot.commit(n_keep)
    assert [after(slot) for slot in slots] == states


@pytest.mark.parametrize("n_prompt", [1, 66, 251])
def test_rows_of_a_verify_forward_are_decoded_ones(target: Target, forwards: Forwards, n_prompt: int) -> None:
    """Bit by bit, the state that those leave which are kept included.

    The second prompt ends where qwen4exp begins to choose, the last one in front of the next bucket.
    """
    slot, tokens = target.slots.slots[2], text(2)
    most = forwards.batching.verify_rows
    assert most >= 2
    start(forwards, slot, tokens[:n_prompt])
    decoded, states = [], []
    for token in tokens[n_prompt : n_prompt + most + 1]:
        decoded.append(forwards.decode(slot, token).copy())
        slot.commit(1)
        states.append(recurrent_bytes(target, slot))
    for width, keep in ((most, most), (most, 1), (most, most // 2), (2, 2), (2, 1), (3, 3)):
        start(forwards, slot, tokens[:n_prompt])
        found = [*verify(forwards, slot, tokens, min(width, most), keep)]
        assert recurrent_bytes(target, slot) == states[keep - 1]
        found.append(forwards.decode(slot, tokens[slot.n_past]).copy())
        np.testing.assert_array_equal(found, decoded[: keep + 1])


def test_widths_that_round_otherwise_are_chosen_only_when_asked_for(target: Target) -> None:
    """A draft may be verified over more rows than agree; the engine does so where a width is given."""
    with recording(target, "replay") as forwards:
        found = forwards.batching
        assert forwards.max_width == found.verify_rows
        forwards.use(replace(found, verify_rows=3))
        assert forwards.max_width == 3
        forwards.use(replace(found, verify_rows=1, exact=False))
        assert forwards.max_width == MAX_WIDTH


def test_drafts_change_no_bit_of_an_answer_where_there_are_several_slots() -> None:
    def logprobs(engine: Engine, spec: Spec) -> list[float]:
        answer = engine.generate(prompt(240), max_tokens=60, ignore_eos=True, logprobs=1, spec=spec)
        assert answer.logprobs is not None
        if answer.speculation is not None:
            assert answer.speculation.verify_steps > 0
        return [token.logprob for token in answer.logprobs]

    with opened(QWEN35, spec="mtp", spec_width=4, slots=2, max_ctx=512) as engine:
        assert logprobs(engine, "mtp") == logprobs(engine, "off")
