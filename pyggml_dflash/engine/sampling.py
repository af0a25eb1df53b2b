"""Logits to tokens: penalties, biases, temperature, cuts, the draw, and log probabilities.

Layer 6; knows logits and options, no model and no device. The order is fixed:

    1. repetition penalty, frequency and presence penalties, finite biases; then biases of
       plus or minus infinity, which replace the logit, and ids that are never emitted; last,
       only what constraint and reasoning budget allow remains
    2. temperature: softmax of logits / temperature
    3. top-k   the k best logits; the lowest ids win among equals
    4. top-p   the fewest best tokens whose share of what top-k left reaches p
    5. min-p   of what top-p left, those with at least min_p times the best probability
    6. one draw: inverse CDF over the remaining ids in rising order

Each token takes exactly one number of the request's own PCG64 stream, so a seed gives the same
tokens however the work is split into steps and whatever else the engine runs. Greedy takes the
best logit after 1, the lowest id among equals. Arithmetic is float64.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.guide import AnswerGuide
from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.options import SamplingOptions
from pyggml_dflash.requests import TokenLogprob

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.floating[Any]]

FRESH_SEED_BITS: Final = 32  # a reported seed stays exact in every JSON reader and short to type
BLOCK: Final = 512  # ids per maximum in the search for the best
FIRST_LOOK: Final = 256  # best tokens in which top-p is looked for before it looks at 16 times as many


def best(logits: Logits) -> int:
    """The best token, the lowest id among equals; NaN raises, since argmax would return it."""
    token = int(np.argmax(logits))
    if logits[token] != logits[token]:
        raise BackendError(f"the model computed NaN for token {token}")
    return token


class Sampler:
    """Chooses the tokens of one request. Owns its random stream and its counts, shares nothing.

    Call `accept` with every committed token, then `pick` for the next. `pick` and `probabilities`
    read the logits and leave them as they are; only `pick` moves the random stream.

    `needs_logits`: False if the argmax of the raw logits is the choice, so that a device may make it;
    log probabilities need the logits all the same. `seed`: the one in force, None when greedy, since
    nothing is drawn.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        *,
        n_vocab: int,
        forbidden: npt.NDArray[np.integer[Any]] | None = None,
        guide: AnswerGuide | None = None,
    ) -> None:
        """`forbidden`: ids that are never emitted, such as rows of the vocabulary without a token.

        `guide`: what allows tokens; it belongs to the sampler, which tells it what came.

        Raises `UsageError` for a biased, prompt or forbidden id that is not in the vocabulary, for
        a bias on a forbidden id, and when forbidden ids and biases leave no token.
        """
        self._options = options
        self._n_vocab, self._guide = n_vocab, guide
        self._forbidden = _checked_ids("forbidden id", () if forbidden is None else forbidden, n_vocab)
        prompt_ids = _checked_ids("prompt token", prompt, n_vocab)
        self._split_biases()
        penalties = (options.repetition_penalty, options.frequency_penalty, options.presence_penalty)
        counted = prompt_ids if options.repetition_penalty != 1 else prompt_ids[:0]
        self._seen = _SeenTokens(counted) if penalties != (1, 0, 0) else None

        self._is_argmax = options.greedy and not options.changes_logits
        self._forbidden_set = frozenset(self._forbidden.tolist())
        changes = options.changes_logits or len(self._forbidden) > 0 or guide is not None
        self.needs_logits = not options.greedy or changes
        self.seed: int | None = None
        if not options.greedy:
            self.seed = secrets.randbits(FRESH_SEED_BITS) if options.seed is None else options.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed or 0))
        self._scratch = np.empty(n_vocab if self.needs_logits else 0)

    def pick(self, logits: Logits) -> int:
        """The next token for `logits`, float32 [n_vocab]. Raises `BackendError` if no choice can be made."""
        if self._is_argmax:  # only ids that must not come stand between the logits and the choice
            _check_logits(logits, self._n_vocab)
            token = int(np.argmax(logits))
            is_emitted = token not in self._forbidden_set and logits[token] > -math.inf
            if is_emitted and (self._guide is None or self._guide.allows(token)):
                return token
        x = self._adjusted(logits)
        if self._options.greedy:
            return int(np.argmax(x))
        ids, weights = self._weigh(x)
        cdf = np.cumsum(weights)
        # random() < 1 and 'right' together never land on an id of weight 0
        at = int(np.searchsorted(cdf, self._random.random() * cdf[-1], side="right"))
        return at if ids is None else int(ids[at])

    def lead(self, logits: Logits, token: int) -> float:
        """How far `token`, which `pick` took and `accept` has not seen, is above the next best.

        inf when tokens are drawn. Where `token` has the best of all logits and none of them is changed, the
        next best may be one that must not come.
        """
        if not self.greedy:
            return math.inf
        is_best = self._is_argmax and (self._guide is None or logits[token] >= logits.max())
        x = logits if is_best else self._adjusted(logits)
        best, rest = float(x[token]), (x[:token], x[token + 1 :])
        second = max((float(part.max()) for part in rest if len(part)), default=-math.inf)
        return 0.0 if second == best else best - second

    def accept(self, token: int) -> None:
        """Count `token` as part of the answer, whoever chose it."""
        if not 0 <= token < self._n_vocab:
            raise BackendError(f"token {token} is not in the vocabulary of {self._n_vocab}")
        if self._seen is not None:
            self._seen.add(token)
        if self._guide is not None:
            self._guide.accept(token)

    @property
    def finished_at(self) -> int | None:
        """How many accepted tokens are all that a constraint describes; None while there may be more."""
        return None if self._guide is None else self._guide.finished_at

    def probabilities(self, logits: Logits) -> Floats:
        """What `pick` draws from: a fresh float64 [n_vocab] that sums to 1, one-hot when greedy."""
        x = self._adjusted(logits)
        dense = np.zeros(self._n_vocab)
        if self._options.greedy:
            dense[np.argmax(x)] = 1
            return dense
        ids, weights = self._weigh(x)
        dense[slice(None) if ids is None else ids] = weights / weights.sum()
        return dense

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self._options.greedy

    @property
    def repeats(self) -> bool:
        """True if the caller gave the seed, and so expects the tokens of that seed."""
        return self._options.seed is not None

    @property
    def temperature(self) -> float:
        """What logits are divided by; 0 when greedy."""
        return self._options.temperature

    @property
    def depends_on_answer(self) -> bool:
        """True if the distribution of a token changes with the tokens accepted before it."""
        return self._seen is not None or self._guide is not None

    def draw(self, q: Floats) -> int:
        """An index drawn with the weights `q`, float64; moves the random stream by one number."""
        cdf = np.cumsum(q)
        return int(np.searchsorted(cdf, self._random.random() * cdf[-1], side="right"))

    def uniform(self) -> float:
        """A number from [0, 1); moves the random stream by one number."""
        return float(self._random.random())

    def _split_biases(self) -> None:
        biases = self._options.logit_bias
        ids = _checked_ids("logit_bias token", tuple(biases), self._n_vocab)
        unusable = np.intersect1d(ids, self._forbidden)
        if len(unusable):
            raise UsageError(f"logit_bias token {unusable[0]} is never emitted; bias tokens that have a text")
        values = np.array([float(biases[token]) for token in ids.tolist()], np.float64)
        finite = np.isfinite(values)
        self._biased, self._bias = ids[finite], values[finite]
        self._replaced, self._replacement = ids[~finite], values[~finite]
        banned = np.union1d(self._forbidden, ids[values == -math.inf])
        if len(banned) == self._n_vocab:
            raise UsageError(
                f"every one of {self._n_vocab} tokens is forbidden or has a bias of -inf; allow one"
            )

    def _adjusted(self, logits: Logits) -> Logits:
        """Step 1: the logits to choose from, in the scratch array if they differ from what came in."""
        _check_logits(logits, self._n_vocab)
        if not self.needs_logits:
            _check_any_left(float(logits.max()))
            return logits
        x = self._scratch
        np.copyto(x, logits)
        with np.errstate(over="ignore"):  # a huge bias or a tiny penalty may reach infinity, and counts as it
            if self._seen is not None:
                self._seen.penalise(x, self._options)
            x[self._biased] += self._bias
        x[self._replaced] = self._replacement
        x[self._forbidden] = -math.inf
        best = float(x.max())
        _check_any_left(best)
        if self._guide is not None:
            self._guide.restrict(x)
            if x.max() == -math.inf:
                raise UsageError("logit_bias forbids every token that the constraint or the budget leaves")
        return x

    def _weigh(self, x: Logits) -> tuple[Ids | None, Floats]:
        """Steps 2 to 5: the ids that remain, rising (None for all), and what they weigh, the best 1."""
        options = self._options
        ids: Ids | None = None
        if 0 < options.top_k < self._n_vocab:
            ids = np.sort(_best(x, options.top_k))
            x = x[ids]
        weights = _softmax_weights(x, options.temperature)
        if options.top_p < 1:
            ids, weights = _keep(_top_p(weights, options.top_p), ids, weights)
        if options.min_p > 0:  # the best always remains and weighs 1
            ids, weights = _keep(np.flatnonzero(weights >= options.min_p), ids, weights)
        return ids, weights


class _SeenTokens:
    """The distinct tokens of prompt and answer and how often the answer has each.

    Work per choice grows with the distinct tokens, not with the vocabulary.
    """

    def __init__(self, prompt: Ids) -> None:
        distinct = np.unique(prompt)
        self._rows = {token: row for row, token in enumerate(distinct.tolist())}
        self._ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids))

    def add(self, token: int) -> None:
        row = self._rows.setdefault(token, len(self._rows))
        if row == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[row] = token
        self._counts[row] += 1

    def penalise(self, x: Floats, options: SamplingOptions) -> None:
        """Lower the logits `x` in place."""
        n = len(self._rows)
        ids, counts = self._ids[:n], self._counts[:n]
        values = x[ids]
        if options.repetition_penalty != 1:
            factor = options.repetition_penalty
            values = np.where(values > 0, values / factor, values * factor)
        values -= options.frequency_penalty * counts + options.presence_penalty * (counts > 0)
        x[ids] = values


def logprobs_of(logits: Logits, token: int, n_top: int) -> TokenLogprob:
    """Natural-log softmax of the raw `logits` [n_vocab], in float64: of `token` and of the `n_top` best.

    The best come first, the lowest id first among equals, and include `token` where it belongs;
    a vocabulary below `n_top` gives all it has. Raises `BackendError` on NaN.
    """
    _check_logits(logits, len(logits))
    if not 0 <= token < len(logits):
        raise BackendError(f"token {token} is not in the vocabulary of {len(logits)}")
    x = np.asarray(logits, np.float64)
    best = float(x.max())
    _check_any_left(best)
    weights = _softmax_weights(x, 1)
    ids = _best(x, min(n_top, len(x))) if n_top else np.zeros(0, np.int64)
    asked = np.concatenate([ids, [token]])
    with np.errstate(divide="ignore"):  # beside an infinite logit the others have the probability 0
        distance = np.log(weights[asked]) if best == math.inf else x[asked] - best
    *top, chosen = (distance - math.log(weights.sum())).tolist()
    return TokenLogprob(token=token, logprob=chosen, top=tuple(zip(ids.tolist(), top, strict=True)))


def _best(x: Logits, k: int) -> Ids:
    """The ids of the `k` best of `x`, best first, the lowest id first among equals; 0 < k <= len(x)."""
    blocks = np.maximum.reduceat(x, np.arange(0, len(x), BLOCK))
    values = x
    if k <= len(blocks):  # k blocks hold a value of at least this, so k ids do, and few others
        values = x[x >= _kth_best(blocks, k)]
    ids = np.flatnonzero(x >= _kth_best(values, k))
    order: Ids = np.argsort(-x[ids], kind="stable")[:k]
    return ids[order]


def _kth_best(values: Logits, k: int) -> float:
    at = len(values) - k
    return float(np.partition(values, at)[at])


def _softmax_weights(x: Logits, temperature: float) -> Floats:
    """Probabilities up to a factor: the best weighs 1. Infinite logits share everything equally."""
    best = x.max()
    weights: Floats
    if best == math.inf:
        weights = np.equal(x, best).astype(np.float64)
        return weights
    with np.errstate(over="ignore"):  # a tiny temperature takes the distance to -inf: weight 0
        weights = np.subtract(x, best, dtype=np.float64)
        weights /= temperature
    np.exp(weights, out=weights)
    return weights


def _top_p(weights: Floats, top_p: float) -> Ids:
    wanted = top_p * weights.sum()
    n_looked = min(FIRST_LOOK, len(weights))
    while True:
        best = _best(weights, n_looked)
        reached = np.cumsum(weights[best])
        if reached[-1] >= wanted or n_looked == len(weights):
            break
        n_looked = min(16 * n_looked, len(weights))
    return np.sort(best[: int(np.searchsorted(reached, wanted)) + 1])


def _keep(kept: Ids, ids: Ids | None, weights: Floats) -> tuple[Ids, Floats]:
    return kept if ids is None else ids[kept], weights[kept]


def _checked_ids(what: str, ids: Sequence[int] | npt.NDArray[np.integer[Any]], n_vocab: int) -> Ids:
    try:
        array = np.asarray(ids, np.int64)
    except OverflowError:  # an id beyond 64 bits
        array = np.array([max(-1, min(n, n_vocab)) for n in ids], np.int64)
    outside = np.flatnonzero((array < 0) | (array >= n_vocab))
    if len(outside):
        raise UsageError(f"{what} {ids[outside[0]]} is not in the vocabulary; ids go from 0 to {n_vocab - 1}")
    return array


def _check_logits(logits: Logits, n_vocab: int) -> None:
    if logits.shape != (n_vocab,):
        raise BackendError(f"logits have shape {logits.shape}; the vocabulary has {n_vocab} tokens")
    if math.isnan(logits.max()):
        wrong = np.flatnonzero(np.isnan(logits))
        raise BackendError(f"{len(wrong)} of {n_vocab} logits are NaN, the first of token {wrong[0]}")


def _check_any_left(best: float) -> None:
    if best == -math.inf:
        raise BackendError("no token is left: every logit is -inf")
