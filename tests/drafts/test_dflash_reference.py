"""What is inside a draft, and what it proposes, is what independent programs computed.

The numbers are the published package's in single precision, some llama.cpp's. Behind contexts longer than
the stored ones, where rings have wrapped, the draft's definition in double precision says what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyggml_dflash.engine.dflash_drafter import DFlashDrafter
from pyggml_dflash.engine.drafting import ring_mask
from pyggml_dflash.options import DraftCausal
from tests.drafts.definition import DraftDefinition, visible
from tests.drafts.drafted import (
    Arrays,
    Block,
    Drafted,
    Floats,
    arrays,
    draft_file,
    inside,
    open_target,
    with_draft,
)
from tests.drafts.published import publish
from tests.reference.opened import OnOff
from tests.reference.stored import model_file

EXACT = 3e-3  # of logits with a standard deviation of 4; 1.7e-4 was measured
ROUNDING = 3e-4  # rows one by one or several at a time; 4e-5 was measured
N_CONTEXTS = 4
DRAFTS = ("dflash-tiny", "dflash-swa-tiny", "dflash-swa-default-tiny", "dflash2-tiny", "dflash-fitted-tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def target_file(folder: Path) -> Path:
    return model_file("qwen35-tiny", "F32", folder)


@dataclass(frozen=True, slots=True)
class Context:
    """A stored context, what follows it, and what came out."""

    z: Arrays
    index: int
    tokens: list[int]
    anchor: int
    features: Floats
    proposal: tuple[int, ...]
    block: Block

    def stored(self, name: str) -> Floats:
        """A stored array of this context."""
        return self.z[f"d{self.index}_{name}"]


def run_contexts(drafted: Drafted, z: Arrays, piece: int) -> list[Context]:
    """Every stored context, fed in pieces."""
    found = []
    for i in range(N_CONTEXTS):
        tokens, anchor = z[f"d{i}_tokens"].tolist(), int(z[f"d{i}_anchor"][0])
        drafted.begin()
        features = np.concatenate(drafted.feed(tokens, piece))
        proposal = drafted.propose(anchor).tokens
        found.append(Context(z, i, tokens, anchor, features, proposal, inside(drafted)))
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """A draft's contexts under one setting."""

    name: str
    drafted: Drafted
    contexts: list[Context]


SETTINGS = [
    *((name, piece, "off", "file") for name in DRAFTS for piece in (1, 3, 64)),
    *((name, 64, "on", "file") for name in DRAFTS),
    *((name, 64, "off", "folder") for name in DRAFTS),
]


@pytest.fixture(
    scope="module", params=SETTINGS, ids=lambda s: f"{s[0]}-pieces_of_{s[1]}-flash_{s[2]}-from_{s[3]}"
)
def run(
    request: pytest.FixtureRequest, folder: Path, target_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    name, piece, flash_attn, form = request.param
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file, flash_attn=flash_attn))
        path = draft_file(name, folder) if form == "file" else publish(name, tmp_path_factory.mktemp("form"))
        drafted = stack.enter_context(with_draft(target, path))
        yield Run(name, drafted, run_contexts(drafted, arrays(name), piece))


def test_features_are_the_inputs_of_the_layers_that_the_draft_names(run: Run) -> None:
    for context in run.contexts:
        np.testing.assert_allclose(context.features, context.stored("features"), rtol=0, atol=EXACT)


def test_block_states_are_the_stored_ones(run: Run) -> None:
    for context in run.contexts:
        np.testing.assert_allclose(context.block.states, context.stored("block_hidden"), rtol=0, atol=EXACT)


def test_block_logits_are_the_stored_ones(run: Run) -> None:
    for context in run.contexts:
        expected = context.stored("block_logits")[1:]
        np.testing.assert_allclose(context.block.logits, expected, rtol=0, atol=EXACT)


def test_proposals_are_the_stored_ones(run: Run) -> None:
    for context in run.contexts:
        assert context.proposal == tuple(context.stored("proposal").tolist())


def test_a_shorter_proposal_is_the_beginning_of_the_whole_one(run: Run) -> None:
    last = run.contexts[-1]
    for n in range(len(last.proposal)):
        assert run.drafted.propose(last.anchor, n).tokens == last.proposal[:n]


def test_half_precision_weights_round_activations_and_nothing_else(folder: Path, target_file: Path) -> None:
    """Activations lose 2^-11 at most, once per matrix on the way: four in a layer, and the fusion.

    Roundings are independent, so their squares add up; the largest of some thousand normal errors is 4.5
    standard deviations. The head is the target's, in single precision. 1.1e-2 was measured.
    """
    z = arrays("dflash-fitted-tiny")
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file))
        path = draft_file("dflash-fitted-tiny", folder, "F16")
        drafted = stack.enter_context(with_draft(target, path))
        n_roundings = (
            4 * drafted.drafter.config.n_layer + 1 if isinstance(drafted.drafter, DFlashDrafter) else 0
        )
        for context in run_contexts(drafted, z, 64):
            expected = context.stored("block_logits")[1:]
            bound = 4.5 * expected.std() * n_roundings**0.5 * 2**-11
            np.testing.assert_allclose(context.features, context.stored("features"), rtol=0, atol=EXACT)
            np.testing.assert_allclose(context.block.logits, expected, rtol=0, atol=bound)
            assert context.proposal == tuple(context.stored("proposal").tolist())


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_candidates_and_their_scores_are_the_stored_ones(
    folder: Path, target_file: Path, flash_attn: OnOff
) -> None:
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file, flash_attn=flash_attn))
        drafted = stack.enter_context(with_draft(target, draft_file("dflash2-tiny", folder)))
        for context in run_contexts(drafted, arrays("dflash2-tiny"), 64):
            candidates, scores = context.block.candidates, context.block.scores
            assert candidates is not None
            assert scores is not None
            np.testing.assert_array_equal(np.sort(candidates, axis=1), context.stored("candidates"))
            compare_lattice(candidates, scores, context.stored("llamacpp_lattice")[1:])


def compare_lattice(candidates: NDArray[np.int32], scores: Floats, lattice: Floats) -> None:
    """Scores by pair of ids, since candidates stand in no order; the anchor precedes the first row alone."""
    rows, n = candidates.shape
    for i in range(rows):
        theirs = lattice[i, :n].astype(int).tolist()
        expected = lattice[i, n : n + n * n].reshape(n, n)  # [predecessor, candidate]
        columns = [theirs.index(c) for c in candidates[i]]
        if i == 0:
            before, expected = list(range(n)), np.repeat(expected[:1], n, axis=0)
        else:
            before = [lattice[i - 1, :n].astype(int).tolist().index(c) for c in candidates[i - 1]]
        np.testing.assert_allclose(scores[i], expected[before][:, columns], rtol=0, atol=EXACT)


def test_without_a_flag_sliding_layers_are_causal_unless_told_otherwise(
    folder: Path, target_file: Path
) -> None:
    name = "dflash-swa-default-tiny"
    z, path = arrays(name), draft_file(name, folder)
    with open_target(target_file) as target:
        for causality, key, other in (
            ("auto", "block_logits", "llamacpp_block_logits"),
            ("swa", "block_logits", "llamacpp_block_logits"),
            ("none", "llamacpp_block_logits", "block_logits"),
        ):
            with with_draft(target, path, causality) as drafted:  # type: ignore[arg-type]
                for context in run_contexts(drafted, z, 64):
                    found = context.block.logits
                    np.testing.assert_allclose(found, context.stored(key)[1:], rtol=0, atol=EXACT)
                    assert np.abs(found - context.stored(other)[1:]).max() > 1


def test_embedding_rows_from_outside_the_graph_are_the_same(folder: Path, target_file: Path) -> None:
    z = arrays("dflash-tiny")
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file))
        path = draft_file("dflash-tiny", folder)
        drafted = stack.enter_context(with_draft(target, path, gather=True))
        for i in range(N_CONTEXTS):
            drafted.begin()
            drafted.feed(z[f"d{i}_tokens"].tolist())
            assert drafted.propose(int(z[f"d{i}_anchor"][0])).tokens == tuple(z[f"d{i}_proposal"].tolist())


LONG = (
    ("dflash-tiny", "auto"),
    ("dflash2-tiny", "auto"),
    ("dflash2-tiny", "all"),
    ("dflash-swa-tiny", "auto"),
    ("dflash-swa-tiny", "all"),
    ("dflash-swa-default-tiny", "auto"),
    ("dflash-swa-default-tiny", "none"),
)


@pytest.mark.parametrize(("name", "causality"), LONG)
def test_a_block_behind_a_long_context_is_what_the_definition_says(
    folder: Path, target_file: Path, name: str, causality: DraftCausal
) -> None:
    """Around the ends of 256-cell rings, reached in small pieces and by pieces larger than a ring."""
    path, text = draft_file(name, folder), long_text()
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file))
        drafted = stack.enter_context(with_draft(target, path, causality, chunk=300))
        drafter = drafted.drafter
        assert isinstance(drafter, DFlashDrafter)
        definition = DraftDefinition(path, target_file, drafter.config)
        for starts, piece in (((1,), 1), (range(250, 264, 3), 64), ((300, 505, 511, 515, 640), 300)):
            drafted.begin()
            features = np.empty((0, len(drafter.config.target_layers) * 128), np.float32)
            for n_past in starts:
                new = text[len(features) : n_past]
                features = np.concatenate([features, *drafted.feed(new, piece)])
                proposal, block = drafted.propose(text[n_past]), inside(drafted)
                states, logits = definition.block(features.astype(np.float64), text[n_past])
                np.testing.assert_allclose(block.states, states, rtol=0, atol=EXACT)
                np.testing.assert_allclose(block.logits, logits[1:], rtol=0, atol=EXACT)
                if drafter.config.selector is None:
                    assert proposal.tokens == tuple(logits[1:].argmax(axis=1))


def long_text() -> list[int]:
    """641 tokens."""
    return [*arrays("qwen35-tiny")["p8_tokens"].tolist(), 7]


@pytest.mark.parametrize("name", ["dflash-swa-tiny", "dflash2-tiny"])
def test_rejected_rows_leave_no_trace_in_the_draft(folder: Path, target_file: Path, name: str) -> None:
    """Steps of every width and acceptance, past the end of a ring, with proposals between them."""
    text = long_text()
    with ExitStack() as stack:
        target = stack.enter_context(open_target(target_file))
        drafted = stack.enter_context(with_draft(target, draft_file(name, folder)))
        steps = [(width, keep) for width in range(2, 9) for keep in range(1, width + 1)]
        drafted.begin()
        drafted.feed(text[:150])
        found, n_past = [], 150
        for width, keep in steps:
            drafted.step(text[n_past : n_past + keep] + [5] * (width - keep), keep)
            n_past += keep
            drafted.propose(text[n_past])
            found.append(inside(drafted).logits)
        drafted.begin()
        drafted.feed(text[:150])
        n_past = 150
        for logits, (_, keep) in zip(found, steps, strict=True):
            drafted.feed(text[n_past : n_past + keep])
            n_past += keep
            drafted.propose(text[n_past])
            np.testing.assert_allclose(logits, inside(drafted).logits, rtol=0, atol=ROUNDING)
        assert n_past > 256


def mask_by_definition(n_past: int, n_cells: int, window: int, causal: bool, block: int, n_kv: int) -> Floats:
    """Write positions into cells one after the other, then ask of each cell what is in it."""
    held = {p % n_cells: p for p in range(n_past + block)}
    mask = np.full((block, n_kv), -np.inf, np.float32)
    for i in range(block):
        for cell, key in held.items():
            if visible(n_past + i, key, n_past, window=window, causal=causal):
                mask[i, cell] = 0
    return mask


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_a_ring_shows_the_positions_that_the_definition_shows(data: st.DataObject) -> None:
    block = data.draw(st.integers(2, 9))
    window = data.draw(st.integers(0, 30))
    causal = data.draw(st.booleans())
    n_past = data.draw(st.integers(1, 150))
    least = window + block if window else n_past + block
    n_cells = data.draw(st.integers(least, least + 40))
    n_kv = data.draw(st.integers(min(n_cells, n_past + block), n_cells))
    mask = np.full((block, n_kv), 7, np.float16)
    ring_mask(mask, n_past=n_past, n_cells=n_cells, window=window, causal=causal, block=block)
    np.testing.assert_array_equal(mask, mask_by_definition(n_past, n_cells, window, causal, block, n_kv))
    for i in range(block):
        everything = range(n_past + block)
        n_seen = sum(visible(n_past + i, key, n_past, window=window, causal=causal) for key in everything)
        assert (mask[i] == 0).sum() == n_seen
