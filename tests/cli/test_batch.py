"""`dflash batch`: one right record for every line, whatever the line, and whatever happens meanwhile."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dflash_cli.main import cli

from pyggml_dflash import Engine, SamplingOptions
from tests.cli.dflash_command import COMMAND, ENDLESS, LIMIT_S, PICO, Outcome, dflash, terminal
from tests.cli.killed_batch import kill_and_resume, records, told, write_lines
from tests.serve.told import told as told_model

LOG = logging.getLogger(__name__)
FOX = "Tell me a story about a shy fox."
USER = [{"role": "user", "content": FOX}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
ONE = ("--threads", "1")  # does not wait for another thread on a busy machine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(max_ctx=512) as opened:
        yield opened


@pytest.fixture
def junk(tmp_path: Path) -> Path:
    """A model that cannot be loaded: what is refused before it is read exits with another code than 3."""
    path = tmp_path / "junk.gguf"
    path.write_bytes(b"GGUFjunk")
    return path


def run(folder: Path, lines: list[Any], *flags: str, name: str = "in.jsonl") -> tuple[Outcome, list[Any]]:
    """Run a batch of lines: text and bytes as they are, everything else as JSON."""
    source, target = folder / name, folder / "out.jsonl"
    data = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    source.write_bytes(b"".join(line + b"\n" for line in data))
    done = here("batch", source, "-o", target, *ONE, *flags)
    return done, records(target) if target.exists() else []


def here(*args: str | Path) -> Outcome:
    """A command in this process; what it says is in `err`."""
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, "", done.output)


def body(record: dict[str, Any]) -> dict[str, Any]:
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    return dict(record["response"]["body"])


def content(record: dict[str, Any]) -> str:
    return str(body(record)["choices"][0]["message"]["content"])


def test_every_form_of_a_line_gets_the_answer_that_the_engine_gives(tmp_path: Path, engine: Engine) -> None:
    url = "/v1/chat/completions"
    done, found = run(
        tmp_path,
        [
            {"custom_id": "x", "method": "POST", "url": url, "body": {"model": "pico", "messages": USER}},
            {"prompt": FOX, "max_tokens": 7},
            {"messages": USER, "custom_id": "y"},
            {"method": "POST", "url": "/v1/completions", "body": {"prompt": FOX, "n": 2}},
        ],
        *("-n", "5"),
    )
    assert done.code == 0, done.err
    assert [record["custom_id"] for record in found] == ["x", "line-2", "y", "line-4"]
    answer = engine.chat(USER, max_tokens=5)
    assert content(found[0]) == content(found[2]) == answer.text
    assert content(found[1]) == engine.chat(USER, max_tokens=7).text
    first = body(found[0])
    assert (first["object"], first["model"]) == ("chat.completion", "pico")
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"] == {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": answer.usage.prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": first["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }
    raw = engine.generate(FOX, max_tokens=5)
    assert body(found[3])["object"] == "text_completion"
    assert [choice["text"] for choice in body(found[3])["choices"]] == [raw.text] * 2
    assert body(found[3])["usage"]["completion_tokens"] == 10
    assert body(found[3])["usage"]["prompt_tokens"] == raw.usage.prompt_tokens


def test_lines_of_text_are_turns_or_with_raw_continued(tmp_path: Path, engine: Engine) -> None:
    done, found = run(tmp_path, [FOX, '{"prompt": '], "-n", "4", "--system", "Be brief.", name="in.txt")
    assert done.code == 0, done.err
    assert "taking the lines of" in done.err
    assert "for plain text" in done.err
    brief = {"role": "system", "content": "Be brief."}
    assert content(found[0]) == engine.chat([brief, *USER], max_tokens=4).text
    done, found = run(tmp_path, [FOX], "-n", "4", "--raw", "--overwrite", name="in.txt")
    assert body(found[0])["choices"][0]["text"] == engine.generate(FOX, max_tokens=4).text


def test_flags_of_form_and_reasoning_hold_for_every_line(tmp_path: Path) -> None:
    lines = [{"prompt": FOX}, {"messages": USER, "regex": "[0-9]{2}"}]
    done, found = run(tmp_path, lines, "--regex", "[A-Z]{4}", "--no-reasoning", "--max-ctx", "512")
    assert done.code == 0, done.err
    assert re.fullmatch("[A-Z]{4}", content(found[0]))
    assert re.fullmatch("[0-9]{2}", content(found[1]))
    budget = ("--reasoning", "--reasoning-budget", "3", "-n", "20", "--logit-bias", "4094=-100")
    done, found = run(tmp_path, [{"prompt": FOX}], *budget, "--overwrite", "--max-ctx", "512")
    assert done.code == 0, done.err
    with Engine.open(max_ctx=512) as engine:
        sampling = SamplingOptions(logit_bias={4094: -100})
        alone = engine.chat(USER, reasoning=True, reasoning_budget=3, max_tokens=20, sampling=sampling)
    assert alone.usage.reasoning_tokens == 3
    message = body(found[0])["choices"][0]["message"]
    assert message["reasoning_content"] in alone.text
    assert message["content"] in alone.text


def test_a_form_that_no_answer_can_have_is_refused_once(tmp_path: Path) -> None:
    done, found = run(tmp_path, [{"prompt": "a"}], "--regex", "(")
    assert (done.code, found) == (2, [])
    assert "regex cannot be used" in done.err
    done, found = run(tmp_path, [{"prompt": "a", "regex": "("}])
    assert (done.code, found[0]["error"]["code"]) == (5, "invalid_value")


def test_calls_are_demanded_hidden_or_one(tmp_path: Path) -> None:
    two = f"Looking:\n{call('first')}\n{call('second')}\nDone."
    model = told_model(tmp_path / "told.gguf", two)
    asked = {"messages": USER, "tools": [TOOL]}
    lines = [
        asked,
        {**asked, "parallel_tool_calls": False},
        {**asked, "tool_choice": "none"},
        {**asked, "tool_choice": "required", "max_tokens": 4},
    ]
    done, found = run(tmp_path, lines, str(model))
    assert done.code == 0, done.err
    both, one, none, demanded = (body(record)["choices"][0] for record in found)
    names = [[c["function"]["arguments"] for c in choice["message"]["tool_calls"]] for choice in (both, one)]
    assert names == [['{"a": "first"}', '{"a": "second"}'], ['{"a": "first"}']]
    assert (both["message"]["content"], one["message"]["content"]) == ("Looking:Done.", "Looking:")
    assert (both["finish_reason"], one["finish_reason"]) == ("tool_calls", "tool_calls")
    assert "tool_calls" not in none["message"]
    assert none["message"]["content"] == two
    assert not demanded["message"]["content"].startswith("Look")  # as it does where it need not call


def call(value: str) -> str:
    parameter = f"<parameter=a>\n{value}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def test_logprobs_have_the_form_of_their_route(tmp_path: Path, engine: Engine) -> None:
    chat = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    plain = {"prompt": FOX, "max_tokens": 3, "logprobs": 2}
    _, found = run(tmp_path, [chat, {"method": "POST", "url": "/v1/completions", "body": plain}])
    expected = engine.chat(USER, max_tokens=3, logprobs=2).logprobs
    tokens = body(found[0])["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in tokens] == [token.logprob for token in expected]
    assert [bytes(token["bytes"]) for token in tokens] == [engine.token_bytes(t.token) for t in expected]
    assert [len(token["top_logprobs"]) for token in tokens] == [2, 2, 2]
    lists = body(found[1])["choices"][0]["logprobs"]
    assert "".join(lists["tokens"]) == body(found[1])["choices"][0]["text"]
    assert lists["text_offset"][0] == 0
    assert [len(best) for best in lists["top_logprobs"]] == [2, 2, 2]
    assert len(lists["token_logprobs"]) == 3


BAD: list[tuple[Any, int, str, str]] = [
    ("garbage", 400, "invalid_json", "the line is not JSON"),
    ("", 400, "empty_line", "the line is empty"),
    (b'{"prompt": "\xff"}', 400, "invalid_encoding", "byte 12 is 0xff"),
    ({"prompt": 5}, 400, "invalid_value", "prompt is 5"),
    ({"prompt": "a", "x": 1}, 400, "invalid_value", "x is not known here"),
    ({"prompt": "x " * 4000}, 400, "context_length_exceeded", "exceeds the context of 512"),
    ({"prompt": "a", "max_tokens": 10**6}, 400, "context_length_exceeded", "1000000 to generate"),
    ({"prompt": "a" * (2**23 + 1)}, 400, "invalid_value", "longer than 8388608 characters"),
    ({"prompt": "\ud800"}, 400, "invalid_value", "a lone surrogate, which is no character"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "invalid_value", "999999"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content is None"),
    ({"messages": [{"content": "a"}]}, 400, "invalid_value", "messages[0].role is missing"),
    ({"messages": [5]}, 400, "invalid_value", "messages[0] is 5"),
    ({"messages": USER, "tools": [{"x": 1}]}, 400, "invalid_value", "tools"),
    ({"messages": USER, "tools": 5}, 400, "invalid_value", "tools is 5"),
    ({"messages": USER, "tools": 0}, 400, "invalid_value", "tools is 0"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model_not_found", "the model 'gpt-4' is not here"),
    ({"custom_id": "first", "prompt": "a"}, 400, "duplicate_custom_id", "that of line 1 already"),
    ({"method": "POST", "url": "/v1/embeddings", "body": {}}, 400, "invalid_url", "/v1/embeddings"),
]


def test_a_bad_line_is_a_record_that_says_why_and_the_next_is_answered(tmp_path: Path) -> None:
    good = {"custom_id": "first", "prompt": "a", "max_tokens": 1}
    lines = [good, *(line for line, *_ in BAD), {"prompt": "b", "max_tokens": 1}]
    done, found = run(tmp_path, lines, "--max-ctx", "512")
    assert done.code == 5, done.err
    assert f"; {len(BAD)} failed" in done.err
    assert len(found) == len(lines)
    assert body(found[0])
    assert body(found[-1])
    for record, (_, status, code, message) in zip(found[1:-1], BAD, strict=True):
        assert record["response"]["status_code"] == status, record
        assert record["error"]["code"] == code
        assert message in record["error"]["message"]
        error = record["response"]["body"]["error"]
        assert (error["code"], error["message"]) == (code, record["error"]["message"])
    assert found[6]["response"]["body"]["error"]["n_ctx"] == 512


def test_a_model_may_be_asked_for_by_its_names(tmp_path: Path) -> None:
    names = ["pico", "pico-q8_0", "pico-q8_0.gguf", "mine", None]
    lines = [{"prompt": "a", "max_tokens": 1, "model": name} for name in names]
    done, found = run(tmp_path, lines, "--model-name", "mine")
    assert done.code == 0, done.err
    assert [body(record)["model"] for record in found] == [*names[:4], "mine"]


@pytest.mark.parametrize("order", ["--ordered", "--unordered"])
def test_records_are_complete_in_both_orders(tmp_path: Path, order: str) -> None:
    lines = [{"prompt": f"{i} foxes", "max_tokens": 9 - i} for i in range(8)]
    done, found = run(tmp_path, lines, order)
    assert done.code == 0, done.err
    names = [record["custom_id"] for record in found]
    expected = [f"line-{i}" for i in range(1, 9)]
    assert (names if order == "--ordered" else sorted(names)) == expected


def test_an_input_without_lines_has_an_output_without_records(tmp_path: Path) -> None:
    done, found = run(tmp_path, [])
    assert (done.code, found) == (0, [])
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    run(tmp_path, [{"prompt": "a", "max_tokens": 1}])
    done, found = run(tmp_path, [], "--overwrite")
    assert (done.code, found) == (0, [])


def refused(*args: str | Path) -> str:
    done = here("batch", *args)
    assert done.code == 2, done
    return done.err


def test_files_are_refused_before_the_model_is_loaded(tmp_path: Path, junk: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert here("batch", source, junk, "-o", target).code == 3
    assert not target.exists()
    there = tmp_path / "there"
    there.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(source)
    cases = [
        ((tmp_path / "no.jsonl", "-o", target), "no.jsonl cannot be read: No such file"),
        ((tmp_path, "-o", target), "is no regular file; a batch reads its lines more than once"),
        ((source, "-o", tmp_path / "no" / "out"), "cannot be written: No such file or directory"),
        ((source, "-o", tmp_path), "is no regular file; records are appended to one"),
        ((source, "-o", "/dev/null"), "/dev/null is no regular file"),
        ((source, "-o", source), "in.jsonl exists; --resume goes on with it"),
        ((source, "-o", source, "--overwrite"), "in.jsonl is the input"),
        ((source, "-o", link, "--resume"), "link is the input"),
        ((source, "-o", there), "there exists; --resume goes on with it, --overwrite starts again"),
        ((source, "-o", there, "--resume"), "line 1 of"),
        ((source, "-o", target, "--resume", "--overwrite"), "--resume and --overwrite contradict"),
        ((source, "-o", target, "--raw", "--system", "x"), "--system works through the chat template"),
        ((source, "-o", target, "-n", "0"), "max_tokens is 0"),
        ((source, "-o", target, "--ray-workers", "2"), "--ray-workers and --ray-gpus need --ray"),
        ((source, "-o", target, "--ray", "local", "--ray-workers", "0"), "ray_workers is 0"),
        ((source, "-o", target, "--ray", ""), "--ray is empty"),
        ((PICO, "-o", target), "is a model; the lines come first, as in: dflash batch IN.jsonl MODEL"),
    ]
    for (first, *rest), message in cases:
        assert message in refused(first, junk, *rest)
    assert there.read_text() == "precious"
    assert source.read_text() == '{"prompt": "a"}\n'
    assert not target.exists()
    assert "Missing option '-o'" in refused(source)


def test_an_output_is_kept_when_the_model_cannot_be_loaded(tmp_path: Path, junk: Path) -> None:
    done, found = run(tmp_path, [{"prompt": "a", "max_tokens": 1}])
    again = here("batch", tmp_path / "in.jsonl", junk, "-o", tmp_path / "out.jsonl", "--overwrite")
    assert (done.code, again.code) == (0, 3)
    assert records(tmp_path / "out.jsonl") == found


def test_resume_does_what_is_left_and_nothing_twice(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i} foxes", "max_tokens": 2} for i in range(6)]
    done, whole = run(tmp_path, lines, "--unordered")
    target = tmp_path / "out.jsonl"
    kept = [json.dumps(record).encode() + b"\n" for record in whole]
    target.write_bytes(kept[3] + kept[0] + kept[5][:-9])
    done, found = run(tmp_path, lines, "--resume", "--unordered")
    assert done.code == 0, done.err
    assert found[:2] == [whole[3], whole[0]]
    assert sorted(map(told, found)) == sorted(map(told, whole))
    before = target.read_bytes()
    done, _ = run(tmp_path, lines, "--resume", "--unordered")
    assert (done.code, target.read_bytes()) == (0, before)
    assert done.err.endswith(f"each of 6 lines has its record in {target}; 0 failed\n")


def test_resume_refuses_what_would_mix_two_batches(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i} foxes", "max_tokens": 2} for i in range(3)]
    run(tmp_path, lines)
    before = (tmp_path / "out.jsonl").read_bytes()
    cases: list[tuple[list[Any], tuple[str, ...], str]] = [
        ([*lines[:2], {"prompt": "other"}], (), "line 3 of {source} is not the one that {target} has"),
        (lines[:2], (), "{target} has a record of line 3; {source} has 2 lines"),
        (lines, ("--temperature", "1"), "line 1 of {target} was answered with another model or other"),
        (lines, ("--cache-type-k", "f32"), "line 1 of {target} was answered with another model or other"),
        (lines, ("--raw",), "line 1 of {target} was answered with another model or other"),
    ]
    for changed, flags, message in cases:
        done, _ = run(tmp_path, changed, "--resume", *flags)
        assert done.code == 2
        assert message.format(source=tmp_path / "in.jsonl", target=tmp_path / "out.jsonl") in done.err
    unordered = before.splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(unordered[1])
    done, _ = run(tmp_path, lines, "--resume")
    assert "are not in order; go on with --unordered" in done.err
    done, found = run(tmp_path, [*lines, {"prompt": "more", "max_tokens": 1}], "--resume", "--unordered")
    assert (done.code, len(found)) == (0, 4)


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short = [json.dumps({"prompt": f"{i} foxes", "max_tokens": 1}) for i in range(3)]
    source.write_text("\n".join([*short, *['{"prompt": "a", "max_tokens": 7000}'] * 3]))
    command = [*COMMAND, "batch", str(source), "-o", str(target), *ENDLESS, "--max-ctx", "8192", *ONE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + LIMIT_S
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert b"3 lines are left, --resume goes on" in err
    assert len(records(target)) == 3
    source.write_text("\n".join([*short, '{"prompt": "a", "max_tokens": 1}']))
    done = dflash(*command[len(COMMAND) :], "--resume")
    assert done.code == 0, done.err
    assert [record["custom_id"] for record in records(target)] == [f"line-{i}" for i in range(1, 5)]


def test_a_terminal_shows_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{i} foxes\n" for i in range(40)))
    with terminal("batch", str(source), "-o", str(tmp_path / "out"), "-n", "20", *ONE) as shown:
        shown.wait_for("/40\x1b[0m lines, ")
        shown.wait_for(" t/s")
        assert shown.wait() == 0
    assert "40 records in " in shown.shown


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done, found = run(tmp_path, [{"prompt": "a", "max_tokens": 1}], "--quiet")
    assert (done.code, done.err, len(found)) == (0, "", 1)


def test_a_batch_that_is_killed_and_resumed_has_one_right_record_per_line(tmp_path: Path) -> None:
    check_kills(tmp_path, 60, "--ordered", n_kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["--ordered", "--unordered"])
def test_a_long_batch_that_is_killed_ten_times_has_one_right_record_per_line(
    tmp_path: Path, order: str
) -> None:
    check_kills(tmp_path, 1000, order, n_kills=10)


def check_kills(folder: Path, n: int, order: str, *, n_kills: int) -> None:
    """Compare a batch that is killed with one that is not."""
    source, target, whole = folder / "in.jsonl", folder / "out.jsonl", folder / "whole.jsonl"
    bad = write_lines(source, n, seed=n)
    flags = ("--max-ctx", "512", *ONE)
    assert dflash("batch", str(source), "-o", str(whole), *flags).code == 5
    kills = kill_and_resume(
        source, target, order, *flags, "--slots", "3", n_kills=n_kills, seed=f"{n} {order}"
    )
    LOG.info("%s: killed with %s", order, kills)
    assert len(kills) == n_kills
    assert all(kill.n_added > 0 for kill in kills)  # each of them in the middle of its work
    found = records(target)
    if order == "--unordered":
        found.sort(key=lambda record: int(record["id"].split("_")[2]))
    assert [told(record) for record in found] == [told(record) for record in records(whole)]
    assert {i for i, record in enumerate(found, 1) if record["error"]} == bad
    assert len(found) == n
