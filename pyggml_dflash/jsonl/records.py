"""One line of an output file: a record of OpenAI's batch output. Layer 8.

Its `id` says which input line it answers, that line's digest, and a digest of the settings it was answered
with, so that a run that is taken up again can tell whether it is still the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from pyggml_dflash.jsonl.lines import DIGEST_CHARS, Task
from pyggml_dflash.jsonl.problems import LineProblem

START: Final = b'{"id": "batch_req_'
_ID: Final = re.compile(
    rf"batch_req_(?P<number>[1-9][0-9]{{0,17}})_(?P<line>[0-9a-f]{{{DIGEST_CHARS}}})"
    rf"_(?P<settings>[0-9a-f]{{{DIGEST_CHARS}}})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that is ready to be written, and what to count of it."""

    number: int
    data: bytes  # ASCII, with the line feed
    failed: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a record in a file tells about itself."""

    number: int
    digest: str
    settings: str
    failed: bool


def digest_of(**settings: Any) -> str:
    """A digest of values that JSON or a dataclass can hold."""
    text = json.dumps(settings, sort_keys=True, default=asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def answered(task: Task, settings: str, body: Mapping[str, Any]) -> Record:
    """The record of a line that has its answer."""
    usage = body["usage"]
    return Record(
        number=task.number,
        data=_data(task, settings, 200, body, None),
        failed=False,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def failed(task: Task, settings: str, problem: LineProblem) -> Record:
    """The record of a line that has none."""
    data = _data(task, settings, problem.status, problem.body, problem.error)
    return Record(number=task.number, data=data, failed=True)


def _data(
    task: Task, settings: str, status: int, body: Mapping[str, Any], error: Mapping[str, str] | None
) -> bytes:
    name = f"{task.number}_{task.digest}_{settings}"
    record = {
        "id": f"batch_req_{name}",
        "custom_id": task.custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": error,
    }
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def read_record(data: bytes) -> Written | None:
    """What a line of an output file is; None if it is no whole record."""
    try:
        record = json.loads(data)
        match = _ID.fullmatch(record["id"])
        has_error = record["error"] is not None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if match is None:
        return None
    return Written(
        number=int(match["number"]), digest=match["line"], settings=match["settings"], failed=has_error
    )
