"""Flags that hold an answer to a schema, a grammar, an expression or a budget of reasoning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.dflash_command import dflash, told

ONE_OR_TWO = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
SCHEMA = json.dumps({**ONE_OR_TWO, "additionalProperties": False})
ASKED = ("run", "-p", "hi", "--quiet", "--threads", "1", "--max-ctx", "256")


def test_a_schema_comes_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("\ufeff" + SCHEMA, encoding="utf-8")
    for given in (SCHEMA, str(path)):
        assert json.loads(told(*ASKED, "--no-reasoning", "--json-schema", given))["n"] in (1, 2)


def test_a_grammar_comes_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "yes.gbnf"
    path.write_text('root ::= "yes" | "no"\n')
    for given in ('root ::= "yes" | "no"', 'start: "yes" | "no"', str(path)):
        assert told(*ASKED, "--raw", "--grammar", given) in ("yes\n", "no\n")


def test_an_expression_is_that_of_the_whole_answer() -> None:
    assert told(*ASKED, "--raw", "--regex", "[A-Z]{4}").strip().isupper()


def test_reasoning_is_counted_and_has_its_budget() -> None:
    flags = ("--reasoning", "--reasoning-budget", "3", "--logit-bias", "4094=-100", "-n", "20", "--json")
    answer = json.loads(told(*ASKED, *flags))
    assert answer["usage"]["reasoning_tokens"] == 3
    assert "</think>" in answer["text"]


def test_every_answer_of_a_conversation_follows() -> None:
    out = told(
        "chat", "--quiet", "--threads", "1", "--max-ctx", "256", "--regex", "(yes|no)!", stdin="a\nb\n"
    )
    assert set(out.split()) <= {"yes!", "no!"}
    assert len(out.split()) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [  # 'run' unless the first is another command
        (("--regex", "a", "--grammar", 'root ::= "a"'), "--grammar and --regex cannot hold at the same time"),
        (
            ("--json-schema", "nowhere.json"),
            "'nowhere.json' is neither a JSON schema nor a file that can be read",
        ),
        (("--json-schema", "{"), "json_schema is no JSON"),
        (("--json-schema", '{"type": "foo"}'), "json_schema cannot be used: Invalid type: foo"),
        (("chat", "--json-schema", '{"type": "foo"}'), "json_schema cannot be used: Invalid type: foo"),
        (("--grammar", "root ::= item"), "nor GBNF: Rule 'item' not found"),
        (("--grammar", "."), "'.' is neither a grammar nor a file that can be read"),
        (("--regex", "("), "regex cannot be used"),
        (("--regex", ""), "is empty"),
        (("--reasoning-budget", "-2"), "reasoning_budget is -2; it must be a whole number of at least -1"),
        (("--reasoning-budget", "few"), "'few' is no whole number"),
        (("chat", "--reasoning", "--reasoning-budget", "0"), "--reasoning contradicts --reasoning-budget 0"),
    ],
)
def test_what_cannot_hold_is_refused_before_anything_is_said(flags: tuple[str, ...], message: str) -> None:
    command, *rest = flags if flags[0] == "chat" else ("run", *flags)
    done = dflash(command, "--max-ctx", "256", "--threads", "1", *rest, stdin="hi\n")
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    done = dflash(*ASKED, "--grammar", str(path))
    assert (done.code, "is not valid UTF-8" in done.err) == (2, True)
    path.write_bytes(b"a" * (4 * 2**18 + 1))
    assert "has more than 1048576 bytes" in dflash(*ASKED, "--grammar", str(path)).err


def test_a_budget_works_through_the_template() -> None:
    done = dflash(*ASKED, "--raw", "--reasoning-budget", "5")
    assert done.code == 2
    assert "--reasoning-budget works through the chat template, which --raw leaves out" in done.err
