"""`dflash convert-draft`, and drafts by their folders: what is printed, where, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dflash_cli.main import cli

from pyggml_dflash.ggml.gguf import GgufFile
from tests.cli.dflash_command import PICO, dflash
from tests.drafts.published import publish
from tests.reference.stored import model_file


def converted(*args: object) -> Result:
    return CliRunner().invoke(cli, ["convert-draft", *map(str, args)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file("qwen35-tiny", "F32", tmp_path_factory.mktemp("target"))


def test_the_file_and_its_types_are_told(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = converted(publish("dflash-tiny", tmp_path), out, "--target", target, "--type", "q8_0")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: ")
    assert done.stdout.endswith("22 q8_0, 14 f32\n") or done.stdout.endswith("14 f32, 22 q8_0\n")
    with GgufFile.open(out) as file:
        assert file.get_int("general.file_type") == 7


def test_what_was_not_possible_is_said_on_standard_error(tmp_path: Path) -> None:
    done = converted(publish("dflash2-tiny", tmp_path), tmp_path / "out.gguf", "--type", "q8_0")
    assert done.exit_code == 0
    assert "2 matrices have rows that are no whole blocks of q8_0; they are f16" in done.stderr
    assert "the file has no tokenizer" in done.stderr
    assert "dflash:" not in done.stdout
    quiet = converted(tmp_path / "out.gguf", tmp_path / "again.gguf", "--quiet", "--json")
    assert quiet.stderr == ""
    assert json.loads(quiet.stdout)["has_tokenizer"] is False


def test_a_file_is_replaced_with_the_flag_only(tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out.gguf"
    out.write_bytes(b"what was there")
    refused = converted(path, out)
    assert refused.exit_code == 2
    assert refused.output == f"dflash: error: {out} exists; name another file, or ask to overwrite it\n"
    assert converted(path, out, "--overwrite").exit_code == 0
    assert out.read_bytes()[:4] == b"GGUF"


def test_errors_have_their_exit_codes(target: Path, tmp_path: Path) -> None:
    path, out = publish("dflash-tiny", tmp_path), tmp_path / "out.gguf"
    assert converted(path, out, "--type", "q9").exit_code == 2
    assert converted(path, tmp_path).exit_code == 2
    assert converted(tmp_path / "gone", out).exit_code == 3
    assert converted(tmp_path, out).exit_code == 3
    assert converted(target, out).exit_code == 3
    assert converted(path, out, "--target", PICO).exit_code == 3
    assert converted(path, tmp_path / "no" / "out.gguf").exit_code == 3
    assert not out.exists()


def test_run_drafts_with_a_folder_and_says_how_it_was_understood(target: Path, tmp_path: Path) -> None:
    path = publish("dflash-swa-default-tiny", tmp_path)
    answers = []
    for causal in ("auto", "none"):
        flags = ("--draft", str(path), "--draft-causal", causal, "--spec-width", "4", "--json", "--quiet")
        done = dflash("run", str(target), "-p", "hello", "-n", "20", "--threads", "1", *flags)
        assert done.code == 0, done.err
        answers.append(done.json)
    plain = dflash("run", str(target), "-p", "hello", "-n", "20", "--threads", "1", "--json", "--quiet").json
    assert answers[0]["tokens"] == answers[1]["tokens"] == plain["tokens"]
    assert answers[0]["draft"] == {
        "path": str(path),
        "kind": "dflash",
        "block_size": 6,
        "causal": [True, False],
    }
    assert answers[1]["draft"]["causal"] == [False, False]
    assert plain["draft"] is None


@pytest.mark.parametrize("flags", [("--spec", "mtp"), ("--draft-causal", "no")])
def test_a_flag_for_dflash_drafts_needs_one(flags: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["run", str(PICO), "-p", "x", "--draft-causal", "swa", *flags])
    assert done.exit_code == 2
    assert "draft" in done.output
