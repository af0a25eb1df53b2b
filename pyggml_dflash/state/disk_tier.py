"""A folder of stored states that outlives the process: the prefix cache's lower tier. Layer 5.

One file per state, in the format of `snapshot_file`. A file is written under another name, synchronised
and renamed, so that what has our ending is whole, whenever the process or the machine stops. Several
processes may share a folder. A damaged file is a miss with a reason, and is deleted; files of other
models, layouts and versions of the format are left alone, but count towards the budget, and age like all
others. What does not begin like a stored state is somebody else's, whatever its name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import SnapshotError, UsageError
from pyggml_dflash.state.fingerprint import Digest, PrefixHash, token_key
from pyggml_dflash.state.snapshot import Contents, Tokens
from pyggml_dflash.state.snapshot_file import (
    MAGIC,
    NOT_OURS,
    OTHER_VERSION,
    SnapshotReader,
    file_bytes,
    write_snapshot,
)

log = logging.getLogger(__name__)

ENDING: Final = ".dfsnap"
UNFINISHED: Final = ".dfsnap-"  # begins the names of files that are being written
MIN_TOKENS: Final = 512  # shorter prefixes are read again faster than they are loaded
BUDGET_BYTES: Final = 4096 * 2**20

TOO_SHORT: Final = "too few tokens"
TOO_LARGE: Final = "larger than the budget"
NOT_WRITTEN: Final = "cannot be written"
NOT_READ: Final = "file cannot be read"
NOT_LISTED: Final = "folder cannot be read"
OTHER_TOKENS: Final = "file holds other tokens"
NO_ROOM: Final = "no memory for a stored state"


class Saved(Protocol):
    """What can be saved: what it holds, and the bytes of each strip."""

    @property
    def contents(self) -> Contents:
        """Tokens and strips."""

    def data(self, i: int) -> npt.NDArray[np.uint8]:
        """The bytes of strip `i`, uint8 [n_bytes]."""


T = TypeVar("T", bound=Saved)
Fill = Callable[[int, npt.NDArray[np.uint8]], None]
Adopt = Callable[[Contents, Fill], "T | None"]


@dataclass(slots=True)
class DiskCounters:
    """What became of files; bytes are those of whole files, seconds include synchronising."""

    n_saved: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    n_loaded: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    n_evicted: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # not saved, by reason
    failed: Counter[str] = field(default_factory=Counter)  # files that could not be used, by reason


@dataclass(frozen=True, slots=True)
class _File:
    """A file in the folder; key None: of another model, layout or version of the format."""

    path: Path
    n_bytes: int
    n_past: int = 0
    key: Digest | None = None


class DiskTier(Generic[T]):
    """The states of one fingerprint in a folder, the longest unused deleted beyond `budget_bytes`.

    `adopt` makes a state from contents and a function that fills its strips. Used on one thread.
    """

    def __init__(
        self,
        folder: Path,
        adopt: Adopt[T],
        *,
        fingerprint: Digest,
        budget_bytes: int = BUDGET_BYTES,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        """Make the folder if there is none, and take away what was left unfinished; `UsageError`."""
        self.folder, self.budget_bytes, self.min_tokens = folder, budget_bytes, min_tokens
        self.counters = DiskCounters()
        self._adopt, self._fingerprint = adopt, fingerprint
        self._seed = MAGIC + fingerprint  # of keys, so that files of another version have other names
        self._files: dict[str, _File] = {}
        self._by_key: dict[Digest, _File] = {}
        self._seen_ns = -1
        make_folder(folder)
        try:
            _remove_unfinished(folder)
            self._look(force=True)
            self._shrink(keep="")
        except OSError as error:
            raise _unusable(folder, error) from error

    @property
    def n_bytes(self) -> int:
        """Bytes of all files seen, those of other models too."""
        return sum(file.n_bytes for file in self._files.values())

    @property
    def n_states(self) -> int:
        """States that can be loaded."""
        return len(self._by_key)

    def longest(self, tokens: Tokens, above: int) -> int:
        """Length of the longest prefix of `tokens`, int32 [n], that is kept and longer than `above`; or 0."""
        try:
            self._look()
        except OSError as error:
            self._failure(NOT_LISTED, self.folder, str(error))
            return 0
        lengths = sorted({f.n_past for f in self._by_key.values() if above < f.n_past <= len(tokens)})
        prefix, found, start = PrefixHash(self._seed), 0, 0
        for n in lengths:
            if prefix.extend(tokens[start:n]) in self._by_key:
                found = n
            start = n
        return found

    def load(self, tokens: Tokens) -> T:
        """The state of exactly these tokens; `SnapshotError` says why there is none."""
        file = self._by_key.get(token_key(self._seed, tokens))
        if file is None:
            raise SnapshotError(NOT_READ)
        started = time.perf_counter()
        try:
            state = self._read(file, tokens)
        except OSError as error:
            self._forget(file)
            raise self._failure(NOT_READ, file.path, str(error)) from error
        except SnapshotError as error:
            self._forget(file)
            if error.reason not in (NOT_OURS, OTHER_VERSION):
                _delete(file.path)
            raise self._failure(error.reason, file.path) from error
        if state is None:
            raise SnapshotError(NO_ROOM)
        self.counters.n_loaded += 1
        self.counters.loaded_bytes += file.n_bytes
        self.counters.load_s += time.perf_counter() - started
        return state

    def _read(self, file: _File, tokens: Tokens) -> T | None:
        with file.path.open("rb", buffering=0) as stream:
            reader = SnapshotReader(stream)
            contents = reader.read_contents()
            if contents.fingerprint != self._fingerprint or not np.array_equal(contents.tokens, tokens):
                raise SnapshotError(OTHER_TOKENS)
            state = self._adopt(contents, reader.read_strip)
        with suppress(OSError):  # somebody else may have deleted it
            os.utime(file.path)
        return state

    def save(self, stored: T) -> bool:
        """Keep a copy; False if it was not kept, which `counters` explain. Never raises for a bad disk."""
        contents, started = stored.contents, time.perf_counter()
        assert contents.fingerprint == self._fingerprint
        key, n_bytes = token_key(self._seed, contents.tokens), file_bytes(contents)
        if contents.n_past < self.min_tokens:
            return self._skip(TOO_SHORT)
        if n_bytes > self.budget_bytes:
            return self._skip(TOO_LARGE)
        path = self.folder / f"{key.hex()}-{contents.n_past}{ENDING}"
        try:
            _make(self.folder)  # again, if somebody took it away
            self._look()
            if path.name in self._files:
                os.utime(path)
                return True
            self._write(path, stored)
            self._add(_File(path, n_bytes, contents.n_past, key))
            self._shrink(keep=path.name)
        except OSError as error:
            log.warning("a state of %d tokens was not saved: %s", contents.n_past, error)
            return self._skip(NOT_WRITTEN)
        self.counters.n_saved += 1
        self.counters.saved_bytes += n_bytes
        self.counters.save_s += time.perf_counter() - started
        return True

    def _write(self, path: Path, stored: T) -> None:
        number, name = tempfile.mkstemp(prefix=UNFINISHED, dir=self.folder)
        try:
            with os.fdopen(number, "wb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)  # as long as we live, nobody takes it for left over
                write_snapshot(stream, stored.contents, stored.data)
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _synchronise(self.folder)

    def _skip(self, reason: str) -> bool:
        self.counters.skipped[reason] += 1
        return False

    def _look(self, *, force: bool = False) -> None:
        """Learn of files that came or went since the last look, through us or others."""
        changed_ns = self.folder.stat().st_mtime_ns
        if changed_ns == self._seen_ns and not force:
            return
        # a pipe or the like would be waited for without an end
        present = {e.name for e in os.scandir(self.folder) if e.name.endswith(ENDING) and e.is_file()}
        for name in [name for name in self._files if name not in present]:
            self._forget(self._files[name])
        for name in present:
            if name not in self._files:
                self._open(self.folder / name)
        self._seen_ns = changed_ns

    def _open(self, path: Path) -> None:
        """Take a file into the index; a damaged one is deleted."""
        try:
            with path.open("rb", buffering=0) as stream:
                n_bytes = os.fstat(stream.fileno()).st_size
                reader = SnapshotReader(stream)
        except SnapshotError as error:
            if error.reason == OTHER_VERSION:
                self._add(_File(path, n_bytes))
            elif error.reason != NOT_OURS:
                self._failure(error.reason, path)
                _delete(path)
            return
        except OSError as error:
            self._failure(NOT_READ, path, str(error))
            return
        ours = reader.fingerprint == self._fingerprint and path.name.endswith(f"-{reader.n_past}{ENDING}")
        key = _key_in(path.name) if ours else None
        self._add(_File(path, n_bytes, reader.n_past, key))

    def _add(self, file: _File) -> None:
        self._files[file.path.name] = file
        if file.key is not None:
            self._by_key[file.key] = file

    def _forget(self, file: _File) -> None:
        self._files.pop(file.path.name, None)
        if file.key is not None:
            self._by_key.pop(file.key, None)

    def _shrink(self, keep: str) -> None:
        """Delete the longest unused files until the rest is within the budget."""
        if self.n_bytes <= self.budget_bytes:
            return
        by_age = sorted(self._files.values(), key=_used_ns)
        for file in by_age:
            if self.n_bytes <= self.budget_bytes:
                break
            if file.path.name != keep:
                _delete(file.path)
                self._forget(file)
                self.counters.n_evicted += 1

    def _failure(self, reason: str, path: Path, detail: str = "") -> SnapshotError:
        self.counters.failed[reason] += 1
        error = SnapshotError(reason, detail)
        log.warning("%s: %s", path, error)
        return error


def make_folder(folder: Path) -> None:
    """See to it that there is such a folder; `UsageError`."""
    try:
        _make(folder)
    except OSError as error:
        raise _unusable(folder, error) from error


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # files tell what was said


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"the folder for stored states is {str(folder)!r}: {error.strerror}")


def _delete(path: Path) -> None:
    with suppress(OSError):  # it may be gone already, or not ours to delete
        path.unlink()


def _key_in(name: str) -> Digest | None:
    try:
        return bytes.fromhex(name.partition("-")[0])
    except ValueError:
        return None


def _used_ns(file: _File) -> int:
    try:
        return file.path.stat().st_mtime_ns
    except OSError:
        return 0  # somebody else deleted it


def _remove_unfinished(folder: Path) -> None:
    """Delete files that nobody writes any more: a lock ends with the process that held it."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if not path.is_file():
            continue
        try:
            with path.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:
            continue


def _synchronise(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
