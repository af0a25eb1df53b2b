"""Speculative decoding gives the target's own tokens: with random, fitted and perfect drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.arch.dflash_config import draft_tensors, read_draft_config
from pyggml_dflash.engine.dflash_drafter import DFlashDrafter
from pyggml_dflash.engine.drafting import Drafter, Proposal
from pyggml_dflash.engine.graphs import Forwards, Recording
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.speculate import Speculation
from pyggml_dflash.engine.width import BURST, VerifyWidth
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.weights import LoadedWeights, check_tensors, place_weights
from pyggml_dflash.options import SamplingOptions
from tests.drafts.drafted import arrays, draft_file
from tests.reference.opened import Parts, assembled, on_the_cpu
from tests.reference.stored import model_file

F32 = ElementType.F32
UPDATES: tuple[StateUpdate, ...] = ("snapshots", "replay")
PROMPTS = [np.random.default_rng(seed).integers(0, 750, 3 + 29 * seed).tolist() for seed in range(4)]


class Scripted:
    """Proposes what it is told, right or wrong, and checks that it is shown every committed token."""

    name = "scripted"
    capture = Capture()
    max_drafts = 7

    def __init__(self, text: Sequence[int], n_prompt: int, wrong_at: int) -> None:
        self._text, self._n_prompt, self._wrong_at = text, n_prompt, wrong_at
        self.n_seen = 0

    def begin(self) -> None:
        self.n_seen = 0

    def observe(self, tokens: Sequence[int], n_past: int) -> None:
        assert n_past == self.n_seen
        self.n_seen += len(tokens)

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        at = n_past - self._n_prompt
        assert self._text[at] == anchor
        drafts = [*self._text[at + 1 : at + 1 + n_drafts]]
        drafts += [0] * (n_drafts - len(drafts))
        if self._wrong_at < n_drafts:
            drafts[self._wrong_at] = (drafts[self._wrong_at] + 1) % 700
        return Proposal(tuple(drafts))

    def close(self) -> None: ...


@contextmanager
def recording(parts: Parts, capture: Capture, update: StateUpdate) -> Iterator[Forwards]:
    record = Recording(capture=capture, update=update, max_width=8)
    forwards = Forwards(
        parts.backend, parts.ledger, parts.model, parts.slots, chunk=64, host=None, recording=record
    )
    try:
        yield forwards
    finally:
        forwards.close()


@contextmanager
def dflash(parts: Parts, path: Path, update: StateUpdate) -> Iterator[tuple[Forwards, DFlashDrafter]]:
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        config = read_draft_config(file, parts.model.config)
        specs = check_tensors(file, draft_tensors(config, parts.model.config.n_vocab))
        placements = place_weights(file, specs, parts.backend, repack=False)
        weights = LoadedWeights(file, placements, parts.backend, parts.ledger)
        stack.callback(weights.close)
        forwards = stack.enter_context(recording(parts, Capture(layers=config.target_layers), update))
        drafter = DFlashDrafter(parts.backend, parts.ledger, config, weights, forwards, F32, F32)
        stack.callback(drafter.close)
        yield forwards, drafter


def start(parts: Parts, forwards: Forwards, drafter: Drafter, prompt: list[int], sampler: Sampler) -> int:
    """Prefill in chunks, shown to the drafter; the first token."""
    slot = parts.slots.slots[0]
    slot.reset()
    drafter.begin()
    for at in range(0, len(prompt), forwards.chunk):
        part = prompt[at : at + forwards.chunk]
        logits = forwards.prefill(slot, part, "last", capture=True)
        drafter.observe(part, slot.n_past)
        slot.commit(len(part))
    assert logits is not None
    token = sampler.pick(logits[0])
    sampler.accept(token)
    return token


def speculated(
    parts: Parts, forwards: Forwards, drafter: Any, prompt: list[int], n: int, width: int, **sampling: Any
) -> tuple[list[int], Speculation]:
    sampler = Sampler(SamplingOptions(**sampling), prompt, n_vocab=parts.model.config.n_vocab)
    tokens = [start(parts, forwards, drafter, prompt, sampler)]
    speculation = Speculation(forwards, drafter, sampler, width=width)
    for run in speculation.runs(parts.slots.slots[0], tokens[0], forwards.n_ctx):
        tokens += [chosen.token for chosen in run]
        if len(tokens) >= n:
            break
    return tokens[:n], speculation


def plain(parts: Parts, prompt: list[int], n: int, **sampling: Any) -> list[int]:
    sampler = Sampler(SamplingOptions(**sampling), prompt, n_vocab=parts.model.config.n_vocab)
    slot = parts.slots.slots[0]
    slot.reset()
    for at in range(0, len(prompt), parts.forwards.chunk):
        part = prompt[at : at + parts.forwards.chunk]
        rows = parts.forwards.prefill(slot, part, "last")
        slot.commit(len(part))
    assert rows is not None
    logits, tokens = rows[0], []
    while len(tokens) < n:
        tokens.append(sampler.pick(logits))
        sampler.accept(tokens[-1])
        logits = parts.forwards.decode(slot, tokens[-1])
        slot.commit(1)
    return tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    path = model_file("qwen35-tiny", "F32", tmp_path_factory.mktemp("target"))
    with assembled(on_the_cpu(path, max_ctx=1024, flash_attn="off")) as parts:
        yield parts


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("draft", ["dflash-tiny", "dflash-swa-tiny", "dflash2-tiny", "dflash-fitted-tiny"])
def test_greedy_tokens_are_those_of_plain_decoding(
    target: Parts, draft: str, update: StateUpdate, tmp_path: Path
) -> None:
    with dflash(target, draft_file(draft, tmp_path), update) as (forwards, drafter):
        for prompt in PROMPTS:
            expected = plain(target, prompt, 40)
            for width in range(2, drafter.max_drafts + 2):
                found, _ = speculated(target, forwards, drafter, prompt, 40, width)
                assert found == expected, f"width {width}, prompt of {len(prompt)}"


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("wrong_at", range(8))
def test_every_acceptance_length_keeps_the_text(target: Parts, wrong_at: int, update: StateUpdate) -> None:
    prompt = PROMPTS[1]
    expected = plain(target, prompt, 60)
    with recording(target, Capture(), update) as forwards:
        drafter = Scripted(expected, len(prompt), wrong_at)
        found, speculation = speculated(target, forwards, drafter, prompt, 48, 8)
    assert found == expected[:48]
    assert speculation.stats.acceptance_length == wrong_at + 1


@pytest.mark.parametrize("update", UPDATES)
def test_penalties_count_as_in_plain_decoding(target: Parts, update: StateUpdate, tmp_path: Path) -> None:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2}
    with dflash(target, draft_file("dflash-fitted-tiny", tmp_path), update) as (forwards, drafter):
        expected = plain(target, PROMPTS[2], 40, **penalties)
        assert speculated(target, forwards, drafter, PROMPTS[2], 40, 8, **penalties)[0] == expected


def test_sampling_under_penalties_takes_the_same_draws(target: Parts, tmp_path: Path) -> None:
    options = {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5}
    with dflash(target, draft_file("dflash-fitted-tiny", tmp_path), "replay") as (forwards, drafter):
        expected = plain(target, PROMPTS[2], 40, **options)
        assert speculated(target, forwards, drafter, PROMPTS[2], 40, 8, **options)[0] == expected


@pytest.mark.parametrize("run", range(7))
def test_a_stored_run_is_reproduced_round_by_round(target: Parts, run: int, tmp_path: Path) -> None:
    numbers = arrays("dflash-fitted-tiny")
    prompt, expected = numbers[f"s{run}_prompt"].tolist(), numbers[f"s{run}_tokens"].tolist()
    drafts, accepted = numbers[f"s{run}_drafts"], numbers[f"s{run}_accepted"]
    seen: list[tuple[int, ...]] = []
    with dflash(target, draft_file("dflash-fitted-tiny", tmp_path), "replay") as (forwards, drafter):
        propose = drafter.propose

        def spy(*args: Any) -> Proposal:
            proposal = propose(*args)
            seen.append(proposal.tokens)
            return proposal

        drafter.propose = spy  # type: ignore[method-assign]
        n = 1 + int((accepted + 1).sum())
        tokens, speculation = speculated(target, forwards, drafter, prompt, n, 8)
    assert tokens[: len(expected)] == expected
    assert [list(d) for d in seen[: len(drafts)]] == drafts.tolist()
    assert speculation.stats.accepted == accepted.sum()


def test_sampled_drafts_leave_the_targets_distribution(target: Parts, tmp_path: Path) -> None:
    """First token behind the anchor over many seeds, against its distribution in plain decoding."""
    prompt = PROMPTS[1]
    options = {"temperature": 1.5, "top_k": 4}
    with dflash(target, draft_file("dflash2-tiny", tmp_path), "replay") as (forwards, drafter):
        sampler = Sampler(SamplingOptions(**options, seed=0), prompt, n_vocab=target.model.config.n_vocab)
        anchor = start(target, forwards, drafter, prompt, sampler)
        slot = target.slots.slots[0]
        p = sampler.probabilities(forwards.verify(slot, (anchor,))[0])
        counts, n = np.zeros(len(p)), 1500
        for seed in range(n):
            fresh = Sampler(SamplingOptions(**options, seed=seed), prompt, n_vocab=len(p))
            speculation = Speculation(forwards, drafter, fresh, width=4)
            logits_run = speculation.rehearse(slot, anchor, 4)
            counts[logits_run[0].token] += 1
    likely = p > 0
    assert counts[~likely].sum() == 0
    chi_square = float(((counts[likely] - n * p[likely]) ** 2 / (n * p[likely])).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, one in a thousand


def test_the_width_goes_where_tokens_per_second_are() -> None:
    control = VerifyWidth(8)
    for _ in range(200):
        width = control.choose(100)
        control.observe(width, width - 1, 1.0 if width == 1 else 1.0 + 0.1 * width)
    assert control.choose(100) == 8


def test_hopeless_drafts_are_put_aside_for_longer_and_longer() -> None:
    control, widths = VerifyWidth(8), []
    for _ in range(600):
        widths.append(control.choose(100))
        control.observe(widths[-1], 0, 1.0 if widths[-1] == 1 else 3.0)
    assert control.gave_up > 2
    assert np.mean([w == 1 for w in widths[-300:]]) > 0.95
    assert widths[-BURST:].count(1) >= BURST - 1


def test_a_step_never_has_more_rows_than_there_is_room() -> None:
    control = VerifyWidth(16)
    for room in [1, 2, 3, 5, 7, 11, 16, 40] * 20:
        width = control.choose(room)
        assert 1 <= width <= room
        control.observe(width, width - 1, 0.1)
