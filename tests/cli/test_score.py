"""`dflash score`: the numbers are the engine's, and add up."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash import Engine
from tests.cli.dflash_command import dflash, told

TEXT = "Once upon a time, there was a shy fox.\n"


def test_json_has_every_token_and_the_sums(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    found = dflash("score", "-f", str(path), "--json", "--top", "2").json
    with Engine.open() as engine:
        tokens = engine.tokenize(TEXT)  # the last line break is part of it
        logits = engine.logits(tokens).astype("float64")
    expected = [
        row[token] - row.max() - math.log(np.exp(row - row.max()).sum())
        for row, token in zip(logits[:-1], tokens[1:], strict=True)
    ]
    assert [found["first_token"], *(entry["token"] for entry in found["tokens"])] == tokens
    assert [entry["logprob"] for entry in found["tokens"]] == pytest.approx(expected, abs=1e-4)
    assert found["logprob"] == pytest.approx(sum(expected), abs=1e-3)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-3)
    assert all(len(entry["top"]) == 2 for entry in found["tokens"])
    assert "".join(entry["text"] for entry in found["tokens"]) == TEXT.removeprefix("Once")


def test_the_table_has_a_row_per_token() -> None:
    found = dflash("score", "-p", TEXT, "--json", "--quiet").json
    shown = told("score", "--quiet", stdin=TEXT).splitlines()
    assert shown[0].split() == ["token", "logprob", "prob", "text"]
    assert [int(line.split()[0]) for line in shown[2:-2]] == [entry["token"] for entry in found["tokens"]]
    assert shown[-1].endswith(f"perplexity {found['perplexity']:.4f}")
    assert shown[-3].split()[3:] == [r"'.\n'"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "no text to score"),
        (("-p", "x"), 2, "nothing to score"),
        (("-p", TEXT, "--top", "101"), 2, "101 is not in the range"),
        (("-p", " fox" * 40, "--max-ctx", "32"), 4, "context of 32"),
    ],
)
def test_what_cannot_be_scored_is_refused(args: tuple[str, ...], code: int, message: str) -> None:
    done = dflash("score", *args, "--quiet")
    assert (done.code, done.out) == (code, "")
    assert message in done.err
