"""Lines of an input file: where each ends, what is in it, and how it is called. Layer 8.

A line is text up to a line feed, and a carriage return before that is not part of it; the last one needs no
line feed. Digests are of the line's bytes. What is wrong with a line is found here as far as its request need
not be understood for it: no UTF-8, no JSON, no object, empty, huge, a `custom_id` that was there before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from pyggml_dflash.errors import quoted
from pyggml_dflash.jsonl.problems import LineProblem, Refused, refused
from pyggml_dflash.openai.texts import TooDeepError, read_json

Format = Literal["jsonl", "text"]

MAX_LINE_BYTES: Final = 64 * 2**20  # eight times the characters that are tokenized at once
MAX_ID_CHARS: Final = 512
DIGEST_CHARS: Final = 16
_BOM: Final = b"\xef\xbb\xbf"
_SUFFIXES: Final[Mapping[str, Format]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file: its number from 1 on, and its bytes; None where they are more than is read."""

    number: int
    digest: str
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A line as far as it is read: what it says, or what is wrong with it. Can be sent to other processes."""

    number: int
    digest: str
    custom_id: str
    value: Mapping[str, Any] | str = field(default="", repr=False)
    problem: LineProblem | None = None


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """The lines of a file from its beginning. One that is huge is read in pieces and not kept."""
    file.seek(0)
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            yield Line(number, _digest(_rest(file, data)), None)
            continue
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            data = data.removeprefix(_BOM)
        yield Line(number, _digest([data]), data)


def _rest(file: BinaryIO, piece: bytes) -> Iterator[bytes]:
    while piece:
        yield piece
        piece = b"" if piece.endswith(b"\n") else file.readline(2**20)


def _digest(pieces: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()[:DIGEST_CHARS]


def find_format(path: Path, file: BinaryIO) -> Format:
    """What a file's name says its lines are; else JSON where the first line that is not blank begins so."""
    if path.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[path.suffix.lower()]
    data = next((line.data for line in read_lines(file) if line.data is None or line.data.strip()), b"")
    return "jsonl" if data is not None and data.lstrip().startswith(b"{") else "text"


class TaskReader:
    """Reads lines in their order, and remembers which names were taken."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._taken: dict[str, int] = {}  # custom_id -> line number

    def read(self, line: Line) -> Task:
        """The task of the next line."""
        custom_id = f"line-{line.number}"
        value: Mapping[str, Any] | str = ""
        problem = None
        try:
            value = self._value(line)
            if isinstance(value, Mapping):
                custom_id = _custom_id(value.get("custom_id"), custom_id)
            self._take(custom_id, line.number)
        except Refused as error:
            problem, value = error.problem, ""
        return Task(number=line.number, digest=line.digest, custom_id=custom_id, value=value, problem=problem)

    def _value(self, line: Line) -> Mapping[str, Any] | str:
        if line.data is None:
            raise refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            text = line.data.decode()
        except UnicodeDecodeError as error:
            byte = f"byte {error.start} is {line.data[error.start]:#04x}"
            raise refused("invalid_encoding", f"the line is not UTF-8: {byte}") from error
        if not text.strip():
            raise refused("empty_line", "the line is empty")
        return text if self._format == "text" else _json_object(text)

    def _take(self, custom_id: str, number: int) -> None:
        first = self._taken.setdefault(custom_id, number)
        if first != number:
            message = f"custom_id {custom_id!r} is that of line {first} already; each line needs its own"
            raise refused("duplicate_custom_id", message)


def _custom_id(given: object, default: str) -> str:
    if given is None:
        return default
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID_CHARS:
        message = f"custom_id is {quoted(given)}; it must be text of 1 to {MAX_ID_CHARS} characters"
        raise refused("invalid_value", message)
    return given


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = read_json(text)
    except TooDeepError as error:
        raise refused("invalid_json", "the line is nested too deeply") from error
    except ValueError as error:  # of integers with thousands of digits as well
        raise refused("invalid_json", f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise refused("invalid_json", f"the line holds {_KINDS[type(value)]}; a request is an object")
    return value


_KINDS: Final = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_KINDS[type(None)] = "null"
