"""A folder of states is loadable whatever happens to it, and never gives a wrong one."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import SnapshotError, UsageError
from pyggml_dflash.state.disk_tier import (
    NO_ROOM,
    NOT_LISTED,
    NOT_READ,
    NOT_WRITTEN,
    OTHER_TOKENS,
    TOO_LARGE,
    TOO_SHORT,
    DiskTier,
)
from pyggml_dflash.state.fingerprint import token_key
from pyggml_dflash.state.snapshot_file import (
    BAD_DATA,
    BAD_HEADER,
    CUT_SHORT,
    MAGIC,
    NOT_OURS,
    OTHER_VERSION,
    START,
    WRONG_LENGTH,
    file_bytes,
)
from tests.state.saved import BIG_ROWS, MARK, State, assert_same, state, tier_in

ROOT = Path(__file__).parents[2]
SIZE = file_bytes(state(0).contents)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.dfsnap"))


def loaded(tier: DiskTier[State], of: State) -> State | None:
    """The state of the same tokens as a request would get it, or None for a miss."""
    if tier.longest(of.tokens, 0) != len(of.tokens):
        return None
    try:
        return tier.load(of.tokens)
    except SnapshotError:
        return None


def test_a_state_comes_back_as_it_was_also_in_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    tier = tier_in(folder)
    states = [state(seed, n_past) for seed, n_past in ((1, 1), (2, 8), (3, 700))]
    assert all(tier.save(s) for s in states)
    for again in (tier, tier_in(folder)):
        assert again.n_states == 3
        for s in states:
            found = loaded(again, s)
            assert found is not None
            assert_same(found, s)
    assert tier.n_bytes == sum(path.stat().st_size for path in files(folder))
    assert tier.counters.saved_bytes == tier.counters.loaded_bytes == tier.n_bytes
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(folder))
    assert [path for path in folder.iterdir() if path.suffix != ".dfsnap"] == []


def test_the_longest_prefix_is_found(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    text = state(5, 40)
    for n in (3, 9, 27):
        part = state(5, 40)
        contents = part.contents
        object.__setattr__(contents, "tokens", text.tokens[:n])
        assert tier.save(part)
    tokens = text.tokens
    assert [tier.longest(tokens[:n], 0) for n in (2, 3, 8, 9, 26, 27, 40)] == [0, 3, 3, 9, 9, 27, 27]
    assert [tier.longest(tokens, above) for above in (2, 3, 26, 27)] == [27, 27, 27, 0]
    other = tokens.copy()
    other[8] += 1
    assert tier.longest(other, 0) == 3
    assert tier_in(tmp_path).longest(tokens, 0) == 27


def test_a_state_is_written_once(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    assert tier.save(state(1))
    (path,) = files(tmp_path)
    before = path.stat().st_ino
    assert tier.save(state(1))
    assert path.stat().st_ino == before
    assert tier.counters.n_saved == 1


def test_other_models_are_left_alone_and_are_a_miss(tmp_path: Path) -> None:
    other = bytes(16)
    tier_in(tmp_path, mark=other).save(state(1, mark=other))
    tier = tier_in(tmp_path)
    assert (tier.n_states, tier.n_bytes) == (0, SIZE)
    assert loaded(tier, state(1)) is None
    assert tier.save(state(1))
    assert len(files(tmp_path)) == 2
    for mark in (other, MARK):
        found = loaded(tier_in(tmp_path, mark=mark), state(1))
        assert found is not None
        assert found.contents.fingerprint == mark
    assert not tier.counters.failed


def test_the_longest_unused_goes_beyond_the_budget(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, budget=3 * SIZE)
    for seed in (1, 2, 3):
        tier.save(state(seed))
        os.utime(tmp_path / name_of(seed), ns=(seed, seed))
    assert loaded(tier, state(1)) is not None  # now it is the newest
    tier.save(state(4))
    assert [loaded(tier, state(seed)) is not None for seed in (1, 2, 3, 4)] == [True, False, True, True]
    assert tier.counters.n_evicted == 1
    assert tier_in(tmp_path, budget=2 * SIZE).n_states == 2
    assert len(files(tmp_path)) == 2
    other = bytes(16)
    assert tier_in(tmp_path, budget=SIZE, mark=other).save(state(9, mark=other))  # others count as well
    assert len(files(tmp_path)) == 1


def name_of(seed: int) -> str:
    """The file of `state(seed)`."""
    return f"{token_key(MAGIC + MARK, state(seed).tokens).hex()}-8.dfsnap"


def test_what_is_not_worth_a_file_is_skipped(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, budget=SIZE, min_tokens=8)
    assert not tier.save(state(1, 7))
    assert not tier.save(state(1, 9))
    assert tier.save(state(1, 8))
    assert tier.counters.skipped == {TOO_SHORT: 1, TOO_LARGE: 1}
    assert len(files(tmp_path)) == 1


def damage_at(data: bytearray, where: int) -> bytearray:
    data[where] ^= 0x10
    return data


def header_of(data: bytes) -> tuple[int, int]:
    """Where the header begins and ends."""
    _, n, _ = START.unpack_from(data)
    return START.size, START.size + n


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Files that are wrong in one place each, and the reason that is given."""
    start, stop = header_of(data)
    tokens, strips = stop, stop + 4 * 8 + 4
    flipped = {
        "header length": (11, BAD_HEADER),
        "header checksum": (12, BAD_HEADER),
        "header": (start + 5, BAD_HEADER),
        "tokens": (tokens + 3, BAD_DATA),
        "checksum of tokens": (strips - 1, BAD_DATA),
        "first strip": (strips + 1, BAD_DATA),
        "last strip": (len(data) - 5, BAD_DATA),
        "last checksum": (len(data) - 1, BAD_DATA),
    }
    found = {name: (bytes(damage_at(bytearray(data), at)), why) for name, (at, why) in flipped.items()}
    cut = {"in the magic": 7, "in the start": 9, "in the header": stop - 1}
    found |= {name: (data[:n], CUT_SHORT) for name, n in cut.items()}
    lengths = {"behind the header": stop, "one byte": len(data) - 1}
    found |= {name: (data[:n], WRONG_LENGTH) for name, n in lengths.items()}
    found["too long"] = (data + b"\0", WRONG_LENGTH)
    return found


NAMES = list(damaged(START.pack(b"", 64, 0) + bytes(200)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_a_miss_with_a_reason_and_goes(tmp_path: Path, name: str, when: str) -> None:
    """Damaged before the folder is opened, or while it is."""
    tier = tier_in(tmp_path)
    tier.save(state(1))
    tier.save(state(2))
    path = tmp_path / name_of(1)
    data, reason = damaged(path.read_bytes())[name]
    path.write_bytes(data)
    if when == "before":
        tier = tier_in(tmp_path)
    assert loaded(tier, state(1)) is None
    assert tier.counters.failed == {reason: 1}
    assert not path.exists()
    found = loaded(tier, state(2))
    assert found is not None
    assert_same(found, state(2))
    assert tier.save(state(1))
    assert loaded(tier, state(1)) is not None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("data", [b"", b"df", b"\x89PNG" + bytes(SIZE), b"efsnap01" + bytes(SIZE)])
def test_a_file_that_does_not_begin_like_ours_is_left_alone(tmp_path: Path, data: bytes, when: str) -> None:
    """Also under one of our names, and in a folder over its budget, which it does not count towards."""
    tier = tier_in(tmp_path)
    tier.save(state(1))
    tier.save(state(2))
    for path in (tmp_path / name_of(1), tmp_path / "other.dfsnap"):
        path.write_bytes(data)
    if when == "before":
        tier = tier_in(tmp_path, budget=SIZE)
        assert (tier.n_states, tier.n_bytes) == (1, SIZE)
    assert loaded(tier, state(1)) is None
    assert tier.counters.failed == ({} if when == "before" else {NOT_OURS: 1})
    assert loaded(tier, state(2)) is not None
    assert (tmp_path / name_of(1)).read_bytes() == (tmp_path / "other.dfsnap").read_bytes() == data


@pytest.mark.parametrize("version", [b"00", b"02", b"99"])
def test_a_file_of_another_version_is_left_alone_until_it_is_the_longest_unused(
    tmp_path: Path, version: bytes
) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    path = tmp_path / name_of(1)
    data = MAGIC[:-2] + version + path.read_bytes()[len(MAGIC) :]
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=OTHER_VERSION):
        tier.load(state(1).tokens)
    os.utime(path, ns=(1, 1))
    again = tier_in(tmp_path, budget=2 * SIZE)
    assert (again.n_states, again.n_bytes) == (0, SIZE)
    assert again.save(state(2))
    assert path.read_bytes() == data
    assert again.save(state(3))
    assert not path.exists()
    assert (again.n_states, again.counters.n_evicted) == (2, 1)
    assert not again.counters.failed


def with_header(data: bytes, header: bytes) -> bytes:
    """The file with another header, whose checksum is right."""
    magic, _, _ = START.unpack_from(data)
    return START.pack(magic, len(header), zlib.crc32(header)) + header + data[header_of(data)[1] :]


def hostile_headers() -> dict[str, object]:
    good = {"fingerprint": MARK.hex(), "n_past": 8, "companion": "", "strips": [], "companion_strips": []}
    strip = ["k", "F16", [32, 8]]
    return {
        "no object": [1],
        "nothing": None,
        "a key is missing": {k: v for k, v in good.items() if k != "strips"},
        "fingerprint": good | {"fingerprint": "xyz"},
        "fingerprint type": good | {"fingerprint": 5},
        "no tokens": good | {"n_past": 0},
        "minus tokens": good | {"n_past": -8},
        "many tokens": good | {"n_past": 2**40},
        "half a token": good | {"n_past": 8.0},
        "true tokens": good | {"n_past": True},
        "companion": good | {"companion": None},
        "strips": good | {"strips": 5},
        "short strip": good | {"strips": [strip[:2]]},
        "strip name": good | {"strips": [[1, *strip[1:]]]},
        "unknown type": good | {"strips": [["k", "F17", [32, 8]]]},
        "row of half a block": good | {"strips": [["k", "Q8_0", [31, 8]]]},
        "shape": good | {"strips": [["k", "F16", 32]]},
        "no shape": good | {"strips": [["k", "F16", []]]},
        "long shape": good | {"strips": [["k", "F16", [1] * 5]]},
        "minus rows": good | {"strips": [["k", "F16", [32, -8]]]},
        "rows as text": good | {"strips": [["k", "F16", ["32"]]]},
        "huge": good | {"strips": [["k", "F16", [2**50, 2**50, 2**50, 2**50]]]},
        "many huge": good | {"strips": [["k", "F16", [2**40]]] * 2000},
    }


@pytest.mark.parametrize("name", list(hostile_headers()))
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    (path,) = files(tmp_path)
    path.write_bytes(with_header(path.read_bytes(), json.dumps(hostile_headers()[name]).encode()))
    assert loaded(tier, state(1)) is None
    assert tier.counters.failed == {BAD_HEADER: 1}


@pytest.mark.parametrize("header", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: bytes) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    (path,) = files(tmp_path)
    path.write_bytes(with_header(path.read_bytes(), header))
    assert loaded(tier_in(tmp_path), state(1)) is None
    assert files(tmp_path) == []


def test_random_damage_is_never_taken_for_a_state(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    tier = tier_in(tmp_path)
    tier.save(state(1))
    (path,) = files(tmp_path)
    good = path.read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(0, len(data)))
            if rng.integers(0, 4) == 0:
                del data[at : at + int(rng.integers(1, 40))]
            else:
                data[at] ^= int(rng.integers(1, 256))
            if not data:
                break
        if bytes(data) == good:
            continue
        path.write_bytes(data)
        assert loaded(tier_in(tmp_path), state(1)) is None


def test_a_file_with_another_name_or_other_tokens_is_not_taken(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    tier.save(state(2))
    one, two = (tmp_path / name_of(seed) for seed in (1, 2))
    one.write_bytes(two.read_bytes())
    assert loaded(tier, state(1)) is None
    assert tier.counters.failed == {OTHER_TOKENS: 1}
    two.rename(tmp_path / "mine.dfsnap")
    assert loaded(tier_in(tmp_path), state(2)) is None
    assert (tmp_path / "mine.dfsnap").exists()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    assert tier.longest(state(1).tokens, 0) == 8
    files(tmp_path)[0].unlink()
    with pytest.raises(SnapshotError, match=NOT_READ):
        tier.load(state(1).tokens)
    assert (tier.n_states, tier.n_bytes, tier.longest(state(1).tokens, 0)) == (0, 0, 0)


def test_a_folder_that_vanished_is_a_miss(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    tier = tier_in(folder)
    tier.save(state(1))
    folder.rename(tmp_path / "elsewhere")
    assert tier.longest(state(1).tokens, 0) == 0
    with pytest.raises(SnapshotError, match=NOT_READ):
        tier.load(state(1).tokens)
    assert tier.counters.failed == {NOT_LISTED: 1, NOT_READ: 1}


def test_a_folder_that_vanished_is_made_again_for_the_next_state(tmp_path: Path) -> None:
    folder = tmp_path / "all" / "states"
    tier = tier_in(folder)
    tier.save(state(1))
    folder.parent.rename(tmp_path / "elsewhere")
    assert tier.save(state(2))
    assert (tier.n_states, folder.stat().st_mode & 0o777) == (1, 0o700)
    assert loaded(tier, state(1)) is None
    found = loaded(tier, state(2))
    assert found is not None
    assert_same(found, state(2))


def test_a_folder_that_cannot_be_made_again_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    tier = tier_in(folder)
    folder.rmdir()
    folder.write_bytes(b"a file now")
    assert not tier.save(state(1))
    assert tier.counters.skipped == {NOT_WRITTEN: 1}


def test_processes_that_share_a_folder_see_each_others_files(tmp_path: Path) -> None:
    a, b = tier_in(tmp_path), tier_in(tmp_path)
    a.save(state(1))
    later = time.time_ns() + 10**9  # a clock that is coarser than this test
    os.utime(tmp_path, ns=(later, later))
    assert loaded(b, state(1)) is not None
    files(tmp_path)[0].unlink()
    os.utime(tmp_path, ns=(later + 1, later + 1))
    assert a.longest(state(1).tokens, 0) == b.longest(state(1).tokens, 0) == 0


def test_without_memory_a_state_is_a_miss_and_its_file_stays(tmp_path: Path) -> None:
    tier_in(tmp_path).save(state(1))
    tier: DiskTier[State] = DiskTier(tmp_path, lambda contents, fill: None, fingerprint=MARK)
    with pytest.raises(SnapshotError, match=NO_ROOM):
        tier.load(state(1).tokens)
    assert len(files(tmp_path)) == 1


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """The system refuses to make files longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("n_bytes", [0, 100, SIZE - 1])
def test_a_disk_that_fails_is_no_error_and_leaves_nothing(tmp_path: Path, n_bytes: int) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    with files_of_at_most(n_bytes):
        assert not tier.save(state(2))
    assert tier.counters.skipped == {NOT_WRITTEN: 1}
    assert [path.suffix for path in tmp_path.iterdir()] == [".dfsnap"]
    assert loaded(tier, state(1)) is not None


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    for folder in (path, path / "below"):
        with pytest.raises(UsageError, match="folder for stored states"):
            tier_in(folder)


def test_what_nobody_writes_any_more_is_taken_away(tmp_path: Path) -> None:
    left, live, foreign = (tmp_path / name for name in (".dfsnap-left", ".dfsnap-live", "notes.txt"))
    for path in (left, live, foreign):
        path.write_bytes(b"part")
    with live.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        tier_in(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == [".dfsnap-live", "notes.txt"]
    tier_in(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_process_killed_at_any_moment_leaves_a_folder_that_loads(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    big = file_bytes(state(0, rows=BIG_ROWS).contents)
    found = 0
    for turn in range(8):
        first = 1000 * turn
        command = [sys.executable, "-m", "tests.state.saved", str(tmp_path), str(first), str(4 * big)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", process.stderr and process.stderr.read()
            time.sleep(float(rng.uniform(0.005, 0.15)))
            process.send_signal(signal.SIGKILL)
        tier = tier_in(tmp_path, budget=4 * big)
        assert not tier.counters.failed
        assert all(path.suffix == ".dfsnap" for path in tmp_path.iterdir())
        assert tier.n_bytes <= 4 * big
        for path in files(tmp_path):
            expected = state(seed_in(path), rows=BIG_ROWS)
            got = loaded(tier, expected)
            assert got is not None, path.name
            assert_same(got, expected)
            found += 1
    assert found


def seed_in(path: Path) -> int:
    """The first token of a file."""
    data = path.read_bytes()
    (seed,) = struct.unpack_from("<i", data, header_of(data)[1])
    return int(seed)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path, when: str) -> None:
    tier = tier_in(tmp_path)
    tier.save(state(1))
    os.mkfifo(tmp_path / name_of(2))
    os.mkfifo(tmp_path / ".dfsnap-unfinished")
    if when == "before":
        tier = tier_in(tmp_path)
    assert loaded(tier, state(1)) is not None
    assert loaded(tier, state(2)) is None
