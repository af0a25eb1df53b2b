"""The file of records: who holds it, what a crash leaves, and what is never touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyggml_dflash.errors import DflashError, UsageError
from pyggml_dflash.jsonl.lines import Task
from pyggml_dflash.jsonl.output import Existing, OutputFile
from pyggml_dflash.jsonl.problems import LineProblem
from pyggml_dflash.jsonl.records import answered, digest_of, failed, read_record

SETTINGS = digest_of(a=1)
BODY = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "text": "ü\u2028\ud800"}


def task(number: int) -> Task:
    return Task(number=number, digest=f"{number:016x}", custom_id=f"line-{number}")


def good(number: int) -> bytes:
    return answered(task(number), SETTINGS, BODY).data


def bad(number: int) -> bytes:
    return failed(task(number), SETTINGS, LineProblem(400, "empty_line", "the line is empty")).data


def refused(path: Path, existing: Existing = "refuse") -> str:
    with pytest.raises(UsageError) as error:
        OutputFile(path, existing)
    return str(error.value)


def test_a_record_is_one_line_of_ascii_in_the_form_of_a_batch() -> None:
    line = good(7)
    assert line.isascii()
    assert line.index(b"\n") == len(line) - 1
    record = json.loads(line)
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert record["id"] == f"batch_req_7_{7:016x}_{SETTINGS}"
    assert (record["custom_id"], record["error"]) == ("line-7", None)
    assert (record["response"]["status_code"], record["response"]["body"]) == (200, BODY)
    error = json.loads(bad(8))
    assert error["error"] == {"code": "empty_line", "message": "the line is empty"}
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["message"] == "the line is empty"


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path, "refuse") as file:
        file.begin()
        for data in (good(1), bad(2), good(3)):
            file.append(data)
            assert path.read_bytes().endswith(data)
    with OutputFile(path, "resume") as file:
        found = file.read(SETTINGS)
        assert list(found.digests) == [1, 2, 3]
        assert (found.n_failed, found.in_order) == (1, True)
        file.begin()
        file.append(good(4))
    assert path.read_bytes() == good(1) + bad(2) + good(3) + good(4)


@pytest.mark.parametrize("records", [(2, 1), (1, 3), (2,)])
def test_records_that_are_not_those_of_the_first_lines_are_not_in_order(
    tmp_path: Path, records: tuple[int, ...]
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"".join(map(good, records)))
    with OutputFile(path, "resume") as file:
        assert not file.read(SETTINGS).in_order


def test_the_beginning_of_a_record_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole, torn = good(1) + bad(2), good(3)
    for n in (*range(0, len(torn), 7), len(torn) - 1):
        path.write_bytes(whole + torn[:n])
        with OutputFile(path, "resume") as file:
            assert list(file.read(SETTINGS).digests) == [1, 2]
            assert path.read_bytes() == whole + torn[:n]  # nothing changes before it begins
            file.begin()
            file.append(torn)
        assert path.read_bytes() == whole + torn


@pytest.mark.parametrize("tail", [b"\0" * 900, b'{"id": "batch_req_1\0\0\0\0', b'{"id": "batch_req_9"}\n'])
def test_what_a_power_failure_leaves_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(good(1) + tail)
    with OutputFile(path, "resume") as file:
        assert list(file.read(SETTINGS).digests) == [1]
        file.begin()
    assert path.read_bytes() == good(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"my thesis", "line 1 of {} is no record of a batch"),
        (good(1) + b"notes\n", "line 2 of {} is no record of a batch"),
        (b'{"id": "x"}\n' + good(2), "line 1 of {} is no record of a batch"),
        (good(1)[:40] + b"\n" + good(2), "line 1 of {} is no record of a batch"),
        (b"[1]\n", "line 1 of {} is no record of a batch"),
        (b"\n", "line 1 of {} is no record of a batch"),
        (good(1) + good(2) + good(1), "{} has two records of line 1; start again with --overwrite"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "out"
    path.write_bytes(data)
    with OutputFile(path, "resume") as file, pytest.raises(UsageError) as error:
        file.read(SETTINGS)
    assert message.format(path) in str(error.value)
    assert path.read_bytes() == data


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(good(1))
    with OutputFile(path, "resume") as file, pytest.raises(UsageError, match="other settings"):
        file.read(digest_of(a=2))


def test_a_file_that_exists_needs_a_word(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(good(1))
    assert refused(path) == f"{path} exists; --resume goes on with it, --overwrite starts again"
    with OutputFile(path, "overwrite") as file:
        assert path.read_bytes() == good(1)
        file.begin()
        assert path.read_bytes() == b""
    OutputFile(path, "refuse").close()  # nothing is in it
    assert path.exists()


def test_a_file_that_was_made_for_nothing_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path, "refuse"):
        assert path.exists()
    assert not path.exists()


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert refused(fifo) == f"{fifo} is no regular file; records are appended to one"
    assert refused(tmp_path) == f"{tmp_path} is no regular file; records are appended to one"
    assert refused(Path("/dev/null")) == "/dev/null is no regular file; records are appended to one"
    missing = tmp_path / "no" / "out"
    assert refused(missing) == f"{missing} cannot be written: No such file or directory"
    long = tmp_path / ("x" * 300)
    assert refused(long).endswith("cannot be written: File name too long")
    assert "cannot be written: embedded null" in refused(Path("a\0b"))


def test_two_batches_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path, "refuse") as file:
        file.begin()
        assert refused(path, "resume") == f"{path} is being written by another batch"
    OutputFile(path, "resume").close()


def test_a_full_disk_is_an_error_that_keeps_the_records(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "out", "refuse")
    file.begin()
    file.append(good(1))
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file._file.fileno())
    os.close(full)
    with pytest.raises(DflashError, match="No space left on device; it keeps its records") as error:
        file.append(good(2))
    assert error.value.exit_code == 1
    file.close()
    assert (tmp_path / "out").read_bytes() == good(1)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"id": 5, "error": null}', b"[" * 100_000])
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert read_record(data) is None
