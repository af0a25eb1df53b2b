"""After a verify forward of any width and a commit of any of its first rows, nothing tells that more was run.

Where rows are built as when slots decode together, one row and many come out the same, and so does everything
behind a rollback, bit by bit. Elsewhere they are summed in another order, so a run that never drafted differs
by rounding. The two ways to take rows back do not differ at all on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig
from pyggml_dflash.engine.batching import Batching
from pyggml_dflash.engine.graphs import Forwards, record_layout, record_places
from pyggml_dflash.ggml.arena import read_bytes
from pyggml_dflash.ggml.padding import Padding, Paddings
from pyggml_dflash.state.slot import Slot
from tests.drafts.drafted import MAX_WIDTH, Floats, Target, arrays, open_target
from tests.reference.stored import model_file

ROUNDING = 1e-5  # of the largest logit; 5e-6 was measured
MODELS = ("llama-tiny", "qwen3-tiny", "qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")
UPDATES: tuple[StateUpdate, ...] = ("snapshots", "replay")
GARBAGE = (7, 200, 7, 7, 33, 2, 7)
# Each row attends on its own, and no product with weights has fewer than two rows: in single precision
# kernels for several rows sum each of them alike, and only a lone row may have a kernel that does not.
ROW_BY_ROW = Batching(
    mode="padded",
    rows=1,
    exact=True,
    reason="for this test",
    verify_rows=MAX_WIDTH,
    paddings=Paddings(others=Padding(least=2)),
)
CASES = [(width, keep) for width in range(2, MAX_WIDTH + 1) for keep in range(1, width + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str, folder: Path) -> Iterator[Target]:
    with open_target(model_file(name, "F32", folder), n_slots=2) as target:
        yield target


@pytest.fixture(scope="module")
def text(name: str) -> list[int]:
    found: list[int] = arrays(name)["p8_tokens"].tolist()
    return found


@pytest.fixture(scope="module")
def plain(target: Target, text: list[int]) -> Floats:
    """Logits after each of the first 420 tokens, from forwards that never drafted."""
    with target.recording(capture_of(target), chunk=420) as forwards:
        target.slot.reset()
        logits = forwards.prefill(target.slot, text[:420], "all")
        assert logits is not None
        return logits


def capture_of(target: Target) -> Capture:
    layers = (1, 2, target.config.n_layer - 1)
    if target.config.architecture == "qwen4exp":
        layers = ()  # no draft reads a residual of several streams
    return Capture(layers=layers, hidden=target.config.delta_net is not None)


@contextmanager
def both(target: Target) -> Iterator[tuple[Forwards, Forwards]]:
    """Forwards that keep snapshots, and forwards that replay."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(target.recording(capture_of(target), u)) for u in UPDATES)
        yield first, second


def start(forwards: Forwards, slot: Slot, tokens: list[int]) -> None:
    """Begin a sequence."""
    slot.reset()
    for first in range(0, len(tokens), forwards.chunk):
        part = tokens[first : first + forwards.chunk]
        forwards.prefill(slot, part, "none", capture=True)
        slot.commit(len(part))


def verify(
    forwards: Forwards, slot: Slot, text: list[int], width: int, keep: int, behind: Sequence[int] = GARBAGE
) -> Floats:
    """Verify `keep` right tokens and others behind them, and commit the right ones; their logits."""
    right = text[slot.n_past : slot.n_past + keep]
    logits = forwards.verify(slot, [*right, *behind][:width]).copy()
    forwards.commit(slot, width=width, n_keep=keep)
    slot.commit(keep)
    return logits[:keep]


def decode(forwards: Forwards, slot: Slot, text: list[int], n: int, *, capture: bool = False) -> Floats:
    """Decode the next `n` tokens of the text; logits after each."""
    found = []
    for _ in range(n):
        found.append(forwards.decode(slot, text[slot.n_past], capture=capture).copy())
        slot.commit(1)
    return np.array(found)


def close_to(found: Floats, plain: Floats, n_past: int) -> None:
    """Logits of the rows before `n_past` are those of the run that never drafted."""
    expected = plain[n_past - len(found) : n_past]
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * np.abs(plain).max())


@pytest.mark.parametrize(("width", "keep"), CASES)
def test_a_taken_back_row_never_was(
    target: Target, text: list[int], plain: Floats, width: int, keep: int
) -> None:
    slot, results = target.slot, []
    with both(target) as two:
        for forwards, behind in product(two, (GARBAGE, text[30 + keep : 38])):
            start(forwards, slot, text[:30])
            rows = verify(forwards, slot, text, width, keep, behind)
            later = decode(forwards, slot, text, 3)
            close_to(rows, plain, 30 + keep)
            close_to(later, plain, 33 + keep)
            results.append((rows, later, recurrent_bytes(target, slot)))
    for other in results[1:]:
        assert_equal(results[0], other)


def assert_equal(first: tuple[Floats, Floats, bytes], second: tuple[Floats, Floats, bytes]) -> None:
    """Bit by bit."""
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert first[2] == second[2]


def recurrent_bytes(target: Target, slot: Slot) -> bytes:
    """A slot's recurrent state; a ring of keys is none, it is written ahead as cache rows are."""
    return b"".join(
        read_bytes(target.slots.tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
        for t in target.slots.layout.tensors
        if not (t.grows or t.name.endswith("index_raw"))
    )


@pytest.mark.parametrize("n_prompt", [1, 200, 254, 255, 256])
def test_many_steps_in_a_row_end_where_plain_decoding_ends(
    target: Target, text: list[int], plain: Floats, n_prompt: int
) -> None:
    """Every width and acceptance, from a prompt of one token on and over the 256th cache row."""
    slot, results = target.slot, []
    with both(target) as two:
        for forwards in two:
            start(forwards, slot, text[:n_prompt])
            for width, keep in CASES[::3] if n_prompt > 200 else CASES:
                close_to(verify(forwards, slot, text, width, keep), plain, slot.n_past)
            assert n_prompt == 1 or slot.n_past > 256 + MAX_WIDTH
            later = decode(forwards, slot, text, 2)
            close_to(later, plain, slot.n_past)
            results.append((later, later, recurrent_bytes(target, slot)))
    assert_equal(*results)


@pytest.mark.parametrize("update", UPDATES)
def test_a_taken_back_row_does_not_change_a_bit(target: Target, text: list[int], update: StateUpdate) -> None:
    """Against decoding token by token: every step in the state, and what is decoded behind it."""
    slot = target.slot
    with target.recording(capture_of(target), update) as forwards:
        forwards.use(ROW_BY_ROW)
        start(forwards, slot, text[:30])
        expected, states = [], []
        for _ in range(MAX_WIDTH + 4):
            expected.append(decode(forwards, slot, text, 1)[0])
            states.append(recurrent_bytes(target, slot))
        for width, keep in CASES:
            start(forwards, slot, text[:30])
            found = [*verify(forwards, slot, text, width, keep)]
            assert recurrent_bytes(target, slot) == states[keep - 1]
            found += [*decode(forwards, slot, text, 4)]
            np.testing.assert_array_equal(found, expected[: keep + 4])
            assert recurrent_bytes(target, slot) == states[keep + 3]


@pytest.mark.parametrize("update", UPDATES)
def test_steps_plain_decoding_and_prefill_may_take_turns(
    target: Target, text: list[int], plain: Floats, update: StateUpdate
) -> None:
    slot = target.slot
    with target.recording(capture_of(target), update) as forwards:
        start(forwards, slot, text[:235])
        for width, keep in ((8, 3), (2, 2), (8, 8), (1, 1), (5, 1), (3, 2)):
            close_to(verify(forwards, slot, text, width, keep), plain, slot.n_past)
            close_to(decode(forwards, slot, text, 2, capture=True), plain, slot.n_past)
            close_to(decode(forwards, slot, text, 1), plain, slot.n_past)
        part = text[slot.n_past : slot.n_past + 9]
        logits = forwards.prefill(slot, part, "all", capture=True)
        assert logits is not None
        slot.commit(9)
        close_to(logits, plain, slot.n_past)
        close_to(verify(forwards, slot, text, 6, 4), plain, slot.n_past)
        close_to(decode(forwards, slot, text, 1), plain, slot.n_past)


@pytest.mark.parametrize("update", UPDATES)
def test_a_verify_forward_can_be_dropped_or_run_again(
    target: Target, text: list[int], update: StateUpdate
) -> None:
    """Until a commit the recurrent state stands; the same rows give the same logits."""
    slot = target.slot
    with target.recording(capture_of(target), update) as forwards:
        start(forwards, slot, text[:40])
        before = recurrent_bytes(target, slot)
        first = forwards.verify(slot, text[40:46]).copy()
        assert recurrent_bytes(target, slot) == before
        forwards.verify(slot, [7] * 8)
        np.testing.assert_array_equal(forwards.verify(slot, text[40:46]), first)
        assert recurrent_bytes(target, slot) == before


@pytest.mark.parametrize("update", UPDATES)
def test_steps_of_one_slot_leave_the_other_alone(
    target: Target, text: list[int], update: StateUpdate
) -> None:
    one, other = target.slots.slots
    with target.recording(capture_of(target), update) as forwards:
        start(forwards, other, text[5:45])
        start(forwards, one, text[:30])
        before = recurrent_bytes(target, other)
        verify(forwards, one, text, 8, 3)
        assert recurrent_bytes(target, other) == before
        after_one = decode(forwards, one, text, 1)
        verify(forwards, other, text[5:], 4, 2)
        state = recurrent_bytes(target, one)
        after_other = decode(forwards, other, text[5:], 1)
        assert recurrent_bytes(target, one) == state
        start(forwards, other, text[:30])
        verify(forwards, other, text, 8, 3)
        np.testing.assert_array_equal(decode(forwards, other, text, 1), after_one)
        start(forwards, one, text[5:45])
        verify(forwards, one, text[5:], 4, 2)
        np.testing.assert_array_equal(decode(forwards, one, text[5:], 1), after_other)


@pytest.mark.parametrize("update", UPDATES)
def test_verify_records_what_a_prefill_records(target: Target, text: list[int], update: StateUpdate) -> None:
    slot = target.slot
    with target.recording(capture_of(target), update) as forwards:
        start(forwards, slot, text[:40])
        forwards.verify(slot, text[40:46])
        record = {key: recorded(forwards, key, 6) for key in ("features", "hidden") if key in forwards.record}
        forwards.commit(slot, width=6, n_keep=6)
        start(forwards, slot, text[:40])
        forwards.prefill(slot, text[40:46], "none", capture=True)
        for key, rows in record.items():
            expected = recorded(forwards, key, 6)
            np.testing.assert_allclose(rows, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())
        assert record


def recorded(forwards: Forwards, key: str, n: int) -> Floats:
    """Rows of the last forward; a hidden row stands behind the one of the forward before."""
    tensor = forwards.record[key]
    row, first = 4 * tensor.shape[0], key == "hidden"
    return np.frombuffer(read_bytes(tensor, first * row, n * row), np.float32).reshape(n, -1)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("width", [2, 8])
def test_the_record_is_as_large_as_its_layout_says(target: Target, update: StateUpdate, width: int) -> None:
    config, chunk = target.config, 16
    label = "speculation record"
    with target.recording(capture_of(target), update, max_width=width, chunk=chunk) as forwards:
        assert forwards.recording is not None
        space, recording = forwards.space, forwards.recording
        assert space.n_rows == chunk + 2 * (min(max(32, width), chunk) + 1)
        layout = record_layout(target.model, recording, space.n_rows)
        (second,) = record_places(target.model, recording, n_slots=2)
        assert {t.name: t.n_bytes for t in layout} == {k: t.n_bytes for k, t in forwards.record.items()}
        (device,) = target.ledger.devices()
        total = sum(t.n_bytes for t in (*layout, *second))
        aligned = total + 128 * len((*layout, *second))
        assert total <= target.ledger.by_label(device)[label] <= aligned
    rows, hidden = 4 * config.n_embd * space.n_rows, 4 * config.hidden_width * (space.n_rows + 1)
    captured = len(capture_of(target).layers) * rows + (hidden if config.delta_net else 0)
    assert total == captured + 2 * recurrent_record(target, update, width)
    assert label not in target.ledger.by_label(device)


def recurrent_record(target: Target, update: StateUpdate, width: int) -> int:
    """Bytes: a window of rows and a state per row, or what the recurrence is fed with."""
    net = target.config.delta_net
    if net is None:
        return 0
    snapshots = (net.n_taps - 1 + width) * net.conv_dim + width * net.head_dim**2 * net.n_value_head
    replay = width * (net.conv_dim + 2 * net.n_value_head)
    total = sum(target.config.recurrent) * (snapshots if update == "snapshots" else replay)
    if isinstance(target.config, Qwen4ExpConfig) and target.config.ngram is not None:
        total += target.config.hidden_width * (target.config.ngram.n_history + width)
    return 4 * total
