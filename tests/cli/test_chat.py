"""`dflash chat`: turns and commands over a pipe, keys in a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dflash_cli.chat import HELP, LEAVING

from pyggml_dflash import Engine
from tests.cli.dflash_command import ENDLESS, dflash, terminal
from tests.engine.tiny import QWEN3

FEW = ("-n", "5", "--threads", "1")


def lines(*texts: str) -> str:
    return "".join(text + "\n" for text in texts)


def answers(*questions: str, system: str | None = None) -> list[str]:
    """What the engine itself says, turn by turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    with Engine.open(threads=1) as engine:
        for question in questions:
            messages.append({"role": "user", "content": question})
            found.append(engine.chat(messages, max_tokens=5).text)
            messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_each_line_is_a_turn_of_one_conversation() -> None:
    questions = ("Tell me a bedtime story.", "What do bears eat?")
    done = dflash("chat", *FEW, stdin=lines(*questions))
    assert done.code == 0
    assert done.out == lines(*answers(*questions))
    assert done.err.splitlines()[-1].startswith("dflash: pico with dflash on CPU, context 8192 tokens")


def test_bye_leaves_and_empty_lines_say_nothing() -> None:
    for name in LEAVING:
        done = dflash("chat", *FEW, "--quiet", stdin=lines("", "  ", name, "never read"))
        assert (done.code, done.out, done.err) == (0, "", "")
        assert name in f"{HELP}"


def test_commands_work_on_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    script = lines(
        "/stats",
        "/regen",
        "/system You are kind.",
        "What do bears eat?",
        "/regen",
        "/stats",
        f"/save {path}",
        "/clear",
        "/stats",
        f"/load {path}",
        "/system",
        "/save",
        "/dance now",
        "/help",
    )
    done = dflash("chat", *FEW, "--spec", "off", "--quiet", stdin=script)
    (answer,) = answers("What do bears eat?", system="You are kind.")
    assert done.code == 0
    assert done.out == lines(answer, answer)
    assert json.loads(path.read_text()) == [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "What do bears eat?"},
        {"role": "assistant", "content": answer},
    ]
    told = [line.removeprefix("dflash: ") for line in done.err.splitlines()]
    assert told[:4] == [
        "0 messages; no answer yet; context of 8192 tokens",
        "error: there is no message to answer",
        "system message: You are kind.",
        "the answer will be the same: give --temperature, and no --seed, for another one",
    ]
    assert told[4].startswith("2 messages; ")
    assert told[5].endswith("finish: length")
    assert told[6:8] == [f"saved 3 messages to {path}", "the conversation is empty"]
    assert told[8].startswith("0 messages; ")
    assert told[10:13] == [
        f"loaded 3 messages from {path}",
        "system message: You are kind.",
        "error: /save needs the name of a file",
    ]
    assert told[13].startswith("error: /dance is no command; there are /clear, /regen,")
    assert [line.split()[0] for line in told[14:]] == [
        "/clear", "/regen", "/stats", "/save", "/load", "/spec", "/system", "/help", "/bye"
    ]  # fmt: skip


def test_drafting_is_set_in_the_conversation_and_changes_no_answer() -> None:
    script = lines(
        "/spec",
        "What do bears eat?",
        "/spec off",
        "/regen",
        "/spec mtp 4",
        "/regen",
        "/stats",
        "/spec 5",
        "/spec auto",
        "/spec dflash",
        "/regen",
    )
    done = dflash("chat", *FEW, "--quiet", stdin=script)
    assert done.code == 0
    assert done.out == 4 * lines(*answers("What do bears eat?"))
    told = [line.removeprefix("dflash: ") for line in done.err.splitlines() if "will be the same" not in line]
    assert told[:4] == [
        "drafts by dflash (pico-dflash-q8_0.gguf), as many rows as pay per verify step",
        "no drafts: switched off; /spec auto drafts with dflash again",
        "loading the model again, with --spec mtp",
        "drafts by mtp, 4 rows per verify step",
    ]
    assert "; mtp " in told[5]
    assert " drafts accepted; by position " in told[6]
    assert told[7].startswith("verify steps: ")
    assert told[8].startswith("time: draft ")
    assert told[9:] == [
        "error: 5 rows are too many; this engine verifies at most 4",
        "drafts by mtp, 4 rows per verify step",
        "loading the model again, with --spec dflash",
        "drafts by dflash (pico-dflash-q8_0.gguf), as many rows as pay per verify step",
    ]


def test_a_model_without_drafts_says_so_and_keeps_answering() -> None:
    script = lines(
        "/spec",
        "/spec mtp",
        "/spec dflash",
        "/spec auto",
        "/spec sideways",
        "/spec 1",
        "/spec off 4 4",
        "Hello",
    )
    done = dflash("chat", str(QWEN3), "-n", "3", "--threads", "1", "--quiet", stdin=script)
    assert done.code == 0
    nothing = "no drafts: no draft was given and the file has no MTP block"
    told = [line.removeprefix("dflash: ") for line in done.err.splitlines()]
    assert told == [
        nothing,
        "loading the model again, with --spec mtp",
        f"error: spec is 'mtp'; {QWEN3} has no MTP block: use 'auto' or 'off', or name its file as draft",
        "error: spec is 'dflash'; it needs a draft",
        nothing,
        "error: 'sideways' is neither one of auto, off, dflash, mtp nor a number of rows",
        "error: spec_width is 1; it must be a whole number of at least 2 and at most 16, or 'auto'",
        "error: /spec takes one of auto, off, dflash, mtp and a number of rows; 'off 4 4' has more",
    ]


def test_a_loaded_question_is_answered_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": "What do bears eat?"}]))
    done = dflash("chat", *FEW, "--quiet", stdin=lines(f"/load {path}", "hello?", "/regen"))
    assert done.out == lines(*answers("What do bears eat?"))
    assert "the last one has no answer yet: /regen gives it" in done.err
    assert "error: the last message has no answer yet" in done.err


def test_a_message_that_does_not_fit_is_told_and_not_kept() -> None:
    done = dflash(
        "chat", *FEW, "--max-ctx", "64", "--quiet", stdin=lines(" fox" * 80, "/stats", "What do bears eat?")
    )
    assert done.code == 0
    assert done.out == lines(*answers("What do bears eat?"))
    assert "exceed the context of 64" in done.err
    assert "0 messages; no answer yet" in done.err


def test_bytes_that_are_no_text_are_told_and_the_session_goes_on() -> None:
    done = dflash("chat", *FEW, "--quiet", stdin=b"caf\xe9\nWhat do bears eat?\n")
    assert done.code == 0
    assert done.out == lines(*answers("What do bears eat?"))
    assert done.err.startswith("dflash: error: ")


@pytest.mark.parametrize("args", [(), ("--draft", "no/draft.gguf")])
def test_a_model_file_that_is_missing_exits_3_whatever_else_is(args: tuple[str, ...]) -> None:
    done = dflash("chat", *args, "no/such.gguf")
    assert (done.code, done.out, done.err) == (3, "", "dflash: error: no/such.gguf does not exist\n")


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    with terminal("chat", *ENDLESS) as screen:
        screen.wait_for("> ")
        screen.type("Tell me a story about a shy fox.\n")
        start = screen.wait_for("Once upon a time")
        screen.type("\x03")
        start = screen.wait_for("> ", after=start)
        screen.type("/stats\n")
        start = screen.wait_for("2 messages; ", after=start)
        start = screen.wait_for("finish: cancelled", after=start)
        start = screen.wait_for("> ", after=start)
        start = screen.press_until("\x03", "Ctrl-D leaves", after=start)
        start = screen.wait_for("> ", after=start)
        screen.type("\x04")
        assert screen.wait() == 0
    assert "Traceback" not in screen.shown


def test_a_file_name_that_cannot_be_is_told_and_the_session_goes_on() -> None:
    script = lines(
        "/save " + "x" * 300, "/save ~nosuchuser/x", "/load ~nosuchuser/x", "/save a\0b", "/load /dev/zero"
    )
    done = dflash("chat", *FEW, "--quiet", stdin=script)
    assert done.code == 0
    assert [line.startswith("dflash: error: ") for line in done.err.splitlines()] == [True] * 5
