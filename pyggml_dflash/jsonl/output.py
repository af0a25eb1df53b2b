"""The file that a batch writes: held by one process, and on the disk record by record. Layer 8.

A record counts when its line feed is there, so a kill at any moment leaves whole records and at most the
beginning of one, which is cut off when the batch is taken up again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Literal

from pyggml_dflash.errors import DflashError, UsageError
from pyggml_dflash.jsonl.records import START, Written, read_record

Existing = Literal["refuse", "resume", "overwrite"]

_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems


@dataclass(slots=True)
class Progress:
    """What an output file has already."""

    digests: dict[int, str] = field(default_factory=dict)  # line number -> digest
    n_failed: int = 0
    in_order: bool = True  # records of the lines 1, 2, 3, ...
    n_bytes: int = 0  # of whole records

    def add(self, record: Written, n_bytes: int) -> None:
        """Count one more record."""
        self.digests[record.number] = record.digest
        self.n_failed += record.failed
        self.in_order = self.in_order and record.number == len(self.digests)
        self.n_bytes += n_bytes


class OutputFile:
    """Appends records; a context manager. Nothing in the file changes before `begin`."""

    def __init__(self, path: Path, existing: Existing) -> None:
        """Open and lock; raises `UsageError` for what cannot be written or must not be."""
        self.path = path
        self._is_new, self._file = _open(path)
        try:
            _lock(self._file, path)
            if existing == "refuse" and self._size:
                raise UsageError(f"{path} exists; --resume goes on with it, --overwrite starts again")
        except BaseException:
            self._file.close()
            raise
        self._n_bytes = 0  # of whole records

    def is_same(self, status: os.stat_result) -> bool:
        """True for the status of this very file."""
        return os.path.samestat(os.fstat(self._file.fileno()), status)

    def read(self, settings: str) -> Progress:
        """The records that are there; `UsageError` where they are not of a batch with these settings."""
        found = Progress()
        for number, data, is_last in self._lines():
            record = read_record(data) if data.endswith(b"\n") else None
            if record is None:
                self._check_torn(number, data, is_last=is_last)
                break
            if record.settings != settings:
                raise UsageError(
                    f"line {number} of {self.path} was answered with another model or other settings; repeat "
                    "those, or start again with --overwrite"
                )
            if record.number in found.digests:
                raise UsageError(
                    f"{self.path} has two records of line {record.number}; start again with --overwrite"
                )
            found.add(record, len(data))
        self._n_bytes = found.n_bytes
        return found

    def begin(self) -> None:
        """Cut off what is behind the records that were read: everything, if none were."""
        try:
            os.ftruncate(self._file.fileno(), self._n_bytes)
            os.fsync(self._file.fileno())
            _sync_folder(self.path)
            self._is_new = False
        except OSError as error:
            raise self._failure(error) from error

    def append(self, data: bytes) -> None:
        """Write a record; when this returns it is on the disk."""
        descriptor, rest = self._file.fileno(), memoryview(data)
        try:
            while rest:
                rest = rest[os.pwrite(descriptor, rest, self._n_bytes + len(data) - len(rest)) :]
            os.fsync(descriptor)
        except OSError as error:
            raise self._failure(error) from error
        self._n_bytes += len(data)

    def close(self) -> None:
        """Let go of the file; one that was made here and never begun goes away."""
        if not self._file.closed and self._is_new:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _lines(self) -> Iterator[tuple[int, bytes, bool]]:
        self._file.seek(0)
        at, size = 0, self._size
        for number, data in enumerate(self._file, start=1):
            at += len(data)
            yield number, data, at >= size

    def _check_torn(self, number: int, data: bytes, *, is_last: bool) -> None:
        """Refuse a line that is neither a record nor what a crash leaves of the last one."""
        is_start = data[: len(START)] == START[: len(data)] or not data.strip(b"\0")
        if not is_last or not is_start:
            raise UsageError(
                f"line {number} of {self.path} is no record of a batch; --resume goes on with records only"
            )

    def _failure(self, error: OSError) -> DflashError:
        return DflashError(
            f"{self.path} cannot be written: {error.strerror}; it keeps its records, and --resume goes on"
        )


def _open(path: Path) -> tuple[bool, BinaryIO]:
    """Whether the file was not there before, and the file."""
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file():
            raise UsageError(f"{path} is no regular file; records are appended to one")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # a name with a NUL
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{path} cannot be written: {reason}") from error
    return is_new, os.fdopen(descriptor, "r+b")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"{path} is being written by another batch") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise UsageError(f"{path} cannot be locked: {error.strerror}") from error


def _sync_folder(path: Path) -> None:
    """Make the name of a new file as durable as what is in it."""
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
