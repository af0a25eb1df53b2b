"""Whether a row comes out the same alone and among others, measured with the model's own weights. Layer 6.

Only products with weights look at several rows at a time; all else that a forward does with a row is built
as for that row alone. A device chooses its kernel for a product by the number of rows, and some kernels sum
in another order than others. So every kind of product that decoding has is run with equal rows: they must
agree with each other and with a lone row, bit by bit. Found on a CPU with AVX-512 (ggml 0.25.3):

    Q8_0, Q4_0 and the like            any number of rows agrees
    F32, F16, BF16, IQ4_NL             a lone row differs, two and more agree
    K-quants, i-quants                 1 to 7 rows agree
    repacked Q4_K and Q2_K             1 to 3 rows agree, and all multiples of 4

So a product may be padded to more rows than there are. Two rows of F32, F16 or BF16 take 0.9 of the time of
one, so nothing is lost. Four rows of repacked Q4_K take 1.25 to 1.4 times as long as one; but two, three and
four then take no longer, without it 1.8, 2.3 and 3.7 times. The choice does not look at the clock, so that a
model rounds alike each time it is opened.

Whole forwards are compared as well: devices other than a CPU may fuse products with what is around them. On
a CPU that is done where it takes little work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.batching import MOST_ROWS, PADDINGS, THREAD_WORK, Batching, most_ragged_rows
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.joined_invariance import joined_anyhow, measure_joined
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.padding import Padding, Paddings
from pyggml_dflash.ggml.products import Product, ProductRunner
from pyggml_dflash.ggml.tensor import WeightKind
from pyggml_dflash.state.slot import Slot

LIMIT_S: Final = 1.0  # for widths that only drafts need
N_COMPARED: Final = 512  # results of a product, at least
MOST_INPUTS: Final = 128  # rows that are tried to get so many
MOST_LOOKED_AT: Final = 16  # rows of a decode or verify forward that products are compared with
DRAFTED: Final = 4  # rows that a verify forward should be able to have
N_STEPS: Final = 3  # tokens of a compared text: later ones read what earlier ones left
SINGLE: Final = Batching(mode="single", rows=1, exact=True, reason="there is one slot")


def measure_batching(
    forwards: Forwards,
    slots: Sequence[Slot],
    backend: Backend,
    ledger: Ledger,
    *,
    allow_variance: bool = False,
) -> Batching:
    """How slots may decode together. They must be idle, and are reset.

    `allow_variance`: together in any case, though a row may then be rounded otherwise than alone.
    """
    most = min(len(slots), MOST_ROWS)
    if most == 1:
        return SINGLE
    if allow_variance:
        reason = "rows may be rounded otherwise than alone, as asked for"
        return joined_anyhow(forwards, Batching(mode="batched", rows=most, exact=False, reason=reason))
    return measure_joined(forwards, slots, backend, ledger, _measured(forwards, slots, backend, ledger, most))


def _measured(
    forwards: Forwards, slots: Sequence[Slot], backend: Backend, ledger: Ledger, most: int
) -> Batching:
    """How up to `most` slots may decode together."""
    width = 1 if forwards.recording is None else forwards.recording.max_width
    ragged = most_ragged_rows(len(slots), width)
    found = measure_products(backend, ledger, forwards.products(), most, width)
    batching = choose(found, most, width)
    if batching.rows == 1:
        return batching
    looked_at = max(most, width)
    rows = min(a.rows[_padding(batching.paddings, a.product)] for a in found)
    if rows >= looked_at:
        rows = measure_more(backend, ledger, forwards.products(), batching.paddings, range(rows, ragged))
    batching = replace(batching, ragged_rows=max(1, min(rows, ragged)))
    limit = THREAD_WORK * backend.n_threads if all(part.is_host for part in backend.all) else None
    return _checked(forwards, slots, batching, found, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Over how many rows a product comes out the same, by how it is padded; less padding comes first."""

    product: Product
    rows: Mapping[Padding, int]

    @property
    def most(self) -> int:
        """The most rows, however it is padded."""
        return max(self.rows.values())

    def padding(self, wanted: int) -> Padding:
        """The least padding with which so many rows agree, else that with which most do."""
        enough = (padding for padding, rows in self.rows.items() if rows >= wanted)
        return next(enough, max(self.rows, key=lambda padding: self.rows[padding]))


def measure_products(
    backend: Backend, ledger: Ledger, wanted: Sequence[Product], most: int, width: int = 1
) -> list[Agreement]:
    """How rows of each product agree, up to `most` of them, and while there is time up to `width`."""
    top, deadline = max(most, width), time.perf_counter() + LIMIT_S
    with closing(ProductRunner(backend, ledger, wanted, MOST_LOOKED_AT, MOST_INPUTS)) as runner:
        found: list[Agreement] = []
        for product in wanted:
            found.append(_agreement(runner, product, range(most + 1, top + 1), deadline))
            top = max(most, min(top, found[-1].most))  # what the others give beyond it is of no use
        return found


def measure_more(
    backend: Backend, ledger: Ledger, products: Sequence[Product], paddings: Paddings, known: range
) -> int:
    """Up to how many rows all products agree, padded as they will be: `known.start` do, at most `known.stop`.

    It is left at what was found when the time is over.
    """
    deadline = time.perf_counter() + LIMIT_S
    with closing(ProductRunner(backend, ledger, products, MOST_LOOKED_AT, MOST_INPUTS)) as runner:
        lone = [_results(runner, p, paddings.rows(p.kind, 1))[0] for p in products]
        for n in known:
            for product, row in zip(products, lone, strict=True):
                results = _results(runner, product, paddings.rows(product.kind, n + 1))
                if time.perf_counter() > deadline or any(other != row for other in results):
                    return n
    return max(known.start, known.stop)


def _padding(paddings: Paddings, product: Product) -> Padding:
    return paddings.kinds.get(product.kind, paddings.others)


def _agreement(runner: ProductRunner, product: Product, extra: range, deadline: float) -> Agreement:
    """Looks at numbers of rows below `extra.stop`; at those in `extra` only before the deadline."""
    results = {1: _results(runner, product, 1)}
    rows: dict[Padding, int] = {}
    for padding in PADDINGS[:1] if product.n_used else PADDINGS:
        first, n = padding.rows(1), 0
        while n + 1 < extra.stop and (n + 1 not in extra or time.perf_counter() < deadline):
            made = padding.rows(n + 1)
            if made not in results:
                results[made] = _results(runner, product, made)
            if any(row != results[first][0] for row in results[made]):
                break
            n += 1
        rows[padding] = max(1, n)
        if n + 1 >= extra.stop:
            break
    return Agreement(product=product, rows=rows)


def _results(runner: ProductRunner, product: Product, n: int) -> list[bytes]:
    """What equal rows among `n` give, by place; where experts are chosen, by all rows or by one.

    Kernels that sum in another order often agree in a few results, so there are many.
    """
    n_inputs, k = min(MOST_INPUTS, -(-N_COMPARED // product.n_out)), product.n_used
    if not k:
        return _places(runner.run(product, n, n_inputs)[0])
    apart = [i * k for i in range(n)]
    same, first, last = runner.run(product, n, n_inputs, ([0] * n, apart, apart[::-1]))
    return [*_places(same), _places(first)[0], _places(last)[-1]]


def _places(results: npt.NDArray[np.float32]) -> list[bytes]:
    """Bits of [input, place, ..] by place."""
    return [results[:, i].tobytes() for i in range(results.shape[1])]


def _bits(rows: npt.NDArray[np.float32]) -> list[bytes]:
    return [row.tobytes() for row in rows]


def choose(found: Sequence[Agreement], most: int, width: int = 1) -> Batching:
    """How up to `most` slots and up to `width` rows of one may go together, by the tightest product."""
    wanted = max(most, min(width, DRAFTED))
    tightest = min(found, key=lambda a: a.rows[a.padding(wanted)])
    wanted = min(wanted, tightest.rows[tightest.padding(wanted)])
    chosen = {a.product.kind: a.padding(wanted) for a in found}
    agreeing = min(a.rows[chosen[a.product.kind]] for a in found)
    rows, padded = min(most, agreeing), {k: p for k, p in chosen.items() if p != Padding()}
    if rows == 1:
        reason = f"products with {_named(tightest.product)} round otherwise for two rows than for one"
        return Batching(mode="sequential", rows=1, exact=True, reason=reason)
    reasons = []
    if rows < most:
        reasons.append(f"products with {_named(tightest.product)} agree over up to {rows} rows")
    reasons += [_padded(padded, padding) for padding in PADDINGS if padding in padded.values()]
    return Batching(
        mode="padded" if padded else "batched",
        rows=rows,
        exact=True,
        reason="; ".join(reasons) or f"rows are the same alone and among {most}",
        verify_rows=min(width, agreeing),
        paddings=Paddings(padded),
    )


def _padded(paddings: Mapping[WeightKind, Padding], padding: Padding) -> str:
    types = sorted({f"{kind.type.label} ({kind.layout})" for kind, p in paddings.items() if p == padding})
    made = f"a multiple of {padding.multiple}" if padding.multiple > 1 else f"at least {padding.least}"
    return f"products with {', '.join(types)} weights are made of {made} rows"


def _named(product: Product) -> str:
    kind = product.kind
    return f"{kind.type.label} weights of {kind.shape[0]} x {kind.shape[1]} ({kind.layout})"


def _checked(
    forwards: Forwards,
    slots: Sequence[Slot],
    batching: Batching,
    found: Sequence[Agreement],
    limit: float | None,
) -> Batching:
    """The same as far as whole forwards agree; compared with up to `limit` multiplications, None for any.

    A device may compute a lone row's products otherwise in a graph than by themselves. Then all products are
    made of at least two rows; where that does not help, rows run one by one.
    """
    lone = sum(a.product.kind.shape[0] * a.product.n_out * a.product.n_times for a in found)
    n_rows = N_STEPS * batching.rows**2 / 2 + 3 * batching.verify_rows + 2 * batching.ragged_rows
    if limit is not None and lone * n_rows > limit:
        return batching
    before = forwards.batching
    reason = "whole forwards agree where products are made of at least 2 rows"
    every = replace(batching, mode="padded", paddings=Paddings(others=Padding(least=2)), reason=reason)
    try:
        for tried in (batching, every):
            forwards.use(tried)
            rows = _agreeing_rows(forwards, slots[: tried.rows])
            if rows > 1:
                width = _agreeing_width(forwards, slots[0], tried.verify_rows)
                ragged = _agreeing_ragged(forwards, slots, min(tried.ragged_rows, len(slots) * width), width)
                fewer = f"whole forwards agree over up to {rows} rows"
                reason = tried.reason if rows == tried.rows else fewer
                return replace(tried, rows=rows, verify_rows=width, ragged_rows=ragged, reason=reason)
    finally:
        forwards.use(before)
    reason = "whole forwards of two rows round otherwise than those of one"
    return Batching(mode="sequential", rows=1, exact=True, reason=reason)


def _text(forwards: Forwards, n: int) -> list[int]:
    return [(7919 * i + 13) % forwards.model.config.n_vocab for i in range(n)]


def _agreeing_rows(forwards: Forwards, slots: Sequence[Slot]) -> int:
    """The most slots over which a text gives the logits that it gives alone."""
    tokens = _text(forwards, N_STEPS)
    alone = _decoded(forwards, slots[:1], tokens)
    for n in range(2, len(slots) + 1):
        if _decoded(forwards, slots[:n], tokens) != [logits * n for logits in alone]:
            return n - 1
    return len(slots)


def _agreeing_width(forwards: Forwards, slot: Slot, most: int) -> int:
    """The most rows of a verify forward that give what decoding gives, and lead to the same state; else 1."""
    if most == 1:
        return 1
    tokens = _text(forwards, most + 1)
    alone = [logits for (logits,) in _decoded(forwards, [slot], tokens)]
    try:
        for n in range(most, 1, -1):
            slot.reset()
            found = _bits(forwards.verify(slot, tokens[:n]))
            forwards.commit(slot, width=n, n_keep=n)
            slot.commit(n)
            found.append(forwards.decode(slot, tokens[n]).tobytes())
            if found == alone[: n + 1]:
                return n
        return 1
    finally:
        slot.reset()


def _agreeing_ragged(forwards: Forwards, slots: Sequence[Slot], most: int, width: int) -> int:
    """The most rows, of those tried, of a verify forward over several slots that give what decoding gives.

    1 where not even a few do. Every slot keeps another number of rows, and must then be in the same state.
    """
    if width == 1:
        return 1
    tokens = _text(forwards, width + 1)
    alone = [logits for (logits,) in _decoded(forwards, slots[:1], tokens)]
    while most > 2:
        some = slots[: max(2, -(-most // width))]
        shares = [len(range(i, most, len(some))) for i in range(len(some))]
        try:
            found = _bits(forwards.verify_ragged(some, [tokens[:n] for n in shares]))
            expected = [alone[i] for n in shares for i in range(n)]
            for place, (slot, n) in enumerate(zip(some, shares, strict=True)):
                n_keep = 1 + place % n
                forwards.commit(slot, width=n, n_keep=n_keep, place=place)
                slot.commit(n_keep)
                found.append(forwards.decode(slot, tokens[n_keep]).tobytes())
                expected.append(alone[n_keep])
        finally:
            for slot in some:
                slot.reset()
        if found == expected:
            return most
        most //= 2
    return 1


def _decoded(forwards: Forwards, slots: Sequence[Slot], tokens: Sequence[int]) -> list[list[bytes]]:
    """Logits by token and slot, where all slots have the same text."""
    found = []
    for slot in slots:
        slot.reset()
    try:
        for token in tokens:
            found.append(_bits(forwards.decode_batch(slots, [token] * len(slots))))
            for slot in slots:
                slot.commit(1)
    finally:
        for slot in slots:
            slot.reset()
    return found
