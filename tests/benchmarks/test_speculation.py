"""The speculation benchmark: its fake drafter, its sums, and a run of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from speculation import main
from speculation_sides import FakeDrafter, Tally

from pyggml_dflash.arch.base import Capture
from pyggml_dflash.requests import GenerationResult, SpeculationStats, Timings, Usage
from tests.engine.tiny import LLAMA


class Like:
    """What a fake takes from the drafter in whose place it is."""

    capture = Capture()
    max_drafts = 7


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.5, 1.0])
def test_fake_drafts_hold_as_often_as_asked(chance: float) -> None:
    fake = FakeDrafter(Like(), chance, 1000)
    text = list(range(500, 900))
    fake.expect(text[:10], text[10:])
    n_right = n = 0
    for n_past in range(10, 390):
        drafts = fake.propose(text[n_past], n_past, 7, None).tokens
        assert len(drafts) == 7
        n_right += sum(a == b for a, b in zip(drafts, text[n_past + 1 :], strict=False))
        n += 7
    assert n_right / n == pytest.approx(chance, abs=0.02)
    assert len(fake.propose(899, 399, 7, None).tokens) == 7


def test_a_tally_adds_answers_up() -> None:
    stats = SpeculationStats(
        drafter="mtp",
        verify_steps=4,
        plain_steps=2,
        drafted=8,
        accepted=5,
        accept_rates=(0.75, 0.5, 0.0),
        steps_by_width={3: 4},
        gave_up=1,
        step_costs={1: 1.0, 3: 1.5},
        draft_s=0.1,
        verify_s=0.2,
        rollback_s=0.3,
        plain_s=0.4,
    )
    answer = GenerationResult(
        text="",
        tokens=tuple(range(12)),
        finish_reason="length",
        usage=Usage(prompt_tokens=1, completion_tokens=12),
        timings=Timings(decode_s=2.0),
        speculation=stats,
        plain_reason="it rains",
    )
    tally = Tally()
    tally.add(answer)
    tally.add(answer)
    assert (tally.n_tokens, tally.rate, tally.reasons) == (22, 5.5, ["it rains"])
    assert (tally.verify_steps, tally.plain_steps, tally.accepted, tally.gave_up) == (8, 4, 10, 2)
    assert tally.seconds["rollback"] == pytest.approx(0.6)
    assert {i: tally.held[i] / tally.tried[i] for i in (1, 2)} == {1: 0.75, 2: 0.5}


def test_a_run_compares_every_side_with_plain_decoding() -> None:
    arguments = [
        "--device",
        "CPU",
        "--threads",
        "1",
        "--tokens",
        "12",
        "--repeat",
        "1",
        "--widths",
        "4",
        "--json",
    ]
    run = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    report = json.loads(run.stdout)
    sides = {side["name"]: side for side in report["sides"]}
    drafting = ("dflash auto", "dflash 4 rows", "dflash 8 rows", "mtp auto", "mtp 4 rows", "fake 5%")
    assert set(sides) == {"plain", *drafting}
    assert (sides["plain"]["ratio"]["median"], sides["plain"]["verify_steps"]) == (1.0, 0)
    for name in ("dflash 8 rows", "mtp 4 rows"):
        assert sides[name]["acceptance_length"] > 2
        assert sides[name]["plain_steps"] < sides[name]["verify_steps"]  # where one token is left to make
        assert 0 < sides[name]["accept_rates"][0] <= 1
    assert all(side["rate"]["median"] > 0 for side in sides.values())
    assert all(sides[name]["equal_answers"] >= 9 for name in drafting)  # but for a near tie


def test_a_run_on_a_model_without_drafts_says_what_is_missing() -> None:
    run = CliRunner().invoke(main, [str(LLAMA), "--device", "CPU"])
    assert run.exit_code == 1
    assert "has no MTP block" in run.output
    assert "give it a draft with --draft" in run.output
