"""Accepted drafts leave the distribution of the answer as it is, whatever they were drawn from.

A toy target: the next token depends on the last one alone, so the true distribution of the first two tokens
is known exactly. Drafts are random, and bad ones. Seeds are fixed: the same draws every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyggml_dflash.engine.acceptance import Chosen, match, reject
from pyggml_dflash.engine.dflash_drafter import draw_rows, walk
from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.options import SamplingOptions

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]
Propose = Callable[[int, "Toy | None"], Proposal]
Accept = Callable[..., list[Chosen]]

N_VOCAB, N_DRAFTS, N_CANDIDATES, ANCHOR = 6, 2, 4, 1


class Toy(Sampler):
    """A sampler that weighs equal logits once: there are only some dozen different rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SamplingOptions(**options), [ANCHOR], n_vocab=N_VOCAB)
        self._known: dict[bytes, Any] = {}
        self._dense: dict[bytes, Floats] = {}

    def _weigh(self, x: Any) -> Any:
        key = x.tobytes()
        if key not in self._known:
            self._known[key] = super()._weigh(x)
        return self._known[key]

    def probabilities(self, logits: Any) -> Floats:
        key = logits.tobytes()
        if key not in self._dense:
            self._dense[key] = super().probabilities(logits)
        return self._dense[key]


RNG = np.random.default_rng(12)
TARGET: Logits = (1.5 * RNG.standard_normal((N_VOCAB, N_VOCAB))).astype(np.float32)  # [last, next]
ROWS: Logits = (1.5 * RNG.standard_normal((N_VOCAB, N_DRAFTS, N_VOCAB))).astype(
    np.float32
)  # [anchor, row, ..]
IDS = np.array([[RNG.permutation(N_VOCAB)[:N_CANDIDATES] for _ in range(N_DRAFTS)] for _ in range(N_VOCAB)])
SCORES: Logits = RNG.standard_normal((N_VOCAB, N_DRAFTS, N_CANDIDATES, N_CANDIDATES)).astype(np.float32)
SCORES[:, 0] = SCORES[:, 0, :1]  # the newest token is every predecessor of the first row


def independent(anchor: int, sampler: Toy | None) -> Proposal:
    """Rows that know nothing of each other, as in DFlash."""
    if sampler is None:
        return Proposal(tuple(ROWS[anchor].argmax(axis=1).tolist()))
    return draw_rows(ROWS[anchor], sampler)


def chained(anchor: int, sampler: Toy | None) -> Proposal:
    """Candidates scored behind the one before, as in DFlash 2."""
    return walk(IDS[anchor], SCORES[anchor], sampler, N_VOCAB)


def matching(
    rows: Logits, proposal: Proposal, sampler: Sampler, ends: Set[int] = frozenset()
) -> list[Chosen]:
    """`match`, called as `reject` is."""
    return match(rows, proposal.tokens, sampler, ends)


def answer(propose: Propose, accept: Accept, sampler: Toy) -> tuple[int, int]:
    """The first two tokens behind the anchor."""
    tokens: list[int] = []
    anchor = ANCHOR
    while len(tokens) < 2:
        proposal = propose(anchor, None if accept is matching else sampler)
        run = accept(TARGET[[anchor, *proposal.tokens]], proposal, sampler)
        tokens += [chosen.token for chosen in run]
        anchor = tokens[-1]
    return tokens[0], tokens[1]


def counted(propose: Propose, accept: Accept, n: int, **options: Any) -> tuple[Floats, Floats]:
    """How often each pair came out of `n` draws, and how often it should have: [first, second]."""
    sampler = Toy(seed=3, **options)
    counts = np.zeros((N_VOCAB, N_VOCAB))
    for _ in range(n):
        counts[answer(propose, accept, sampler)] += 1
    p = np.array([sampler.probabilities(row) for row in TARGET])
    return counts, n * p[ANCHOR][:, None] * p


def is_likely(counts: Floats, expected: Floats) -> bool:
    """False for a chi-square that one sample in a thousand exceeds; cells below 5 are taken together."""
    counts, expected = counts.ravel(), expected.ravel()
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    counts = np.array([*counts[often], counts[~often].sum()])
    expected = np.array([*expected[often], max(expected[~often].sum(), 1e-9)])
    degrees = len(counts) - 1
    third = 2 / (9 * degrees)  # Wilson and Hilferty's cube root
    limit = degrees * (1 - third + 3.09 * third**0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() < limit)


def total_variation(counts: Floats, expected: Floats) -> float:
    """Half the sum of differences of the first token's distributions."""
    return float(np.abs(counts.sum(axis=1) - expected.sum(axis=1)).sum() / 2 / counts.sum())


DRAFTS = pytest.mark.parametrize("propose", [independent, chained])


@DRAFTS
@pytest.mark.parametrize("accept", [reject, matching])
@pytest.mark.parametrize("n", [12_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_two_tokens_are_distributed_as_in_plain_decoding(propose: Propose, accept: Accept, n: int) -> None:
    counts, expected = counted(propose, accept, n, temperature=1.0)
    assert is_likely(counts, expected)
    assert is_likely(counts.sum(axis=1), expected.sum(axis=1))
    assert is_likely(counts.sum(axis=0), expected.sum(axis=0))


@pytest.mark.parametrize(("propose", "temperature"), [(independent, 0.5), (chained, 1.5)])
def test_drafts_heed_the_temperature(propose: Propose, temperature: float) -> None:
    counts, expected = counted(propose, reject, 20_000, temperature=temperature)
    assert total_variation(counts, expected) < 0.01
    assert is_likely(counts, expected)


@DRAFTS
@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.25}, {"logit_bias": {2: 1.5, 4: -math.inf}}],
    ids=lambda options: next(iter(options)),
)
def test_drafts_leave_cuts_and_biases_as_they_are(propose: Propose, options: dict[str, Any]) -> None:
    counts, expected = counted(propose, reject, 3_000, temperature=1.2, **options)
    assert (expected == 0).any() or "logit_bias" not in options
    assert is_likely(counts, expected)


def keeping_what_was_likely(rows: Logits, proposal: Proposal, sampler: Sampler) -> list[Chosen]:
    """Wrong: only drafts that were likely are looked at, so the others come less often."""
    assert proposal.distributions is not None
    n = 0
    while n < len(proposal.tokens) and proposal.distributions[n][proposal.tokens[n]] > 0.2:
        n += 1
    return reject(rows[: n + 1], Proposal(proposal.tokens[:n], proposal.distributions[:n]), sampler)


def drawing_again(rows: Logits, proposal: Proposal, sampler: Sampler) -> list[Chosen]:
    """Wrong: a refused draft is replaced by a draw from p, which gives likely drafts twice."""
    assert proposal.distributions is not None
    p, q, draft = sampler.probabilities(rows[0]), proposal.distributions[0], proposal.tokens[0]
    kept = sampler.uniform() * q[draft] < p[draft]
    return [Chosen(draft if kept else sampler.draw(p), rows[0])]


@DRAFTS
@pytest.mark.parametrize("accept", [keeping_what_was_likely, drawing_again])
def test_rules_that_bend_the_distribution_are_found_out(propose: Propose, accept: Accept) -> None:
    counts, expected = counted(propose, accept, 4_000, temperature=1.0)
    assert not is_likely(counts, expected)


@pytest.mark.parametrize("end", range(N_VOCAB))
@pytest.mark.parametrize("accept", [reject, matching])
def test_a_run_has_an_end_token_only_as_its_last(accept: Accept, end: int) -> None:
    sampler = Toy(temperature=1.0, seed=1)
    lengths = set()
    for _ in range(200):
        proposal = chained(ANCHOR, sampler)
        rows = TARGET[[ANCHOR, *proposal.tokens]]
        run = [chosen.token for chosen in accept(rows, proposal, sampler, {end})]
        assert end not in run[:-1]
        lengths.add((len(run), run[-1] == end))
    assert len(lengths) > 2


def test_rows_that_are_no_numbers_end_a_proposal() -> None:
    """Before the row, whatever was drawn there; an infinite candidate says as little as NaN."""
    for bad in (math.nan, math.inf):
        for at in range(N_DRAFTS):
            rows, scores = ROWS[ANCHOR].copy(), SCORES[ANCHOR].copy()
            rows[at, 3], scores[at, :, 1] = math.nan, bad
            for sampler in (Toy(temperature=1.0, seed=1), None):
                assert len(walk(IDS[ANCHOR], scores, sampler, N_VOCAB).tokens) == at
                if sampler is not None:
                    assert len(draw_rows(rows, sampler).tokens) == at


def test_the_lead_is_the_distance_of_the_choice_to_the_second_best() -> None:
    logits = np.array([1.0, 5.0, 4.5, -2.0, 4.0, 0.0], np.float32)

    def lead(sampler: Sampler) -> float:
        return sampler.lead(logits, sampler.pick(logits))

    assert lead(Toy()) == 0.5
    assert lead(Toy(logit_bias={1: -0.75})) == 0.25
    assert lead(Toy(logit_bias={1: -math.inf})) == 0.5
    assert lead(Toy(logit_bias={2: 0.5})) == lead(Toy(logit_bias={3: math.inf, 4: math.inf})) == 0
    assert lead(Toy(temperature=1.0, seed=1)) == math.inf
    assert lead(Sampler(SamplingOptions(), [0], n_vocab=6, forbidden=np.array([4]))) == 0.5
    penalised = Toy(presence_penalty=0.25)
    penalised.accept(1)
    assert lead(penalised) == 0.25
