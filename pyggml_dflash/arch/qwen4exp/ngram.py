"""The n-gram hash of qwen4exp: which rows of the big embedding table a token reads. Layer 4.

A token and those before it are multiplied by constants of the file and mixed with exclusive or, all in
unsigned 64-bit numbers that wrap; each head takes the remainder by its own prime, which is a row of its
part of the table. The first heads see pairs of tokens, the next ones triples, and so on. An end token
hides itself and everything older from the tokens behind it, as the start of a sequence does.

The table has tens of gigabytes. It never enters memory of ours: each forward reads the rows of its tokens
from the mapped file, those of a prompt's next chunk on a thread of their own while a chunk is computed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pyggml_dflash.ggml.mapped_rows import Raw, can_expand
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader

TABLE: Final = "per_layer_token_embd.weight"
MAX_ROW_ID: Final = 2**31 - 1  # ggml gathers rows by I32
MAX_NGRAM: Final = 8
MAX_HEADS: Final = 64

Ids: TypeAlias = npt.NDArray[np.int32]
_Jobs: TypeAlias = "SimpleQueue[tuple[Ids, Future[Raw]] | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """The n-gram embedding: its layer, its sizes, and the constants of its hash.

    `multipliers` has one number per token of an n-gram, the current one first. `sizes` and `offsets`
    say for each head how many rows its part of the table has and where it begins.
    """

    layer: int  # of the trunk, from 0; its rows are added before that layer
    n_gram: int  # tokens that the longest n-gram spans
    row_dim: int  # width of one row of the table
    n_taps: int  # of the convolution, which reaches back in steps of `n_gram` tokens
    eos_id: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def n_head(self) -> int:
        """Rows of the table that a token reads."""
        return len(self.sizes)

    @property
    def n_before(self) -> int:
        """Earlier tokens that the hash of a token depends on."""
        return self.n_gram - 1

    @property
    def width(self) -> int:
        """Elements of a token's rows, side by side."""
        return self.n_head * self.row_dim

    @property
    def n_history(self) -> int:
        """Columns that the convolution reaches back."""
        return (self.n_taps - 1) * self.n_gram


def read_ngram_config(r: ConfigReader, recurrent: Sequence[bool], n_vocab: int) -> NgramConfig | None:
    """The file's n-gram embedding, checked against its table; None if it has none.

    `recurrent` tells for each trunk layer whether it is a delta net.
    """
    layers = r.file.get_ints(r.key("ple.layers"), [])
    if not layers:
        r.demand(TABLE not in r.file.tensors, f"tensor {TABLE!r} is of no use without {r.key('ple.layers')}")
        return None
    n_gram = r.count("ple.ngram_size", low=2, high=MAX_NGRAM)
    n_head = (n_gram - 1) * r.count("ple.heads_per_ngram", high=MAX_HEADS)
    r.demand(
        n_head <= MAX_HEADS,
        f"{r.key('ple.ngram_size')} and {r.key('ple.heads_per_ngram')} make {n_head} heads; "
        f"at most {MAX_HEADS} are possible",
    )
    config = NgramConfig(
        layer=_ple_layer(r, layers, recurrent),
        n_gram=n_gram,
        row_dim=r.count("embedding_length_per_layer_input", high=2**16),
        n_taps=r.count("ple.conv_kernel", low=2, high=64),
        eos_id=r.count("ple.eos_token_id", low=0, high=n_vocab - 1),
        multipliers=_constants(r, "ple.layer_multipliers", n_gram),
        sizes=_constants(r, "ple.head_vocab_sizes", n_head),
        offsets=_constants(r, "ple.head_offsets", n_head),
    )
    _check_table(r, config)
    return config


def _ple_layer(r: ConfigReader, layers: Sequence[int], recurrent: Sequence[bool]) -> int:
    """The one layer; its convolution's history is kept with a delta net's."""
    key, n_layer = r.key("ple.layers"), len(recurrent)
    if len(layers) > 1:
        raise r.unsupported(
            f"{key} is {list(layers)}; the file has one set of hash constants, so only one layer is possible"
        )
    layer = layers[0]
    r.demand(0 <= layer < n_layer, f"{key} is [{layer}]; expected 0 to {n_layer - 1}, counted from 0")
    if not recurrent[layer]:
        linear = ", ".join(str(i) for i, linear in enumerate(recurrent) if linear)
        raise r.unsupported(f"{key} is [{layer}], an attention layer; delta nets are layers {linear}")
    return layer


def _constants(r: ConfigReader, name: str, n: int) -> tuple[int, ...]:
    """The first `n` of an array of unsigned 64-bit numbers; more are tolerated, fewer are not."""
    key = r.key(name)
    values = r.file.get_ints(key)
    r.demand(len(values) >= n, f"{key} has {len(values)} numbers; the n-gram embedding needs {n}")
    r.demand(min(values[:n]) >= 0, f"{key} has {min(values[:n])}; expected no negative number")
    return tuple(values[:n])


def _check_table(r: ConfigReader, config: NgramConfig) -> None:
    """Every row that the hash can choose is in the table and has a number that fits I32."""
    table = r.file.tensors.get(TABLE)
    if table is None:
        raise r.damaged(f"tensor {TABLE!r} is missing, which {r.key('ple.layers')} asks for")
    if not can_expand(table.type):
        raise r.unsupported(f"tensor {TABLE!r} has type {table.type.label}; expected a type of weights")
    r.demand(
        len(table.shape) == 2 and table.shape[0] == config.row_dim,
        f"tensor {TABLE!r} has shape {list(table.shape)}; expected rows of {config.row_dim}",
    )
    for head, (size, offset) in enumerate(zip(config.sizes, config.offsets, strict=True)):
        end = offset + size
        r.demand(size > 0, f"{r.key('ple.head_vocab_sizes')} is 0 for head {head}")
        if end - 1 > MAX_ROW_ID:
            raise r.unsupported(
                f"head {head} of the n-gram embedding reads up to row {end - 1}; "
                f"at most {MAX_ROW_ID} is possible"
            )
        r.demand(
            end <= table.shape[1],
            f"head {head} of the n-gram embedding reads rows {offset} to {end - 1}; "
            f"tensor {TABLE!r} has {table.shape[1]}",
        )


class NgramHash:
    """Which rows of the table tokens read. Knows no sequence: callers give the tokens before."""

    def __init__(self, config: NgramConfig) -> None:
        shape = config.n_before, config.n_head // config.n_before  # heads grouped by the length they see
        self._n_before, self._n_head = config.n_before, config.n_head
        self._eos = np.uint64(config.eos_id)
        self._multipliers = np.array(config.multipliers, np.uint64)
        self._sizes = np.array(config.sizes, np.uint64).reshape(shape)
        self._offsets = np.array(config.offsets, np.uint64).reshape(shape)

    def rows(self, tokens: Sequence[int], before: Sequence[int]) -> Ids:
        """I32 [n_tokens, n_head]: the rows of `tokens`, which follow `before` in a sequence.

        Of `before` only the last `n_before` tokens count; fewer mean that the sequence begins there.
        """
        n, lags = len(tokens), self._n_before
        known = before[-lags:]
        line = np.full(lags + n, self._eos, np.uint64)
        line[lags - len(known) : lags] = known
        line[lags:] = tokens
        mixed = line[lags:] * self._multipliers[0]
        hidden = np.zeros(n, np.bool_)
        found = np.empty((n, *self._sizes.shape), np.int32)
        for lag in range(1, lags + 1):
            earlier = line[lags - lag : lags - lag + n]
            hidden |= earlier == self._eos
            mixed = mixed ^ (np.where(hidden, self._eos, earlier) * self._multipliers[lag])
            found[:, lag - 1] = mixed[:, None] % self._sizes[lag - 1] + self._offsets[lag - 1]
        return found.reshape(n, self._n_head)


def _work(jobs: _Jobs, read: Callable[[Ids], Raw]) -> None:
    """Do jobs until there is a None."""
    while (job := jobs.get()) is not None:
        ids, rows = job
        if rows.set_running_or_notify_cancel():
            try:
                rows.set_result(read(ids))
            except BaseException as error:
                rows.set_exception(error)


class _ReadAhead:
    """A thread that reads rows, started when it is first needed; ends with `close`, or with its owner.

    Not a ThreadPoolExecutor: that one refuses work once the main thread has ended, though others go on.
    """

    def __init__(self, read: Callable[[Ids], Raw]) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs, read), name="ngram-rows", daemon=True)
        self._end = weakref.finalize(self, self._jobs.put, None)

    def begin(self, ids: Ids) -> Future[Raw]:
        """The rows at `ids`, to be."""
        if self._thread.ident is None:
            self._thread.start()
        rows: Future[Raw] = Future()
        self._jobs.put((ids, rows))
        return rows

    def close(self) -> None:
        """Wait for what is being read and end the thread; a second call does nothing."""
        self._end()
        if self._thread.ident is not None:
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Expected:
    """Rows that are being read for a forward to come."""

    tokens: tuple[int, ...]
    before: tuple[int, ...]
    rows: Future[Raw]


class NgramReader:
    """Reads the rows of tokens as numbers, and those of tokens to come ahead of time.

    Used by one thread. The thread that reads ahead touches the mapped file and nothing native.
    """

    def __init__(self, config: NgramConfig, file: TensorFile) -> None:
        self._hash, self._n_before = NgramHash(config), config.n_before
        self._table = file.rows(file.tensors[TABLE])
        self._ahead = _ReadAhead(self._table.read)
        self._expected: _Expected | None = None

    def expect(self, tokens: Sequence[int], before: Sequence[int]) -> None:
        """Begin to read for a later `read` of the same tokens; returns at once."""
        self._forget()
        ids = self._hash.rows(tokens, before).reshape(-1)
        rows = self._ahead.begin(ids)
        self._expected = _Expected(tuple(tokens), self._window(before), rows)

    def read(self, tokens: Sequence[int], before: Sequence[int], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of `tokens` into `out`, F32 [n_tokens * width]: a token's heads side by side."""
        self._table.expand(self._raw_rows(tokens, before), out)

    def _raw_rows(self, tokens: Sequence[int], before: Sequence[int]) -> Raw:
        expected, self._expected = self._expected, None
        if expected is not None:
            if (expected.tokens, expected.before) == (tuple(tokens), self._window(before)):
                return expected.rows.result()
            expected.rows.cancel()
        return self._table.read(self._hash.rows(tokens, before).reshape(-1))

    def _window(self, before: Sequence[int]) -> tuple[int, ...]:
        return tuple(before[-self._n_before :])

    def _forget(self) -> None:
        if self._expected is not None:
            self._expected.rows.cancel()
            self._expected = None

    def close(self) -> None:
        """Wait for what is being read, end the thread and let the file go; a second call does nothing."""
        self._forget()
        self._ahead.close()
        self._table.close()
