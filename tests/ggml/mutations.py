"""Damaged copies of a good GGUF file, the same ones on every run.

`mutants` cuts, overwrites and splices the header of a file. It finds the header's fields by a walk of its
own, which trusts the file and shares nothing with the reader under test.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Field:
    """One number or run of characters in a header."""

    offset: int
    n_bytes: int
    is_integer: bool
    label: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """What was done, and the bytes of the damaged file."""

    name: str
    data: bytes


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.pos = data, 0
        self.fields: list[Field] = []

    def integer(self, n_bytes: int, label: str, *, keep: bool = True) -> int:
        value = int.from_bytes(self.data[self.pos : self.pos + n_bytes], "little")
        self.skip(n_bytes, label, is_integer=True, keep=keep)
        return value

    def skip(self, n_bytes: int, label: str, *, is_integer: bool = False, keep: bool = True) -> None:
        if keep:
            self.fields.append(Field(self.pos, n_bytes, is_integer, label))
        self.pos += n_bytes

    def string(self, label: str, *, keep: bool = True) -> None:
        self.skip(self.integer(8, f"{label} length", keep=keep), label, keep=keep)

    def value(self, label: str) -> None:
        kind = self.integer(4, f"{label} type")
        if kind == _STRING:
            self.string(label)
        elif kind == _ARRAY:
            self.array(label)
        else:
            self.skip(_VALUE_BYTES[kind], label, is_integer=True)

    def array(self, label: str) -> None:
        """Of many strings only the first and last ones become fields."""
        kind, n = self.integer(4, f"{label} element type"), self.integer(8, f"{label} count")
        if kind == _STRING:
            for i in range(n):
                self.string(f"{label}[{i}]", keep=i < 3 or i >= n - 3)
        else:
            self.skip(n * _VALUE_BYTES[kind], label)

    def tensor(self, label: str) -> None:
        self.string(f"{label} name")
        for i in range(self.integer(4, f"{label} dimensions")):
            self.integer(8, f"{label} size {i}")
        self.integer(4, f"{label} type")
        self.integer(8, f"{label} offset")


def fields(data: bytes) -> list[Field]:
    """The fields of a good file's header, in order."""
    walk = _Walk(data)
    walk.skip(4, "magic")
    walk.integer(4, "version")
    n_tensors, n_keys = walk.integer(8, "tensor count"), walk.integer(8, "key count")
    for i in range(n_keys):
        walk.string(f"key {i}")
        walk.value(f"value {i}")
    for i in range(n_tensors):
        walk.tensor(f"tensor {i}")
    return walk.fields


def mutants(data: bytes, *, seed: int, n: int) -> Iterator[Mutant]:
    """Every cut at a field's border, then `n` random mutations of the header, a quarter of each kind."""
    rng, header = random.Random(seed), fields(data)
    yield from _cuts(data, header)
    kinds = (_extreme, _flip, _run, _splice)
    for i in range(n):
        yield kinds[i % len(kinds)](data, header, rng)


def _cuts(data: bytes, header: list[Field]) -> Iterator[Mutant]:
    end = header[-1].offset + header[-1].n_bytes
    for field in header:
        yield Mutant(f"cut before {field.label}", data[: field.offset])
        if field.n_bytes > 1:
            yield Mutant(f"cut inside {field.label}", data[: field.offset + field.n_bytes // 2])
    for n, where in ((end, "after the header"), ((end + len(data)) // 2, "amid the tensors")):
        yield Mutant(f"cut {where}", data[:n])
    yield Mutant("cut by 1 byte", data[:-1])


def _overwrite(data: bytes, offset: int, patch: bytes) -> bytes:
    return data[:offset] + patch + data[offset + len(patch) :]


def _extreme(data: bytes, header: list[Field], rng: random.Random) -> Mutant:
    field = rng.choice([f for f in header if f.is_integer])
    value = rng.choice(_EXTREMES) & ((1 << 8 * field.n_bytes) - 1)
    patch = value.to_bytes(field.n_bytes, "little")
    return Mutant(f"{field.label} = {value}", _overwrite(data, field.offset, patch))


def _flip(data: bytes, header: list[Field], rng: random.Random) -> Mutant:
    field = rng.choice(header)
    offset = field.offset + rng.randrange(max(1, field.n_bytes))
    bit = rng.randrange(8)
    return Mutant(f"bit {bit} of byte {offset}", _overwrite(data, offset, bytes([data[offset] ^ 1 << bit])))


def _run(data: bytes, header: list[Field], rng: random.Random) -> Mutant:
    end = header[-1].offset + header[-1].n_bytes
    n = rng.randrange(1, 65)
    offset = rng.randrange(end - n)
    patch = rng.choice((bytes(n), b"\xff" * n, rng.randbytes(n), struct.pack("<Q", 1) * (n // 8)))
    return Mutant(f"{len(patch)} bytes at {offset}", _overwrite(data, offset, patch))


def _splice(data: bytes, header: list[Field], rng: random.Random) -> Mutant:
    """A piece of the header, field borders as often as not, put elsewhere, doubled or taken out."""
    end = header[-1].offset + header[-1].n_bytes
    places = [rng.choice(header).offset if rng.random() < 0.5 else rng.randrange(end) for _ in range(2)]
    start, target = places
    n = rng.randrange(1, min(4096, end))
    piece = data[start : start + n]
    match rng.randrange(3):
        case 0:
            return Mutant(f"{start}+{n} copied over {target}", _overwrite(data, target, piece))
        case 1:
            return Mutant(f"{start}+{n} inserted at {target}", data[:target] + piece + data[target:])
        case _:
            return Mutant(f"{start}+{n} taken out", data[:start] + data[start + n :])
