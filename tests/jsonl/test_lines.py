"""Lines of an input: where they end, how they are called, and what can be wrong with them."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest

from pyggml_dflash.jsonl import lines as module
from pyggml_dflash.jsonl.lines import Format, Task, TaskReader, find_format, read_lines


def tasks(data: bytes, format: Format = "jsonl") -> list[Task]:
    reader = TaskReader(format)
    return [reader.read(line) for line in read_lines(io.BytesIO(data))]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        (b" a \n\tb", [" a ", "\tb"]),
        ("a\u2028b\x85c\x0bd\n".encode(), ["a\u2028b\x85c\x0bd"]),
    ],
)
def test_a_line_ends_at_a_line_feed_only(data: bytes, expected: list[str]) -> None:
    assert [task.value for task in tasks(data, "text")] == expected
    assert [task.number for task in tasks(data, "text")] == [*range(1, len(expected) + 1)]


def test_a_line_has_the_same_digest_however_it_ends() -> None:
    digests = {tasks(data, "text")[0].digest for data in (b"a", b"a\n", b"a\r\n", b"a\nb")}
    assert len(digests) == 1
    assert tasks(b"b", "text")[0].digest not in digests


def test_lines_are_read_from_the_beginning_each_time() -> None:
    file = io.BytesIO(b"a\nb\n")
    assert [line.data for line in read_lines(file)] == [line.data for line in read_lines(file)]


BAD = [
    (b"", "empty_line", "the line is empty"),
    (b"  \t", "empty_line", "the line is empty"),
    (b"garbage", "invalid_json", "the line is not JSON: Expecting value"),
    (b'{"prompt": "a"', "invalid_json", "the line is not JSON"),
    (b'{"prompt": "a"} x', "invalid_json", "the line is not JSON: Extra data"),
    (b'{"prompt": NaN}', "invalid_json", "NaN is no number of JSON"),
    (b'{"prompt": 1e999}', "invalid_json", "1e999 is larger than a number can be here"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "'prompt' stands twice in one object"),
    (b'{"x": ' + b"9" * 5000 + b"}", "invalid_json", "the line is not JSON"),
    (b"[" * 100_000, "invalid_json", "the line is nested too deeply"),
    (b'["a"]', "invalid_json", "the line holds a list; a request is an object"),
    (b'"a"', "invalid_json", "the line holds a string"),
    (b"5", "invalid_json", "the line holds a number"),
    (b"null", "invalid_json", "the line holds null"),
    (b'{"prompt": "\xff"}', "invalid_encoding", "the line is not UTF-8: byte 12 is 0xff"),
    (b'{"custom_id": 5, "prompt": "a"}', "invalid_value", "custom_id is 5; it must be text"),
    (b'{"custom_id": "", "prompt": "a"}', "invalid_value", "custom_id is ''"),
    (json.dumps({"custom_id": "x" * 513}).encode(), "invalid_value", "custom_id is 'xxx"),
]


@pytest.mark.parametrize(("data", "code", "message"), BAD)
def test_what_is_wrong_with_a_line_is_told_and_the_next_is_read(data: bytes, code: str, message: str) -> None:
    bad, good = tasks(data + b'\n{"prompt": "a"}\n')
    assert bad.problem is not None
    assert (bad.problem.status, bad.problem.code) == (400, code)
    assert message in bad.problem.message
    assert (bad.custom_id, good.custom_id) == ("line-1", "line-2")
    assert good.problem is None
    assert good.value == {"prompt": "a"}


def test_text_may_hold_anything_but_bytes_that_are_no_text() -> None:
    found = tasks(b'{"prompt": \n\n\xc3\nnull', "text")
    assert [task.value for task in found] == ['{"prompt": ', "", "", "null"]
    assert [task.problem and task.problem.code for task in found] == [
        None,
        "empty_line",
        "invalid_encoding",
        None,
    ]


def test_a_huge_line_is_refused_without_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 64)
    for n, fits in [(63, True), (64, True), (65, False), (2**21 + 7, False)]:
        found = tasks(b"x" * n + b"\nshort", "text")
        assert [task.problem is None for task in found] == [fits, True]
        assert found[1].value == "short"
    first, second = tasks(b"x" * 99 + b"1\n" + b"x" * 99 + b"2", "text")
    assert first.problem is not None
    assert (first.problem.code, first.problem.message) == (
        "line_too_long",
        "the line is longer than 64 bytes",
    )
    assert first.digest != second.digest


def test_a_name_can_be_taken_once() -> None:
    ids = ['{"custom_id": "a"}', '{"custom_id": "line-4"}', '{"custom_id": "a"}', "{}", '{"custom_id": "b"}']
    found = tasks("\n".join(ids).encode())
    assert [task.custom_id for task in found] == ["a", "line-4", "a", "line-4", "b"]
    told = [None if task.problem is None else task.problem.message for task in found]
    assert told == [
        None,
        None,
        "custom_id 'a' is that of line 1 already; each line needs its own",
        "custom_id 'line-4' is that of line 2 already; each line needs its own",
        None,
    ]


@pytest.mark.parametrize(
    ("name", "data", "format"),
    [
        ("a.jsonl", b"text", "jsonl"),
        ("a.NDJSON", b"text", "jsonl"),
        ("a.txt", b'{"prompt": "a"}', "text"),
        ("a", b'{"prompt": "a"}', "jsonl"),
        ("a", b'\xef\xbb\xbf\n \n {"prompt": "a"}', "jsonl"),
        ("a.prompts", b"Tell me\n{", "text"),
        ("a", b"", "text"),
    ],
)
def test_a_name_tells_the_format_and_else_the_first_line(name: str, data: bytes, format: str) -> None:
    assert find_format(Path(name), io.BytesIO(data)) == format


def test_a_task_can_be_sent_to_another_process() -> None:
    for task in tasks(b'{"prompt": "a"}\ngarbage'):
        assert pickle.loads(pickle.dumps(task)) == task
