"""The comparison of servers: both sides get the same load, and what cannot be compared is refused."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner
from http_load import Server, ServerError
from rich.console import Console
from server import Load, as_json, as_table, bodies, main, ours_server, take_turns

from pyggml_dflash.engine.assembly import DEFAULT_MODEL

LOAD = Load(
    model=DEFAULT_MODEL,
    clients=(1, 2),
    n_requests=2,
    n_words=8,
    n_answer=4,
    n_ctx=256,
    chunk=256,
    threads=1,
    device="CPU",
)


def test_both_sides_answer_the_same_requests() -> None:
    with ours_server(LOAD) as server:
        sides = take_turns({"ours": server, "peer": server}, LOAD, 2, lambda _: None)
        with pytest.raises(ServerError, match=r"answered 400.*max_tokens"):
            server.whole({"prompt": "A", "max_tokens": 0})
    report = as_json(LOAD, sides)
    assert report["equal_answers"] == 12  # of one and of two clients, twice in each of two turns
    for n in LOAD.clients:
        ours, peer = (report["figures"][side][n] for side in ("ours", "peer"))
        assert (ours["n_answers"], ours["n_tokens"]) == (peer["n_answers"], peer["n_tokens"])
        assert ours["n_answers"] == 4 * n
        assert all(len(side[figure]["all"]) == 2 for side in (ours, peer) for figure in report["ratio"][n])
        assert ours["first_text_ms"]["low"] > 0
    console = Console(width=200)
    with console.capture() as text:
        console.print(as_table(LOAD, sides))
    assert "of 12 answers 0 ended before, and 12 are equal;" in " ".join(text.get().split())


def test_no_prompt_begins_like_another() -> None:
    endless = bodies(LOAD)
    starts = {next(endless)["prompt"].split()[0] for _ in range(200)}
    assert len(starts) == 200


def test_an_interpreter_without_the_peers_server_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    result = CliRunner().invoke(main, ["--peer-python", str(tmp_path / "bin" / "python")])
    assert result.exit_code == 1
    assert "No module named 'llama_cpp'" in result.output
    assert "-m pip install uvicorn" in result.output


def test_a_server_that_does_not_start_is_told_with_its_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyggml_dflash", "serve", str(tmp_path / "none.gguf"), "--port", "PORT"]
    with (
        pytest.raises(ServerError, match=r"it ended with status 3:\n.*none.gguf"),
        Server("it", command, os.environ),
    ):
        pass
