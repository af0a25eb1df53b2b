"""Speculative decoding as a loop: stored runs, drafts that are drawn, and how many rows a step has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.engine.acceptance import reject
from pyggml_dflash.engine.drafting import Proposal
from tests.drafts.drafted import Drafted, Target, arrays, draft_file, open_target, with_draft
from tests.drafts.published import publish
from tests.drafts.speculated import drafting, sampler_of, speculated
from tests.reference.stored import model_file

PROMPT = np.random.default_rng(1).integers(0, 750, 32).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    with open_target(model_file("qwen35-tiny", "F32", folder), max_ctx=1024, mtp=True) as target:
        yield target


@pytest.fixture(scope="module")
def fitted(target: Target, folder: Path) -> Iterator[Drafted]:
    with drafting(target, "dflash-fitted-tiny", folder) as drafted:
        yield drafted


@pytest.fixture(scope="module", params=["file", "folder"])
def in_each_form(request: pytest.FixtureRequest, target: Target, folder: Path) -> Iterator[Drafted]:
    name = "dflash-fitted-tiny"
    path = draft_file(name, folder) if request.param == "file" else publish(name, folder)
    with with_draft(target, path, update="replay") as drafted:
        yield drafted


@pytest.mark.parametrize("run", range(7))
def test_a_stored_run_is_reproduced_round_by_round(in_each_form: Drafted, run: int) -> None:
    numbers = arrays("dflash-fitted-tiny")
    prompt, expected = numbers[f"s{run}_prompt"].tolist(), numbers[f"s{run}_tokens"].tolist()
    drafts, accepted = numbers[f"s{run}_drafts"], numbers[f"s{run}_accepted"]
    seen, at = [], []

    def note(n_past: int, n_drafts: int, own: Proposal) -> Sequence[int]:
        seen.append(list(own.tokens))
        at.append(n_past)
        return own.tokens

    n = 1 + int((accepted + 1).sum())
    tokens, _ = speculated(in_each_form, prompt, n + 16, 8, tell=note)
    assert tokens[: len(expected)] == expected
    assert seen[: len(drafts)] == drafts.tolist()
    np.testing.assert_array_equal(np.diff(at[: len(drafts) + 1]), accepted + 1)


@pytest.mark.parametrize("name", ["dflash-tiny", "dflash2-tiny", "mtp"])
def test_drafts_are_drawn_from_the_distributions_that_are_returned(
    target: Target, folder: Path, name: str
) -> None:
    """The first token behind the anchor over many draws, against its distribution in plain decoding."""
    options = {"temperature": 2.0, "top_k": 4, "seed": 0}
    n = 600
    with drafting(target, name, folder) as drafted:
        slot, forwards, drafter = target.slot, drafted.forwards, drafted.drafter
        drafted.begin()
        drafted.feed(PROMPT)
        sampler = sampler_of(drafted, PROMPT, **options)
        p = sampler.probabilities(forwards.verify(slot, (9,))[0])
        counts, n_drafted = np.zeros(len(p)), np.zeros(len(p))
        for _ in range(n):
            proposal = drafter.propose(9, slot.n_past, 1, sampler)
            n_drafted[list(proposal.tokens)] += 1
            run = reject(forwards.verify(slot, (9, *proposal.tokens)), proposal, sampler)
            counts[run[0].token] += 1
    assert proposal.distributions is not None
    for found, expected in ((counts, p), (n_drafted, proposal.distributions[0])):
        likely = expected > 0
        assert found[~likely].sum() == 0
        chi_square = float(((found - n * expected)[likely] ** 2 / (n * expected[likely])).sum())
        assert chi_square < {4: 16.3, 6: 20.5}[likely.sum()]  # one in a thousand


def test_a_seed_gives_the_same_tokens_whatever_the_width(fitted: Drafted) -> None:
    """Also where measured times choose the width."""
    options = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
    expected, _ = speculated(fitted, PROMPT, 60, 1, **options)
    for width in (2, 5, 8, None):
        assert speculated(fitted, PROMPT, 60, width, **options)[0] == expected


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "logit_bias": {3: 1.0}}, True),
        ({"temperature": 1.0, "top_k": 1}, False),
        ({"temperature": 1.0, "seed": 1}, False),
        ({"temperature": 1.0, "presence_penalty": 0.5}, False),
    ],
)
def test_drafts_are_drawn_where_no_answer_could_be_given_again(
    fitted: Drafted, options: dict[str, Any], drawn: bool
) -> None:
    """A seed, greedy choices and penalties keep to the one token that plain decoding would give."""
    seen = set()

    def note(n_past: int, n_drafts: int, own: Proposal) -> Sequence[int]:
        seen.add(own.distributions is not None)
        return own.tokens

    _, speculation = speculated(fitted, PROMPT, 20, 4, tell=note, **options)
    assert seen == {drawn}
    assert speculation.repeatable == (not drawn)
