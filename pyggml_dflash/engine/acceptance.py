"""Which drafts stay, and what stands behind them: the two rules that keep the target's choice. Layer 6.

Knows rows of logits and what was drafted, no model. Both rules give a run of tokens: drafts that
stay, and behind them one token of the target's own. A run ends early at a token that ends the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token of the answer, and the logits F32 [n_vocab] it was chosen from, until the next forward.

    `lead`: how far its logit is above the second best; inf for a token that was drawn.
    """

    token: int
    logits: Logits
    lead: float = math.inf


def match(
    rows: Logits, drafts: Sequence[int], sampler: Sampler, ends: Set[int] = frozenset()
) -> list[Chosen]:
    """Pick each row's token as plain decoding would, and go on while it is the draft.

    rows F32 [len(drafts) + 1, n_vocab]; what follows row i was computed behind the first i drafts.
    Takes one number of the random stream per token, as plain decoding does.
    """
    run: list[Chosen] = []
    for i, row in enumerate(rows):
        token = sampler.pick(row)
        run.append(Chosen(token, row, sampler.lead(row, token)))
        sampler.accept(token)
        if i == len(drafts) or token != drafts[i] or token in ends or sampler.finished_at is not None:
            break
    return run


def reject(rows: Logits, proposal: Proposal, sampler: Sampler, ends: Set[int] = frozenset()) -> list[Chosen]:
    """Keep each draft with probability p/q, and draw what replaces the first refused one from max(p - q, 0).

    p is the target's distribution at a row, q the one its draft was drawn from. The tokens are distributed
    as those of plain decoding, which other drafts and other widths lead to by other numbers.
    """
    assert proposal.distributions is not None
    assert not sampler.depends_on_answer, "drafts were drawn before the tokens that they follow were accepted"
    run: list[Chosen] = []
    for row, draft, q in zip(rows, proposal.tokens, proposal.distributions, strict=False):
        p = sampler.probabilities(row)
        if sampler.uniform() * q[draft] >= p[draft]:
            rest = np.maximum(p - q, 0)
            run.append(Chosen(sampler.draw(rest if rest.sum() > 0 else p), row))
            break
        run.append(Chosen(draft, row))
        if draft in ends:
            break
    else:
        last = rows[len(proposal.tokens)]
        run.append(Chosen(sampler.pick(last), last))
    for chosen in run:
        sampler.accept(chosen.token)
    return run
