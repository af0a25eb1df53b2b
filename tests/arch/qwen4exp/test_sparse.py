"""The sparse attention layer computes what its definition says, however its rows are split into forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pyggml_dflash.arch.qwen4exp.indexer import MAX_GATHERED, MAX_TAKEN_BACK, AttentionForm
from pyggml_dflash.arch.qwen4exp.sparse import PART_ROWS
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import Supports
from tests.arch.qwen4exp.layer import Floats, Layer, Ran, open_layer, random_rows, random_weights, without
from tests.reference.sparse import Result, Sizes, sparse_attention

TOLERANCE = 1e-5  # of outputs, which have a standard deviation of 0.2
NEAR = 5e-5  # of scores, which have a standard deviation of 1: angles of far positions are rounded
SIZES = {
    "ratio-8": Sizes(),
    "ratio-4": Sizes(ratio=4, index_heads=4, index_dim=32),
    "ratio-2-one-head-of-each": Sizes(ratio=2, budget=8, n_head=1, n_head_kv=1, index_heads=1),
    "ratio-64": Sizes(ratio=64, budget=128),
    "one-group-chosen": Sizes(ratio=16, budget=16),
    "all-of-a-head-turns": Sizes(rope_dims=24, head_dim=24),
}
N = 300


def outputs(ran: Sequence[Ran]) -> Floats:
    return np.concatenate([r.outputs for r in ran])


def check(ran: Sequence[Ran], expected: Result, sizes: Sizes, first: int = 0) -> set[AttentionForm]:
    """Compare forwards that begin with row `first` with the definition; the forms that were run."""
    row = first
    for part in ran:
        for i, output in enumerate(part.outputs):
            if part.chosen is not None:
                check_choice(part, i, row, expected, sizes)
            np.testing.assert_allclose(output, expected.outputs[row], atol=TOLERANCE, rtol=0)
            row += 1
    return {part.form for part in ran}


def check_choice(part: Ran, i: int, row: int, expected: Result, sizes: Sizes) -> None:
    """Scores and choice of row `i` of a forward, which is `row` of the sequence."""
    assert part.scores is not None
    assert part.chosen is not None
    wanted, n = expected.scores[row], len(expected.scores[row])
    np.testing.assert_allclose(part.scores[i, :n], wanted, atol=NEAR, rtol=0)
    assert (part.scores[i, n:] == -np.inf).all()
    assert len(set(part.chosen[i])) == sizes.budget // sizes.ratio, "a group is chosen once"
    chosen = {int(group) for group in part.chosen[i] if group < n}
    if chosen != expected.chosen[row]:
        swapped = wanted[list(chosen ^ expected.chosen[row])]
        assert np.ptp(swapped) < NEAR
        assert swapped.max() > 0, "equal scores are taken lowest group first"


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fused", "composed"])
@pytest.mark.parametrize("chunk", [1, 3, 64, N])
def test_a_layer_computes_its_definition_for_any_chunk(chunk: int, flash_attn: bool) -> None:
    sizes = Sizes()
    weights, x = random_weights(sizes), random_rows(sizes, N)
    with open_layer(sizes, weights, flash_attn=flash_attn) as layer:
        forms = check(layer.run_all(x, chunk), sparse_attention(weights, x, sizes), sizes)
    assert forms == {"dense", "masked", "gathered"} if chunk < N else {"masked"}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_layer_of_any_sizes_computes_its_definition(sizes: Sizes) -> None:
    weights, x = random_weights(sizes, seed=3), random_rows(sizes, N, seed=4)
    expected = sparse_attention(weights, x, sizes)
    with open_layer(sizes, weights) as layer:
        check(layer.run_all(x, 100), expected, sizes)
        start = N - 25
        for form in ("masked", "gathered"):
            layer.fill_state(8)
            layer.run(x[:start], 0)
            ran = [layer.run(x[i : i + 5], i, form=form) for i in range(start, N, 5)]
            check(ran, expected, sizes, start)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 8, 9])
def test_rows_around_the_dense_limit_see_what_they_should(n_tokens: int) -> None:
    sizes = Sizes()
    limit = sizes.budget + sizes.ratio - 1
    weights, x = random_weights(sizes), random_rows(sizes, limit + 2 * sizes.ratio)
    expected = sparse_attention(weights, x, sizes)
    with open_layer(sizes, weights) as layer:
        for n_past in range(limit - 9, limit + 2):
            for n_kv in (256, 512):  # behind the limit these are masked and gathered
                layer.fill_state(n_past)
                layer.run(x[:n_past], 0)
                ran = layer.run(x[n_past : n_past + n_tokens], n_past, n_kv=n_kv)
                check([ran], expected, sizes, n_past)


@pytest.mark.parametrize("n_tokens", [1, PART_ROWS, PART_ROWS + 1, 3 * PART_ROWS - 1])
def test_gathered_and_masked_attention_agree(n_tokens: int) -> None:
    sizes = Sizes()
    x = random_rows(sizes, N)
    with open_layer(sizes) as layer:
        n_past = N - n_tokens
        layer.run(x[:n_past], 0)
        gathered, masked = (layer.run(x[n_past:], n_past, form=form) for form in ("gathered", "masked"))
        np.testing.assert_allclose(gathered.outputs, masked.outputs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("type_kv", "flash_attn"), [(ElementType.F16, True), (ElementType.F16, False), (ElementType.Q8_0, True)]
)
def test_both_forms_read_caches_of_smaller_types(type_kv: ElementType, flash_attn: bool) -> None:
    sizes = Sizes()
    weights, x = random_weights(sizes), random_rows(sizes, N)
    near = 0.1 if type_kv == ElementType.Q8_0 else 0.02
    with open_layer(sizes, weights, type_kv=type_kv, flash_attn=flash_attn) as layer:
        layer.run(x[: N - 5], 0)
        gathered, masked = (layer.run(x[N - 5 :], N - 5, form=form) for form in ("gathered", "masked"))
    assert gathered.chosen is not None
    assert masked.chosen is not None
    assert [set(row) for row in gathered.chosen] == [set(row) for row in masked.chosen]
    np.testing.assert_allclose(gathered.outputs, masked.outputs, atol=near, rtol=0)


def test_as_many_rows_as_may_be_are_gathered_in_parts() -> None:
    sizes = Sizes(head_dim=16, rope_dims=8)
    n = MAX_GATHERED + sizes.budget + sizes.ratio
    weights, x = random_weights(sizes), random_rows(sizes, n)
    first = n - MAX_GATHERED
    with open_layer(sizes, weights, n_ctx=768, supports=without("LIGHTNING_INDEXER")) as layer:
        layer.run(x[:first], 0)
        ran = layer.run(x[first:], first)
    assert check([ran], sparse_attention(weights, x, sizes), sizes, first) == {"gathered"}


LACKING = {"no-indexer": without("LIGHTNING_INDEXER"), "no-top-k": without("TOP_K")}


@pytest.mark.parametrize("supports", LACKING.values(), ids=LACKING)
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_device_that_lacks_an_operation_computes_the_same(supports: Supports, chunk: int) -> None:
    sizes = Sizes()
    weights, x = random_weights(sizes), random_rows(sizes, N)
    expected = sparse_attention(weights, x, sizes)
    with open_layer(sizes, weights, supports=supports) as lacking, open_layer(sizes, weights) as able:
        composed, fused = lacking.run_all(x, chunk), able.run_all(x, chunk)
        check(composed, expected, sizes)
    for a, b in zip(composed, fused, strict=True):
        if a.scores is not None:
            np.testing.assert_allclose(a.scores, b.scores, atol=1e-6, rtol=0)


def test_groups_of_equal_score_are_taken_lowest_first_for_any_cache_size() -> None:
    sizes = Sizes(index_heads=1)  # half of all scores are rectified to zero
    weights, x = random_weights(sizes), random_rows(sizes, 200)
    expected = sparse_attention(weights, x, sizes)
    zeros = [np.sort(scores)[-sizes.budget // sizes.ratio] == 0 for scores in expected.scores[100:]]
    assert any(zeros), "no row has to choose among zeros"
    with (
        open_layer(sizes, weights, supports=without("TOP_K")) as sorting,
        open_layer(sizes, weights) as layer,
    ):
        for n_kv in (256, 512):
            for some in (sorting, layer):
                some.run(x[:100], 0)
                check([some.run(x[100:], 100, n_kv=n_kv)], expected, sizes, 100)


def taken_back(layer: Layer, x: Floats, other: Floats, n_past: int, n_keep: int) -> Floats:
    """Outputs behind a forward of `other` rows of which only the first `n_keep`, which are x's, stay."""
    layer.run(x[:n_past], 0)
    layer.run(np.concatenate([x[n_past : n_past + n_keep], other]), n_past)
    return outputs(layer.run_all(x[n_past + n_keep :], 4, n_past=n_past + n_keep, n_kv=512))


@pytest.mark.parametrize("n_drafts", [1, 9, MAX_TAKEN_BACK])
@pytest.mark.parametrize("n_past", [30, 66, 69, 120])
def test_rows_that_are_taken_back_leave_no_trace(n_past: int, n_drafts: int) -> None:
    sizes = Sizes()
    x, other = random_rows(sizes, 160), random_rows(sizes, n_drafts, seed=9)
    with open_layer(sizes) as layer, open_layer(sizes) as fresh:
        never = outputs([fresh.run(x, 0)])
        for n_keep in {0, min(1, n_drafts - 1), n_drafts // 2}:
            after = taken_back(layer, x, other[n_keep:], n_past, n_keep)
            np.testing.assert_allclose(after, never[n_past + n_keep :], atol=TOLERANCE, rtol=0)


def test_slots_do_not_see_each_other() -> None:
    sizes = Sizes()
    first, second = random_rows(sizes, 150, seed=5), random_rows(sizes, 150, seed=6)
    with open_layer(sizes, n_slots=3) as layer:
        alone = outputs([layer.run(first, 0, slot=2)])
        layer.fill_state(11)
        parts = []
        for start in range(0, 150, 10):
            parts.append(layer.run(first[start : start + 10], start, slot=2))
            layer.run(second[start : start + 10], start, slot=0)
        np.testing.assert_allclose(outputs(parts), alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_a_full_cache_ends_with_a_group_and_no_tail(chunk: int) -> None:
    sizes = Sizes()
    weights, x = random_weights(sizes), random_rows(sizes, 256)
    start = 0 if chunk == 256 else 240
    with open_layer(sizes, weights, n_ctx=256) as layer:
        for form in ("masked", "gathered")[: 2 if chunk < 256 else 1]:
            layer.run(x[:240], 0)
            ran = [layer.run(x[i : i + chunk], i, form=form) for i in range(start, 256, chunk)]
            check(ran, sparse_attention(weights, x, sizes), sizes, start)


def test_positions_may_begin_behind_the_first_row() -> None:
    sizes = Sizes(first_position=1)
    weights, x = random_weights(sizes), random_rows(sizes, 150)
    with open_layer(sizes, weights) as layer:
        check(layer.run_all(x, 7), sparse_attention(weights, x, sizes), sizes)


def test_threads_share_the_work_of_a_forward() -> None:
    sizes = Sizes()
    weights, x = random_weights(sizes), random_rows(sizes, N)
    expected = sparse_attention(weights, x, sizes)
    with open_layer(sizes, weights, threads=2) as layer:
        check(layer.run_all(x, 64), expected, sizes)
        check(layer.run_all(x[N - 9 :], 3, n_past=N - 9), expected, sizes, N - 9)


def test_the_definition_is_dense_up_to_the_limit_and_sparse_behind_it() -> None:
    sizes = Sizes()
    x, weights = random_rows(sizes, 100), random_weights(sizes)
    limit = sizes.budget + sizes.ratio - 1
    sparse, dense = (sparse_attention(weights, x, s).outputs for s in (sizes, replace(sizes, budget=1024)))
    same = (sparse == dense).all(axis=1)
    assert same[:limit].all()
    assert not same[limit]
