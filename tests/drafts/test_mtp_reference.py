"""The MTP block's logits, states and chains are those that Hugging Face transformers computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pyggml_dflash.engine.mtp_drafter import MtpDrafter
from pyggml_dflash.ggml.arena import read
from pyggml_dflash.options import MtpConvention
from tests.drafts.drafted import Arrays, Drafted, Floats, Target, arrays, open_target, rows_of, with_mtp
from tests.reference.qwen4exp import StreamReference
from tests.reference.stored import model_file

EXACT = 3e-3  # of logits with a standard deviation of 4; 2e-4 was measured

NAMES = ("qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")

ROUNDING = 3e-4  # rows one by one or several at a time; 5e-5 was measured


@dataclass(frozen=True, slots=True)
class Run:
    """A model with its block, and its stored numbers."""

    drafted: Drafted
    z: Arrays

    @property
    def tokens(self) -> list[int]:
        """The stored text."""
        found: list[int] = self.z["m_tokens"].tolist()
        return found

    @property
    def next_token(self) -> int:
        """The token that follows the text."""
        return int(self.z["m_next_token"][0])

    def fed(self, n: int, piece: int) -> list[Floats]:
        """Start again, with the first `n` tokens in pieces; the rows that the block reads."""
        self.drafted.begin()
        return self.drafted.feed(self.tokens[:n], piece)

    def step(self, token: int) -> tuple[Floats, Floats]:
        """Logits of the pair of `token` and the last row fed; the row that the next draft step reads."""
        drafter = self.drafted.drafter
        assert isinstance(drafter, MtpDrafter)
        logits = drafter._step(token, self.drafted.target.slot.n_past, own=False)
        return logits.copy(), rows_of(read(drafter._own))[0]


@pytest.fixture(
    scope="module",
    params=[
        (name, flash)
        for name in ("qwen35-tiny", "qwen35moe-tiny", "qwen4exp-tiny")
        for flash in ("off", "on")
    ],
    ids=lambda p: f"{p[0]}-flash_{p[1]}",
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    name, flash_attn = request.param
    path = model_file(name, "F32", tmp_path_factory.mktemp("models"))
    with ExitStack() as stack:
        target = stack.enter_context(open_target(path, flash_attn=flash_attn, mtp=True))
        # The stored numbers of qwen4exp are those of streams that are normalised each on its own.
        yield Run(stack.enter_context(with_mtp(target, convention="per-stream")), arrays(name))


PIECES = pytest.mark.parametrize("piece", [1, 7, 32, 64])


@PIECES
def test_the_block_reads_what_the_head_reads(run: Run, piece: int) -> None:
    found = np.concatenate(run.fed(len(run.tokens), piece))
    np.testing.assert_allclose(found, run.z["m_rows"], rtol=0, atol=EXACT)


@PIECES
def test_logits_and_rows_of_a_pair_are_the_stored_ones(run: Run, piece: int) -> None:
    for k, logits, row in zip(run.z["m_pos"].tolist(), run.z["m_logits"], run.z["m_out_rows"], strict=True):
        run.fed(k + 1, piece)
        token = run.tokens[k + 1] if k + 1 < len(run.tokens) else run.next_token
        found, own = run.step(token)
        np.testing.assert_allclose(found, logits, rtol=0, atol=EXACT)
        np.testing.assert_allclose(own, row, rtol=0, atol=EXACT)


def test_choices_behind_every_token_are_the_stored_ones(run: Run) -> None:
    run.drafted.begin()
    choices = []
    for i, token in enumerate(run.tokens):
        if i:
            choices.append(int(run.step(token)[0].argmax()))
        run.drafted.feed([token])
    clear = run.z["m_margin"] > 2 * EXACT
    np.testing.assert_array_equal(np.array(choices)[clear], run.z["m_argmax"][clear])


@PIECES
def test_a_chain_is_the_stored_one(run: Run, piece: int) -> None:
    run.fed(len(run.tokens), piece)
    drafter, expected = run.drafted.drafter, run.z["m_chain_tokens"].tolist()
    assert isinstance(drafter, MtpDrafter)
    assert list(run.drafted.propose(run.next_token, len(expected)).tokens) == expected
    for i, token in enumerate([run.next_token, *expected[:-1]]):
        logits = drafter._step(token, len(run.tokens) + i, own=i > 0)
        np.testing.assert_allclose(logits, run.z["m_chain_logits"][i], rtol=0, atol=EXACT)


def test_a_shorter_chain_is_the_beginning_of_a_longer_one(run: Run) -> None:
    run.fed(len(run.tokens), 64)
    whole = run.drafted.propose(run.next_token).tokens
    for n in range(len(whole)):
        assert run.drafted.propose(run.next_token, n).tokens == whole[:n]


def test_embedding_rows_from_outside_the_graph_are_the_same(run: Run) -> None:
    with with_mtp(run.drafted.target, gather=True, convention="per-stream") as drafted:
        drafted.begin()
        drafted.feed(run.tokens)
        expected = tuple(run.z["m_chain_tokens"].tolist())
        assert drafted.propose(run.next_token, len(expected)).tokens == expected


def test_rejected_rows_leave_no_trace_in_the_block(run: Run) -> None:
    """Steps of every width and acceptance, across 256 cache rows, with proposals between them."""
    text = run.z["p8_tokens"].tolist()
    steps = [(width, keep) for width in range(2, 9) for keep in range(1, width + 1)]
    run.drafted.begin()
    run.drafted.feed(text[:180])
    found, n_past = [], 180
    for width, keep in steps:
        run.drafted.step(text[n_past : n_past + keep] + [5] * (width - keep), keep)
        n_past += keep
        run.drafted.propose(text[n_past])
        found.append(run.step(text[n_past])[0])
    assert n_past > 256 + max(width for width, _ in steps)
    run.drafted.begin()
    run.drafted.feed(text[:180])
    n_past = 180
    for logits, (_, keep) in zip(found, steps, strict=True):
        run.drafted.feed(text[n_past : n_past + keep])
        n_past += keep
        np.testing.assert_allclose(logits, run.step(text[n_past])[0], rtol=0, atol=ROUNDING)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = model_file("qwen4exp-tiny", "F32", tmp_path_factory.mktemp("models"))
    with open_target(path, mtp=True) as target:
        yield target


@PIECES
def test_with_llama_cpps_convention_its_drivers_numbers_come_out(streams: Target, piece: int) -> None:
    z = arrays("qwen4exp-tiny")
    with with_mtp(streams, convention="llama.cpp") as drafted:
        run = Run(drafted, z)
        for k, logits in zip(z["m_pos"].tolist(), z["m_zero0_logits"], strict=True):
            run.fed(k + 1, piece)
            token = run.tokens[k + 1] if k + 1 < len(run.tokens) else run.next_token
            np.testing.assert_allclose(run.step(token)[0], logits, rtol=0, atol=EXACT)
        run.fed(len(run.tokens), piece)
        expected = tuple(z["m_zero0_chain_tokens"].tolist())
        assert drafted.propose(run.next_token, len(expected)).tokens == expected


@pytest.mark.parametrize("convention", get_args(MtpConvention))
@pytest.mark.parametrize("n", [2, 60, 150])  # pairs choose groups from the 72nd on
def test_every_convention_computes_what_it_says(
    streams: Target, tmp_path: Path, convention: MtpConvention, n: int
) -> None:
    text = arrays("qwen4exp-tiny")["p8_tokens"].tolist()[: n + 1]
    reference = StreamReference(model_file("qwen4exp-tiny", "F32", tmp_path))
    together, first = convention == "all-streams", 0 if convention == "llama.cpp" else 1
    expected = reference.drafts(text, together=together, first=first)[-1]
    with with_mtp(streams, convention=convention) as drafted:
        drafted.begin()
        drafted.feed(text[:-1], 7)
        found, _ = Run(drafted, {}).step(text[-1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)
