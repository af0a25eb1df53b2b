"""What the terminal shows: lines, tables and JSON that hold whatever they are given."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dflash_cli.streams import printable
from dflash_cli.ui import drafting_lines, plain, print_json, print_table, rate, say, timings_line

from pyggml_dflash.requests import (
    NOTHING_TO_DRAFT_WITH,
    SWITCHED_OFF,
    GenerationResult,
    SpeculationStats,
    Timings,
    Usage,
)


def result(n_prompt: int, n_completion: int, *, cached: int = 0) -> GenerationResult:
    return GenerationResult(
        text="",
        tokens=(),
        finish_reason="stop",
        usage=Usage(prompt_tokens=n_prompt, completion_tokens=n_completion, cached_tokens=cached),
        timings=Timings(prefill_s=2.0, decode_s=4.0),
    )


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (result(20, 9), "prompt 20 tokens, 10.0 t/s; generated 9 tokens, 2.0 t/s; finish: stop"),
        (
            result(20, 9, cached=10),
            "prompt 20 tokens (10 stored), 5.0 t/s; generated 9 tokens, 2.0 t/s; finish: stop",
        ),
        (result(20, 1), "prompt 20 tokens, 10.0 t/s; generated 1 tokens, - t/s; finish: stop"),
        (result(20, 0), "prompt 20 tokens, 10.0 t/s; generated 0 tokens, - t/s; finish: stop"),
    ],
)
def test_rates_count_what_was_computed(answer: GenerationResult, line: str) -> None:
    assert timings_line(answer) == line


def test_no_time_is_no_rate() -> None:
    assert rate(5, 0.0) == "- t/s"


def test_json_has_no_number_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Report:
        path: Path
        parts: tuple[float, ...]

    print_json({1: Report(Path("a/ü"), (1.5, float("-inf"), float("nan")))})
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert json.loads(shown) == {"1": {"path": "a/ü", "parts": [1.5, None, None]}}
    assert plain(True) is True


def test_columns_are_as_wide_as_their_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([["a", "b"], ["ccc", "10"], ["d", ""]], "<>", indent=" ")
    assert capsys.readouterr().out == " a     b\n ccc  10\n d\n"


def test_nothing_printable_steers_a_terminal() -> None:
    assert printable("a\x1b[2J\n\x9bü") == r"a\x1b[2J\n\x9bü"


def test_a_notice_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J on\nCPU")
    assert capsys.readouterr().err == "dflash: a\\x1b[2J on\\nCPU\n"


def drafted_stats(**changes: Any) -> SpeculationStats:
    usual: dict[str, Any] = {
        "drafter": "dflash",
        "verify_steps": 4,
        "plain_steps": 0,
        "drafted": 28,
        "accepted": 10,
        "accept_rates": (1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0),
        "steps_by_width": {8: 4},
        "gave_up": 0,
        "step_costs": {1: 1.0, 8: 2.0},
        "draft_s": 0.004,
        "verify_s": 0.02,
        "rollback_s": 0.001,
        "plain_s": 0.0,
    }
    return SpeculationStats(**{**usual, **changes})


@pytest.mark.parametrize(
    ("speculation", "reason", "told"),
    [
        (None, None, ""),
        (None, SWITCHED_OFF, ""),
        (None, NOTHING_TO_DRAFT_WITH, ""),
        (
            None,
            "drafting would take 1.0 GiB more than CUDA0 has free",
            "no drafts, since drafting would take 1.0 GiB more than CUDA0 has free; ",
        ),
        (drafted_stats(), None, "dflash 3.50 tokens in each of 4 verify steps; "),
        (
            drafted_stats(verify_steps=0, accepted=0, plain_steps=9),
            "8 rows cost 9.0 plain steps and give 4.2 tokens",
            "dflash 9 plain steps since 8 rows cost 9.0 plain steps and give 4.2 tokens; ",
        ),
        (
            drafted_stats(plain_steps=70, gave_up=3),
            "2 rows cost 1.6 plain steps and give 1.1 tokens",
            "dflash 3.50 tokens in each of 4 verify steps, 70 plain steps since 2 rows cost 1.6 plain steps "
            "and give 1.1 tokens, put aside 3 times; ",
        ),
    ],
)
def test_the_timings_line_tells_how_far_drafts_carried_and_why_not_further(
    speculation: SpeculationStats | None, reason: str | None, told: str
) -> None:
    answer = dataclasses.replace(result(20, 9), speculation=speculation, plain_reason=reason)
    assert timings_line(answer) == (
        f"prompt 20 tokens, 10.0 t/s; generated 9 tokens, 2.0 t/s; {told}finish: stop"
    )


def test_drafting_is_told_by_position_and_by_where_time_went() -> None:
    assert drafting_lines(drafted_stats()) == [
        "10 of 28 drafts accepted; by position 100% 75% 50% 25% 0% 0% 0%",
        "verify steps: 4 of 8 rows",
        "time: draft 4.0 ms, verify 20.0 ms, rollback 1.0 ms, plain steps 0.0 ms",
    ]
    assert drafting_lines(drafted_stats(verify_steps=0)) == [
        "time: draft 4.0 ms, verify 20.0 ms, rollback 1.0 ms, plain steps 0.0 ms"
    ]
