"""Rows of plain steps wait in the target's record, and the drafter knows the text all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.engine.drafting import Backlog, Proposal
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.options import SamplingOptions
from tests.drafts.drafted import CHUNK, Drafted, Target, draft_file, open_target, with_draft, with_mtp
from tests.reference.stored import model_file

PROMPT = np.random.default_rng(3).integers(0, 750, 70).tolist()
DRAFTERS = pytest.mark.parametrize("name", ["dflash-fitted-tiny", "dflash-swa-tiny", "dflash2-tiny", "mtp"])
BURSTS = (
    3,
    1,
    30,
    2,
    90,
    1,
    64,
    7,
)  # plain steps between verify steps; the record has room for 64


class Bursts(VerifyWidth):
    """So many plain steps, a verify step, and so on."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._plan = [w for n in BURSTS for w in [*[1] * n, width]]

    def choose(self, room: int, n_past: int) -> int:
        return min(room, self._plan.pop(0)) if self._plan else 1

    def plain_steps(self, room: int, n_past: int) -> int:
        return 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with open_target(model_file("qwen35-tiny", "F32", tmp_path_factory.mktemp("target")), mtp=True) as target:
        yield target


@contextmanager
def drafting(target: Target, name: str, folder: Path) -> Iterator[Drafted]:
    made = with_mtp(target) if name == "mtp" else with_draft(target, draft_file(name, folder))
    with made as drafted:
        yield drafted


def answer(drafted: Drafted, n: int, seen: list[tuple[int, Proposal]]) -> list[int]:
    """The greedy answer to PROMPT in bursts; `seen` gets every proposal and where it was made."""
    forwards, drafter, slot = drafted.forwards, drafted.drafter, drafted.target.slot
    backlog, sampler = Backlog(forwards, drafter), Sampler(SamplingOptions(), PROMPT, n_vocab=768)
    propose = drafter.propose

    def spy(anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        seen.append((n_past, propose(anchor, n_past, n_drafts, sampler)))
        return seen[-1][1]

    slot.reset()
    backlog.begin()
    for start in range(0, len(PROMPT), CHUNK):
        part = PROMPT[start : start + CHUNK]
        backlog.make_room(len(part))
        logits = forwards.prefill(slot, part, "last", capture=True)
        backlog.add(part, slot.n_past)
        slot.commit(len(part))
    assert logits is not None
    tokens = [sampler.pick(logits[0])]
    with ExitStack() as stack:
        drafter.propose = spy  # type: ignore[method-assign]
        stack.callback(delattr, drafter, "propose")
        speculation = Speculation(forwards, drafter, sampler, backlog=backlog, control=Bursts(8))
        for run in speculation.runs(slot, tokens[0], forwards.n_ctx):
            tokens += [chosen.token for chosen in run]
            if len(tokens) >= n:
                break
    return tokens[:n]


def plain(drafted: Drafted, n: int) -> list[int]:
    """The greedy answer to PROMPT without drafts."""
    forwards, slot = drafted.forwards, drafted.target.slot
    slot.reset()
    for start in range(0, len(PROMPT), CHUNK):
        part = PROMPT[start : start + CHUNK]
        logits = forwards.prefill(slot, part, "last")
        slot.commit(len(part))
    assert logits is not None
    tokens = [int(np.argmax(logits[0]))]
    while len(tokens) < n:
        row = forwards.decode(slot, tokens[-1])
        slot.commit(1)
        tokens.append(int(np.argmax(row)))
    return tokens


@DRAFTERS
def test_bursts_of_plain_steps_change_neither_text_nor_proposals(
    target: Target, name: str, tmp_path: Path
) -> None:
    n = sum(BURSTS) + len(BURSTS)
    with drafting(target, name, tmp_path) as drafted:
        expected = plain(drafted, n)
        seen: list[tuple[int, Proposal]] = []
        assert answer(drafted, n, seen) == expected
        assert len(seen) >= len(BURSTS) - 1
        text = [*PROMPT, *expected]
        for n_past, proposal in seen:
            Backlog(drafted.forwards, drafted.drafter).begin()
            drafted.target.slot.reset()
            drafted.feed(text[:n_past])
            again = drafted.drafter.propose(text[n_past], n_past, len(proposal.tokens), None)
            assert again.tokens == proposal.tokens


@DRAFTERS
def test_what_waits_is_taken_in_as_if_it_had_been_shown_at_once(
    target: Target, name: str, tmp_path: Path
) -> None:
    """Pieces of a prompt, all of them before the drafter is asked, or each as it comes."""
    with drafting(target, name, tmp_path) as drafted:
        forwards, slot = drafted.forwards, drafted.target.slot

        def propose_after(pieces: Sequence[int], *, wait: bool) -> Proposal:
            backlog = Backlog(forwards, drafted.drafter)
            slot.reset()
            backlog.begin()
            for n in pieces:
                part = PROMPT[slot.n_past : slot.n_past + n]
                backlog.make_room(n)
                forwards.prefill(slot, part, "none", capture=True)
                backlog.add(part, slot.n_past)
                slot.commit(n)
                if not wait:
                    backlog.take()
            backlog.take()
            assert forwards.recorded[0] == 0
            return drafted.drafter.propose(5, slot.n_past, 7, None)

        for pieces in ([1], [1, 1, 1], [5, 20, 1, 38], [40, 30], [64, 6], [1] * 66):
            assert propose_after(pieces, wait=True).tokens == propose_after(pieces, wait=False).tokens


def test_a_gap_in_the_text_is_noticed(target: Target, tmp_path: Path) -> None:
    with drafting(target, "mtp", tmp_path) as drafted:
        backlog: Any = Backlog(drafted.forwards, drafted.drafter)
        backlog.begin()
        backlog.add([1, 2], 0)
        with pytest.raises(AssertionError, match="gap"):
            backlog.add([4], 3)
