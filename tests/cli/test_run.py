"""`dflash run`: where the prompt comes from, what goes to which stream, and how a run ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyggml_dflash import Engine
from tests.cli.dflash_command import PICO, dflash, told

FOX = "Tell me a story about a shy fox."
FEW = ("-n", "6", "--threads", "1")  # one thread does not wait for another on a busy machine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open() as opened:
        yield opened


@pytest.fixture(scope="module")
def fox_text() -> str:
    return told("run", "-p", FOX, *FEW)


def test_without_arguments_the_shipped_model_tells_a_story_and_says_so() -> None:
    done = dflash("run", *FEW)
    assert done.code == 0
    assert done.out.startswith("Once upon a time")
    notice, timings = done.err.splitlines()
    assert (
        notice
        == "dflash: no MODEL given: using the small model that ships with the package (pico and its draft)"
    )
    assert timings.startswith("dflash: prompt 21 tokens, ")
    assert "; generated 6 tokens, " in timings
    assert timings.endswith("; finish: length")


def test_a_prompt_is_the_same_from_a_flag_a_file_and_a_pipe(tmp_path: Path, fox_text: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(FOX + "\n")
    assert told("run", "-f", str(path), *FEW) == fox_text
    assert told("run", *FEW, stdin=FOX + "\r\n") == fox_text
    assert told("run", "-p", "-", *FEW, stdin=FOX) == fox_text


def test_a_flag_wins_over_a_pipe_that_nobody_asked_for(fox_text: str) -> None:
    assert told("run", "-p", FOX, *FEW, stdin="something else") == fox_text


def test_the_default_is_one_turn_of_the_chat_template(engine: Engine, fox_text: str) -> None:
    rendered = engine.render_chat([{"role": "user", "content": FOX}])
    assert told("run", "--raw", *FEW, stdin=rendered) == fox_text


def test_a_prompt_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """B08."""
    done = dflash("run", "-f", str(tmp_path / "prompt.txt"))
    assert (done.code, done.out) == (2, "")
    assert "prompt.txt' does not exist" in done.err


def test_a_system_message_and_reasoning_go_through_the_template(engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FOX}]
    expected = engine.chat(messages, reasoning=True, max_tokens=4)
    done = dflash("run", "-p", FOX, "--system", "Be brief.", "--reasoning", "-n", "4", "--json")
    assert done.json["tokens"] == list(expected.tokens)
    assert done.json["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a prompt has at least one character"),
        (b"ab\xffcd", "is not UTF-8: byte 2 is 0xff"),
    ],
)
def test_a_prompt_that_is_no_text_exits_2(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    done = dflash("run", "-f", str(path))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"dflash: error: {path} {message}\n"


def test_a_model_without_a_prompt_exits_2() -> None:
    done = dflash("run", str(PICO))
    assert (done.code, done.out) == (2, "")
    assert done.err == "dflash: error: no prompt; give one with -p TEXT, -f FILE or through a pipe\n"


def test_json_has_the_answer_and_how_it_came_about(fox_text: str) -> None:
    done = dflash("run", str(PICO), "-p", FOX, *FEW, "--json", "--logprobs", "2", "--quiet")
    found = done.json
    assert (done.code, done.err) == (0, "")
    assert done.out.count("\n") == 1
    assert found["text"] + "\n" == fox_text
    assert (found["finish_reason"], found["stop"], found["seed"]) == ("length", None, None)
    counts = {"prompt_tokens": 21, "completion_tokens": 6, "cached_tokens": 0, "reasoning_tokens": 0}
    assert found["usage"] == counts
    assert found["timings"].keys() == {"queue_s", "prefill_s", "decode_s"}
    assert (found["model"], found["device"], found["n_ctx"]) == ("pico", "CPU", 8192)
    assert found["chunk"] >= 1
    assert [entry["token"] for entry in found["logprobs"]] == found["tokens"]
    assert "".join(entry["text"] for entry in found["logprobs"]) == found["text"]
    for entry in found["logprobs"]:
        assert entry["top"][0] == {key: entry[key] for key in ("token", "text", "logprob")}  # greedy
        assert len(entry["top"]) == 2


def test_the_same_seed_gives_the_same_text() -> None:
    flags = ("run", "-p", FOX, *FEW, "--temperature", "5", "--spec", "off", "--json")
    first = dflash(*flags).json
    again = dflash(*flags, "--seed", str(first["seed"])).json
    assert (again["seed"], again["text"]) == (first["seed"], first["text"])


def test_an_answer_ends_before_a_stop_text(fox_text: str) -> None:
    done = dflash("run", "-p", FOX, "-n", "50", "--stop", "never", "--stop", "on a time", "--json")
    assert done.json["text"] == "Once up"
    assert (done.json["finish_reason"], done.json["stop"]) == ("stop", "on a time")


def test_the_first_stop_text_in_the_answer_wins() -> None:
    assert told("run", "-p", FOX, "-n", "50", "--stop", "time", "--stop", "upon") == "Once \n"


def test_quiet_leaves_standard_error_empty() -> None:
    done = dflash("run", "-p", FOX, "-n", "1", "--quiet")
    assert (done.code, done.err) == (0, "")


def test_what_standard_output_cannot_encode_becomes_a_question_mark() -> None:
    lead_byte = ("--logit-bias", "125=1000")  # half of a character, so U+FFFD
    done = dflash("run", "-p", FOX, "-n", "2", *lead_byte, env={"PYTHONIOENCODING": "ascii"})
    assert (done.code, done.out) == (0, "??\n")


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "fits"),
    [(33, None, False), (32, None, True), (31, None, True), (31, "2", True), (31, "3", False)],
)
def test_a_prompt_is_never_cut_to_fit(
    engine: Engine, n_prompt: int, max_tokens: str | None, fits: bool
) -> None:
    text = " fox" * n_prompt
    assert len(engine.tokenize(text)) == n_prompt
    limit = () if max_tokens is None else ("-n", max_tokens)
    done = dflash("run", "--raw", "-p", text, "--max-ctx", "32", *limit, "--json", "--quiet")
    if fits:
        assert done.code == 0, done.err
        assert done.json["usage"]["prompt_tokens"] == n_prompt
        assert done.json["usage"]["completion_tokens"] == 32 - n_prompt + 1
        assert done.json["finish_reason"] == "length"
    else:
        assert (done.code, done.out) == (4, "")
        assert f"prompt of {n_prompt} tokens" in done.err
        assert "context of 32" in done.err


def test_a_value_that_only_the_model_can_judge_exits_2() -> None:
    done = dflash("run", "-p", FOX, "--logit-bias", "4096=1", "--quiet")
    assert (done.code, done.out) == (2, "")
    assert "4096" in done.err


def test_an_unknown_device_exits_2_with_those_that_exist() -> None:
    done = dflash("run", "-p", FOX, "--device", "abacus")
    assert (done.code, done.out) == (2, "")
    assert "'abacus'" in done.err
    assert "CPU" in done.err


def test_states_are_stored_where_somebody_can_continue_them(tmp_path: Path) -> None:
    """One answer stores none, but in a folder; the next run continues it, and says less was read."""
    folder = ("--kv-cache-dir", str(tmp_path / "states"), "--kv-cache-min-tokens", "1")
    text = FOX * 30
    plain = json.loads(told("run", "-p", text, "--json", *FEW))
    assert plain["reuse"] is None
    found = [json.loads(told("run", "-p", text, "--json", *FEW, *folder)) for _ in range(2)]
    assert [result["reuse"]["tier"] for result in found] == [None, "disk"]
    assert found[1]["usage"]["cached_tokens"] > 100
    assert {result["text"] for result in (plain, *found)} == {plain["text"]}
    done = dflash("run", "-p", text, *FEW, *folder)
    n, n_stored = plain["usage"]["prompt_tokens"], found[1]["usage"]["cached_tokens"]
    assert f"prompt {n} tokens ({n_stored} stored), " in done.err
    none = dflash("run", "--prefix-cache-max-mib", "0", "--kv-cache-dir", str(tmp_path), *FEW)
    assert (none.code, "prefix_cache_max_mib is 0" in none.err) == (2, True)
