"""What the terminal shows: lines, tables and JSON that hold whatever they are given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from dflash_cli.streams import printable
from dflash_cli.ui import plain, print_json, print_table, rate, say, timings_line

from pyggml_dflash.requests import GenerationResult, Timings, Usage


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
        (result(20, 9, cached=10), "prompt 20 tokens, 5.0 t/s; generated 9 tokens, 2.0 t/s; finish: stop"),
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
