"""The inputs of the indexer say which raw keys make which group, and who may see what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.arch.qwen4exp.indexer import (
    MAX_GATHERED,
    MAX_GATHERED_GPU,
    MAX_RATIO,
    MAX_TAKEN_BACK,
    AttentionForm,
    IndexerConfig,
    Span,
    attention_form,
    fill_index,
    index_inputs,
)
from pyggml_dflash.ggml.arena import DTYPES

BUCKET = 256
N_CTX = 1024
RATIOS = [2**i for i in range(1, MAX_RATIO.bit_length())]
REAL = IndexerConfig(n_head=4, head_dim=128, budget=2048, ratio=4)


def config_of(ratio: int, n_chosen: int = 3) -> IndexerConfig:
    return IndexerConfig(n_head=2, head_dim=64, budget=ratio * n_chosen, ratio=ratio)


def filled(config: IndexerConfig, form: AttentionForm, span: Span) -> dict[str, np.ndarray[Any, Any]]:
    """What a forward is given, in arrays of the sizes that are declared for it."""
    sizes = index_inputs(config, span.n_tokens, span.n_kv)
    arrays = {name: np.full(n, 77, DTYPES[type]) for name, (type, n) in sizes.items()}
    counts = fill_index(arrays, config, form, span)
    return {name.removeprefix("index."): arrays[name][:n] for name, n in counts.items()}


@st.composite
def spans(draw: st.DrawFn) -> tuple[IndexerConfig, Span]:
    ratio = draw(st.sampled_from(RATIOS))
    n_past = draw(st.integers(0, N_CTX - 1))
    n_tokens = draw(st.integers(1, min(N_CTX - n_past, 300)))
    n_kv = -(-(n_past + n_tokens) // BUCKET) * BUCKET
    slot, first = draw(st.integers(0, 2)), draw(st.integers(0, 1))
    span = Span(n_past=n_past, n_tokens=n_tokens, n_kv=n_kv, slot=slot, n_ctx=N_CTX, first_position=first)
    return config_of(ratio), span


@given(spans())
def test_every_group_that_a_forward_completes_is_pooled_from_its_own_raw_keys(
    drawn: tuple[IndexerConfig, Span],
) -> None:
    config, span = drawn
    ratio, n_raw, end = config.ratio, config.n_raw, span.n_past + span.n_tokens
    got = filled(config, "dense", span)

    ring = np.full(3 * n_raw, -1)  # which token each row of the rings holds: the newest of this slot
    newest = np.arange(max(0, span.n_past - n_raw), span.n_past)
    ring[span.slot * n_raw + newest % n_raw] = newest
    known = np.concatenate([ring[span.slot * n_raw :][:n_raw], np.arange(span.n_past, end)])
    members = known[got["members"]].reshape(-1, ratio)
    groups = got["groups"] - span.slot * (N_CTX // ratio)

    completed = list(range(span.n_past // ratio, end // ratio))
    assert list(groups[: len(completed)]) == completed
    for group, tokens in zip(completed, members, strict=False):
        assert list(tokens) == list(range(group * ratio, (group + 1) * ratio))
    assert list(got["positions"]) == [span.first_position + group * ratio for group in groups]
    assert set(groups[len(completed) :]) <= {end // ratio}, "only the unfinished group may be written early"
    assert (groups < N_CTX // ratio).all()


@given(spans())
def test_the_ring_keeps_the_newest_raw_keys_each_in_a_row_of_its_own(
    drawn: tuple[IndexerConfig, Span],
) -> None:
    config, span = drawn
    end = span.n_past + span.n_tokens
    rows = filled(config, "dense", span)["raw_rows"]
    kept = np.arange(end - len(rows), end)
    assert len(rows) == min(span.n_tokens, config.n_raw)
    assert list(rows - span.slot * config.n_raw) == list(kept % config.n_raw)


@given(st.sampled_from(RATIOS), st.integers(1, 300))
@settings(max_examples=30)
def test_shapes_do_not_depend_on_where_a_forward_stands(ratio: int, n_tokens: int) -> None:
    config = config_of(ratio)
    for form in ("dense", "masked", "gathered"):
        shapes = set()
        for n_past in range(512, 512 + 2 * ratio):
            span = Span(n_past=n_past, n_tokens=n_tokens, n_kv=N_CTX, slot=0, n_ctx=N_CTX)
            got = filled(config, form, span)
            shapes.add(tuple((name, len(array)) for name, array in got.items()))
        assert len(shapes) == 1


@given(spans())
def test_a_row_sees_the_groups_that_are_complete_at_its_position(drawn: tuple[IndexerConfig, Span]) -> None:
    config, span = drawn
    got = filled(config, "masked", span)
    n_pool = span.n_kv // config.ratio
    mask, tails = got["mask"].reshape(span.n_tokens, n_pool), got["tails"]
    for i, tail in enumerate(tails):
        n_complete = (span.n_past + i + 1) // config.ratio
        assert tail == n_complete  # one behind the last group where a full cache has no tail
        assert (mask[i, :n_complete] == 0).all()
        assert (mask[i, n_complete:] == -np.inf).all()


@given(spans())
def test_a_gathered_row_sees_its_chosen_groups_and_its_tail(drawn: tuple[IndexerConfig, Span]) -> None:
    config, span = drawn
    got = filled(config, "gathered", span)
    ratio, n_tokens = config.ratio, span.n_tokens
    tails = got["tails"].reshape(n_tokens, config.n_tail)
    mask = got["gathered_mask"].reshape(n_tokens, config.n_gathered, ratio)
    assert config.n_gathered * ratio % BUCKET == 0
    assert ((tails >= 0) & (tails < span.n_kv // ratio)).all()
    for i in range(n_tokens):
        n_visible = span.n_past + i + 1
        assert (mask[i, : config.n_chosen] == 0).all()
        seen = [int(tails[i, t]) * ratio + j for t, j in np.argwhere(mask[i, config.n_chosen :] == 0)]
        assert seen == list(range(n_visible // ratio * ratio, n_visible))


def test_everything_is_attended_to_while_no_group_has_to_be_left_out() -> None:
    assert REAL.dense_limit == 2051
    at = {n: attention_form(REAL, n_past=n - 1, n_tokens=1, n_kv=2304) for n in (1, 2048, 2051, 2052)}
    assert at == {1: "dense", 2048: "dense", 2051: "dense", 2052: "masked"}


@pytest.mark.parametrize(
    ("n_past", "n_tokens", "form"),
    [
        (0, 2051, "dense"),
        (0, 2052, "masked"),
        (2040, 11, "dense"),
        (2040, 12, "masked"),
        (2050, 2, "masked"),  # its first row still sees everything
        (2051, 2, "gathered"),
        (2051, MAX_GATHERED_GPU, "gathered"),
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_rows_that_all_choose_are_gathered(
    n_past: int, n_tokens: int, form: AttentionForm, host: bool
) -> None:
    assert attention_form(REAL, n_past=n_past, n_tokens=n_tokens, n_kv=16384, host=host) == form


@pytest.mark.parametrize("host", [True, False])
def test_no_more_rows_are_gathered_than_pays_on_the_device(host: bool) -> None:
    most = MAX_GATHERED if host else MAX_GATHERED_GPU
    forms = [attention_form(REAL, n_past=9999, n_tokens=n, n_kv=16384, host=host) for n in (most, most + 1)]
    assert forms == ["gathered", "masked"]


def test_rows_are_gathered_from_large_caches_only() -> None:
    forms = {n_kv: attention_form(REAL, n_past=n_kv - 9, n_tokens=1, n_kv=n_kv) for n_kv in (16128, 16384)}
    assert forms == {16128: "masked", 16384: "gathered"}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n_chosen", [1, 7, 64])
def test_a_forward_that_chooses_has_room_for_what_it_gathers(ratio: int, n_chosen: int) -> None:
    config = config_of(ratio, n_chosen)
    n_kv = -(-(config.dense_limit + 1) // BUCKET) * BUCKET
    assert config.n_gathered <= n_kv // ratio


def test_raw_keys_of_rows_that_are_taken_back_hide_none_that_are_needed() -> None:
    for ratio in RATIOS:
        config = config_of(ratio)
        for n_past in range(200, 200 + ratio):
            span = Span(n_past=n_past, n_tokens=MAX_TAKEN_BACK, n_kv=512, slot=0, n_ctx=N_CTX)
            written = set(filled(config, "dense", span)["raw_rows"])
            unfinished = np.arange(n_past // ratio * ratio, n_past)
            assert written.isdisjoint(unfinished % config.n_raw)
