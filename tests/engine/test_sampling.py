"""Choosing tokens: every step against an oracle in plain Python, and the draw against its distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.engine.sampling import Sampler, logprobs_of
from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.options import SamplingOptions

Logits = npt.NDArray[np.float32]


def random_logits(n_vocab: int, seed: int, spread: float = 2.0) -> Logits:
    logits = (np.random.default_rng(seed).standard_normal(n_vocab) * spread).astype(np.float32)
    logits.flags.writeable = False  # whoever writes into what came in fails here
    return logits


def logits_of(*values: float) -> Logits:
    return np.array(values, np.float32)


def sampler(
    logits: Logits, prompt: Sequence[int] = (), *, forbidden: Sequence[int] = (), **options: Any
) -> Sampler:
    ids = np.array(forbidden, np.int64) if forbidden else None
    return Sampler(SamplingOptions(**options), prompt, n_vocab=len(logits), forbidden=ids)


def draw(chooser: Sampler, logits: Logits, n: int) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(chooser.pick(logits))
        chooser.accept(tokens[-1])
    return tokens


def kept(probabilities: npt.NDArray[np.float64]) -> list[int]:
    return [int(token) for token in np.flatnonzero(probabilities)]


def expected_logits(
    logits: Logits,
    options: SamplingOptions,
    prompt: Sequence[int],
    answer: Sequence[int],
    forbidden: Sequence[int],
) -> list[float]:
    z = [float(value) for value in logits]
    if options.repetition_penalty != 1:
        for token in {*prompt, *answer}:
            z[token] = (
                z[token] / options.repetition_penalty
                if z[token] > 0
                else z[token] * options.repetition_penalty
            )
    for token in set(answer):
        z[token] -= options.frequency_penalty * list(answer).count(token) + options.presence_penalty
    for token, bias in options.logit_bias.items():
        z[token] += bias
    for token in forbidden:
        z[token] = -math.inf
    return z


def expected_probabilities(z: Sequence[float], options: SamplingOptions) -> list[float]:
    best = max(z)
    weights = [math.exp((value - best) / options.temperature) for value in z]
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    order = order[: options.top_k or len(z)]
    total = math.fsum(weights[token] for token in order)
    nucleus, mass = [], 0.0
    for token in order:
        nucleus.append(token)
        mass += weights[token] / total
        if mass >= options.top_p and options.top_p < 1:
            break
    remaining = {token for token in nucleus if weights[token] >= options.min_p * weights[order[0]]}
    total = math.fsum(weights[token] for token in remaining)
    return [weights[token] / total if token in remaining else 0.0 for token in range(len(z))]


CHAINS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.7, "repetition_penalty": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 8: -100.0}, "top_k": 5},
    {
        "temperature": 1.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "logit_bias": {0: 1.5, 39: -2.0},
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
    },
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_the_steps_follow_each_other_in_the_documented_order(chain: dict[str, Any]) -> None:
    options = SamplingOptions(**chain, seed=1)
    prompt, answer, forbidden = [1, 2, 2, 5, 30], [5, 7, 7, 7, 9], [11, 38]
    for seed in range(5):
        logits = random_logits(40, seed)
        chooser = sampler(logits, prompt, forbidden=forbidden, **chain, seed=1)
        for token in answer:
            chooser.accept(token)
        z = expected_logits(logits, options, prompt, answer, forbidden)
        np.testing.assert_allclose(
            chooser.probabilities(logits), expected_probabilities(z, options), rtol=1e-12, atol=0
        )


def chi_square_limit(freedom: int, z: float = 3.72) -> float:
    """What a sum of squares exceeds once in 10,000 times (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + z * math.sqrt(part)) ** 3)


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if "frequency_penalty" not in chain], ids=str)
def test_the_draw_follows_the_probabilities(chain: dict[str, Any]) -> None:
    n_draws, logits = 6000, random_logits(40, seed=11)
    chooser = sampler(logits, [1, 2, 3], **chain, seed=12345)
    wanted = chooser.probabilities(logits) * n_draws
    counts = np.bincount([chooser.pick(logits) for _ in range(n_draws)], minlength=40)
    assert not counts[wanted == 0].any()

    often = wanted >= 5  # rarer tokens are counted together
    wanted = np.append(wanted[often], wanted[~often].sum())
    counts = np.append(counts[often], counts[~often].sum())
    wanted, counts = wanted[wanted > 0], counts[wanted > 0]
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    assert chi_square < chi_square_limit(len(wanted) - 1)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), n_vocab=st.integers(1, 3000), share=st.floats(0.001, 1))
def test_top_k_keeps_the_best_and_the_lowest_ids_among_equals(seed: int, n_vocab: int, share: float) -> None:
    logits = np.random.default_rng(seed).integers(-4, 4, n_vocab).astype(np.float32)
    k = max(2, int(share * n_vocab))
    best = sorted(range(n_vocab), key=lambda token: (-logits[token], token))[:k]
    assert kept(sampler(logits, temperature=1, top_k=k, seed=0).probabilities(logits)) == sorted(best)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), n_vocab=st.integers(1, 3000), top_p=st.floats(0.001, 0.999))
def test_top_p_keeps_the_fewest_best_tokens_that_reach_p(seed: int, n_vocab: int, top_p: float) -> None:
    logits = random_logits(n_vocab, seed)
    whole = sampler(logits, temperature=1, seed=0).probabilities(logits)
    tokens = kept(sampler(logits, temperature=1, top_p=top_p, seed=0).probabilities(logits))
    assert set(tokens) == set(np.argsort(-logits, kind="stable")[: len(tokens)])
    assert whole[tokens].sum() >= top_p - 1e-12
    assert whole[tokens].sum() - whole[tokens].min() < top_p + 1e-12


@pytest.mark.parametrize("spread", [1, 4, 20])
def test_cuts_of_a_large_vocabulary_keep_what_sorting_all_of_it_keeps(spread: int) -> None:
    n_vocab = 150_000
    logits = np.random.default_rng(2).integers(-spread, spread, n_vocab).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    for k in (2, 20, 293, 294, 40_000):  # 293 blocks of 512 are searched by their maxima
        probabilities = sampler(logits, temperature=1, top_k=k, seed=0).probabilities(logits)
        assert kept(probabilities) == sorted(order[:k].tolist())
    whole = sampler(logits, temperature=1, seed=0).probabilities(logits)
    for top_p in (0.0001, 0.1, 0.9):
        n_kept = int(np.searchsorted(np.cumsum(whole[order]), top_p)) + 1
        probabilities = sampler(logits, temperature=1, top_p=top_p, seed=0).probabilities(logits)
        assert kept(probabilities) == sorted(order[:n_kept].tolist())


@pytest.mark.parametrize("n_vocab", [4, 500, 5000])
def test_top_p_takes_the_lowest_ids_of_a_flat_distribution(n_vocab: int) -> None:
    logits = np.zeros(n_vocab, np.float32)
    probabilities = sampler(logits, temperature=1, top_p=0.5, seed=0).probabilities(logits)
    assert kept(probabilities) == list(range(n_vocab // 2))


@settings(deadline=None)
@given(values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=60), min_p=st.floats(0.001, 1))
def test_min_p_keeps_what_has_that_share_of_the_best_probability(values: list[float], min_p: float) -> None:
    logits = logits_of(*values)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = sampler(logits, temperature=1, min_p=min_p, seed=0).probabilities(logits)
    assert kept(probabilities) == kept(weights >= min_p)
    np.testing.assert_allclose(probabilities.sum(), 1)


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50),
    chain=st.sampled_from(CHAINS[:6]),
)
def test_a_picked_token_has_a_probability_and_all_sum_to_one(
    values: list[float], chain: dict[str, Any]
) -> None:
    logits = logits_of(*values)
    chooser = sampler(logits, **chain, seed=3)
    probabilities = chooser.probabilities(logits)
    assert probabilities[chooser.pick(logits)] > 0
    np.testing.assert_allclose(probabilities.sum(), 1)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = logits_of(1, 3, 2, 3, 3)
    choices: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 1}, {"frequency_penalty": 1.0}]
    for options in choices:
        chooser = sampler(logits, **options)
        assert chooser.pick(logits) == 1
        np.testing.assert_array_equal(chooser.probabilities(logits), [0, 1, 0, 0, 0])


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    logits = random_logits(300, seed=4)
    options: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 77}
    alone = draw(sampler(logits, [1, 2], **options), logits, 60)
    one, other = sampler(logits, [1, 2], **options), sampler(logits, [5], **{**options, "seed": 78})
    mixed = []
    for _ in range(60):
        draw(other, logits, 2)
        one.probabilities(logits)
        mixed += draw(one, logits, 1)
    assert mixed == alone
    assert draw(sampler(logits, [1, 2], **{**options, "seed": 79}), logits, 60) != alone


def test_a_fresh_seed_is_reported_and_repeats_the_answer() -> None:
    logits = random_logits(300, seed=5)
    first, second = sampler(logits, temperature=1), sampler(logits, temperature=1)
    assert first.seed is not None
    assert first.seed != second.seed
    assert draw(sampler(logits, temperature=1, seed=first.seed), logits, 40) == draw(first, logits, 40)


def test_the_largest_seed_is_used_as_given() -> None:
    logits = random_logits(300, seed=5)
    assert sampler(logits, temperature=1, seed=2**63 - 1).seed == 2**63 - 1


def test_greedy_has_no_seed() -> None:
    logits = random_logits(10, seed=0)
    assert sampler(logits, seed=5).seed is None
    assert sampler(logits, temperature=1, top_k=1, seed=5).seed is None


def test_cuts_that_keep_everything_leave_the_answer_as_it_is() -> None:
    logits = random_logits(1000, seed=6)
    plain = draw(sampler(logits, temperature=1, seed=9), logits, 50)
    harmless: list[dict[str, Any]] = [{"top_k": 1000}, {"top_k": 5000}, {"top_k": 999}, {"min_p": 1e-300}]
    for cuts in harmless:
        assert draw(sampler(logits, temperature=1, seed=9, **cuts), logits, 50) == plain


def test_each_token_takes_one_number_of_the_stream() -> None:
    flat, peaked = random_logits(100, seed=7), np.where(np.arange(100) == 5, 100, 0).astype(np.float32)
    one, other = sampler(flat, temperature=1, seed=1), sampler(flat, temperature=1, seed=1)
    one.pick(flat)
    assert other.pick(peaked) == 5
    assert one.pick(flat) == other.pick(flat)


@pytest.mark.parametrize(
    ("options", "forbidden", "needed"),
    [
        ({}, (), False),
        ({"temperature": 0.5, "top_k": 1}, (), False),
        ({"temperature": 0.5}, (), True),
        ({"repetition_penalty": 1.1}, (), True),
        ({"frequency_penalty": 0.1}, (), True),
        ({"presence_penalty": 0.1}, (), True),
        ({"logit_bias": {1: 2.0}}, (), True),
        ({}, (4,), True),
    ],
)
def test_logits_are_needed_unless_their_argmax_is_the_choice(
    options: dict[str, Any], forbidden: tuple[int, ...], needed: bool
) -> None:
    assert sampler(random_logits(10, seed=0), forbidden=forbidden, **options).needs_logits is needed


def test_the_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = logits_of(3.0, 2.9, 2.8, -1.0)
    chooser = sampler(logits, [0], repetition_penalty=2.0)
    assert draw(chooser, logits, 3) == [1, 2, 0]
    assert chooser.pick(logits) == 0  # all three are halved, and no further by a second use


def test_the_repetition_penalty_lowers_negative_logits_too() -> None:
    logits = logits_of(-1.0, -1.5)
    assert sampler(logits, [0], repetition_penalty=2.0).pick(logits) == 1


def test_frequency_and_presence_penalties_count_the_answer_only() -> None:
    logits = logits_of(2.0, 1.0, 0.0)
    assert sampler(logits, [0, 0, 0], frequency_penalty=1.5, presence_penalty=1.5).pick(logits) == 0
    assert draw(sampler(logits, frequency_penalty=0.6), logits, 6) == [0, 0, 1, 0, 1, 0]
    assert draw(sampler(logits, presence_penalty=1.5), logits, 5) == [0, 1, 0, 0, 0]


def test_penalties_stay_exact_over_a_long_answer() -> None:
    options = SamplingOptions(temperature=1, frequency_penalty=0.01, repetition_penalty=1.05, seed=3)
    logits = random_logits(400, seed=8, spread=1)
    chooser = Sampler(options, [3, 4, 399], n_vocab=400)
    answer = draw(chooser, logits, 900)
    assert len(set(answer)) > 200
    z = expected_logits(logits, options, [3, 4, 399], answer, ())
    np.testing.assert_allclose(chooser.probabilities(logits), expected_probabilities(z, options), rtol=1e-11)


def test_forbidden_ids_are_never_chosen() -> None:
    logits = logits_of(math.inf, 5, 1, 9)
    choices: list[dict[str, Any]] = [{}, {"temperature": 50.0}, {"temperature": 1.0, "top_k": 3, "seed": 1}]
    for options in choices:
        assert set(draw(sampler(logits, forbidden=[0, 3], **options), logits, 50)) <= {1, 2}


@pytest.mark.parametrize("seed", range(8))
def test_greedy_over_forbidden_ids_takes_the_best_of_the_others(seed: int) -> None:
    logits = random_logits(60, seed)
    order = np.argsort(-logits, kind="stable")
    for n_forbidden in (0, 1, 5):
        chooser = sampler(logits, forbidden=order[:n_forbidden].tolist())
        assert chooser.pick(logits) == order[n_forbidden]


def test_infinite_biases_ban_and_force_a_token_whatever_its_logit() -> None:
    logits = logits_of(math.inf, 5, 1, -math.inf)
    banned = sampler(logits, logit_bias={0: -math.inf, 1: -math.inf})
    assert banned.pick(logits) == 2
    forced = sampler(logits_of(1, 2, 3, -math.inf), temperature=2, logit_bias={3: math.inf}, seed=1)
    assert set(draw(forced, logits_of(1, 2, 3, -math.inf), 20)) == {3}


def test_infinite_logits_share_the_whole_probability() -> None:
    logits = logits_of(1, math.inf, -math.inf, math.inf)
    np.testing.assert_array_equal(
        sampler(logits, temperature=1, seed=0).probabilities(logits), [0, 0.5, 0, 0.5]
    )
    assert sampler(logits).pick(logits) == 1
    assert sampler(logits, [1], repetition_penalty=1.5).pick(logits) == 1


def test_numbers_at_the_edge_of_their_range_raise_no_warning() -> None:
    logits = logits_of(3e38, -3e38, 1, 0)
    edges: list[dict[str, Any]] = [
        {"temperature": 5e-324},
        {"temperature": 1e-300, "top_p": 5e-324, "min_p": 1.0},
        {"temperature": 100, "logit_bias": {0: 1.7e308, 1: -1.7e308}},
        {"temperature": 1, "repetition_penalty": 5e-324},
    ]
    for options in edges:
        chooser = sampler(logits, [0, 1], seed=0, **options)
        assert chooser.pick(logits) == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 2}, {"logit_bias": {0: 1.0}}])
def test_nan_is_an_error_that_names_the_token(options: dict[str, Any]) -> None:
    logits = logits_of(1, 2, math.nan, 3)
    with pytest.raises(BackendError, match="1 of 4 logits are NaN, the first of token 2"):
        sampler(logits, **options).pick(logits)
    with pytest.raises(BackendError, match="token 2"):
        logprobs_of(logits, 0, 0)


def test_logits_that_leave_no_token_are_an_error() -> None:
    logits = logits_of(1, -math.inf, -math.inf)
    choices: list[dict[str, Any]] = [{}, {"temperature": 1}]
    for options in choices:
        with pytest.raises(BackendError, match="every logit is -inf"):
            sampler(logits, **options).pick(np.full(3, -math.inf, np.float32))
        with pytest.raises(BackendError, match="every logit is -inf"):
            sampler(logits, forbidden=[0], **options).pick(logits)


def test_options_that_leave_no_token_are_refused_at_once() -> None:
    logits = logits_of(1, 2, 3)
    for forbidden, bias in (([0, 1, 2], {}), ([0], {1: -math.inf, 2: -math.inf})):
        with pytest.raises(UsageError, match="every one of 3 tokens is forbidden"):
            sampler(logits, forbidden=forbidden, logit_bias=bias)


@pytest.mark.parametrize("token", [3, 2**31, 2**70])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    logits = logits_of(1, 2, 3)
    with pytest.raises(UsageError, match=f"logit_bias token {token} is not .* ids go from 0 to 2"):
        sampler(logits, logit_bias={1: 0.5, token: 1.0})
    with pytest.raises(UsageError, match=f"prompt token {token} "):
        sampler(logits, [0, token])
    with pytest.raises(UsageError, match="forbidden id 3 "):
        sampler(logits, forbidden=[0, 3])
    with pytest.raises(BackendError, match=f"token {token} "):
        sampler(logits).accept(token)
    with pytest.raises(BackendError, match=f"token {token} "):
        logprobs_of(logits, token, 0)


def test_a_bias_on_a_forbidden_id_is_refused() -> None:
    with pytest.raises(UsageError, match="logit_bias token 2 is never emitted"):
        sampler(logits_of(1, 2, 3), forbidden=[2], logit_bias={2: 5.0})


def test_logits_of_another_vocabulary_are_refused() -> None:
    chooser = sampler(logits_of(1, 2, 3), temperature=1)
    for wrong in (logits_of(1), logits_of(1, 2, 3, 4), logits_of(1, 2, 3).reshape(1, 3)):
        with pytest.raises(BackendError, match="the vocabulary has 3 tokens"):
            chooser.pick(wrong)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(offset: float) -> None:
    logits = (random_logits(2000, seed=9) + np.float32(offset)).astype(np.float32)
    z = [float(value) for value in logits]
    log_total = max(z) + math.log(math.fsum(math.exp(value - max(z)) for value in z))
    report = logprobs_of(logits, 17, 2000)
    order = sorted(range(2000), key=lambda token: (-z[token], token))
    assert report.token == 17
    assert report.logprob == pytest.approx(z[17] - log_total, abs=1e-10)
    assert [token for token, _ in report.top] == order
    assert [value for _, value in report.top] == pytest.approx(
        [z[token] - log_total for token in order], abs=1e-10
    )
    assert math.fsum(math.exp(value) for _, value in report.top) == pytest.approx(1)


def test_logprobs_list_as_many_alternatives_as_asked_and_as_there_are() -> None:
    logits = logits_of(2, 5, 5, 1)
    assert logprobs_of(logits, 0, 0).top == ()
    assert [token for token, _ in logprobs_of(logits, 0, 3).top] == [1, 2, 0]
    assert [token for token, _ in logprobs_of(logits, 0, 100).top] == [1, 2, 0, 3]


def test_logprobs_of_infinite_logits_are_limits() -> None:
    report = logprobs_of(logits_of(1, math.inf, math.inf, -math.inf), 0, 2)
    assert report.logprob == -math.inf
    assert [token for token, _ in report.top] == [1, 2]
    assert [value for _, value in report.top] == pytest.approx([math.log(0.5)] * 2)
    assert logprobs_of(logits_of(0, -math.inf), 1, 0).logprob == -math.inf
