"""Of how many rows prompts may share a forward, so that each comes out as alone: measured. Layer 6.

What looks at several rows is a product with weights or sees one prompt alone. So each kind of product is made
of every number of rows up to the most that a shared forward has, of rows that all differ: from some number on
a row must have the same bits among any, wherever it stands. Found on a CPU with AVX-512 (ggml 0.25.3): from
one row on with Q8_0, Q4_0 and the like, from two with F32, F16, BF16 and IQ4_NL, from eight with K-quants and
i-quants; repacked Q4_K and Q2_K only if products are made of multiples of 4.

The last rows of prompts, which have logits, run as those of slots that decode together. Devices other than a
CPU may fuse products with what is around them: there whole forwards are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.batching import THREAD_WORK, Batching
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.joined_prompts import PromptRows
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.padding import Paddings
from pyggml_dflash.ggml.products import Product, ProductRunner, Window
from pyggml_dflash.state.slot import Slot

ROWS: Final = (128, 96, 64, 48, 32)  # of a shared forward; what is tried first in front
MOST_WORK: Final = 4e12  # multiplications for looking at all smaller numbers of rows: about a second
N_COMPARED: Final = 128  # results of each number of rows, at least, where that takes few windows
MOST_WINDOWS: Final = 4  # of each number of rows


def joined_anyhow(forwards: Forwards, batching: Batching) -> Batching:
    """Prompts share forwards where they can, whatever that does to their rounding."""
    why = forwards.why_prompts_run_alone
    if why is not None:
        return replace(batching, joined_reason=why)
    every = range(1, forwards.most_joined + 1)
    return replace(batching, joined_rows=every, joined_reason=batching.reason)


def measure_joined(
    forwards: Forwards, slots: Sequence[Slot], backend: Backend, ledger: Ledger, batching: Batching
) -> Batching:
    """How prompts may share forwards where slots decode as was found. Slots must be idle, and are reset."""
    why = forwards.why_prompts_run_alone
    if why is None and batching.rows == 1:
        why = batching.reason
    if why is not None:
        return replace(batching, joined_reason=why)
    head = forwards.head_kind
    wanted = [product for product in forwards.products() if product.kind != head or product.n_times > 1]
    work = sum(product.kind.shape[0] * product.n_out for product in wanted)  # of a row
    on_cpu = backend.info.kind in ("cpu", "rpc")
    limit = THREAD_WORK * max(1, backend.n_threads) if on_cpu else MOST_WORK
    why = "comparing products of many rows would take too long"
    for most in sorted({min(n, forwards.most_joined) for n in ROWS}, reverse=True):
        if work * most * most / 2 > limit:
            continue
        try:
            joined = _joined(backend, ledger, wanted, most, batching)
        except DeviceMemoryError:
            why = f"comparing products of {most} rows needs more memory than there is"
            continue
        if not joined.joined_rows or forwards.is_host or _agree(forwards, slots, joined):
            return joined
        why = "whole forwards of several prompts round otherwise than those of one"
        break
    return replace(batching, joined_reason=why)


def _joined(
    backend: Backend, ledger: Ledger, wanted: Sequence[Product], most: int, batching: Batching
) -> Batching:
    """As far as products tell, with up to `most` rows; raises `DeviceMemoryError`."""
    with closing(ProductRunner(backend, ledger, wanted, most, most)) as runner:
        least = 1
        for product in wanted:
            least = max(least, _least(runner, product, batching.paddings, most, least))
            if 2 * least > most:
                return replace(batching, joined_reason=f"{_named(product)} round otherwise for fewer rows")
    reason = f"rows are the same among {least} to {most}"
    return replace(batching, joined_rows=range(least, most + 1), joined_reason=reason)


def _named(product: Product) -> str:
    return f"products with {product.kind.type.label} weights ({product.kind.layout})"


def _least(runner: ProductRunner, product: Product, paddings: Paddings, most: int, least: int) -> int:
    """From how many rows on, at least `least`, all numbers up to `most` give each row the same bits.

    How many rows of a forward choose an expert cannot be known: one row has to give what any number does.
    """
    if not product.n_used:
        return _first_of_alike(runner, product, paddings, most, least)
    alike = all(
        _first_of_alike(runner, product, paddings, most, 1, apart=apart) == 1 for apart in (False, True)
    )
    return least if alike else most


def _first_of_alike(
    runner: ProductRunner,
    product: Product,
    paddings: Paddings,
    most: int,
    least: int,
    *,
    apart: bool = False,
) -> int:
    windows = list(_windows(product, most, least))
    agreeing = runner.agreeing(product, most, windows, paddings, apart=apart)
    others = (n for (_, n), agrees in zip(windows, agreeing, strict=True) if not agrees)
    return max(others, default=least - 1) + 1


def _windows(product: Product, most: int, least: int) -> Iterator[Window]:
    """Windows into `most` rows, of every number from `least` on."""
    for n in range(least, most):
        for i in range(min(MOST_WINDOWS, -(-N_COMPARED // (n * product.n_out)))):
            yield (37 * (n + i)) % (most - n + 1), n


def _agree(forwards: Forwards, slots: Sequence[Slot], joined: Batching) -> bool:
    """Whether prompts of the fewest and of other numbers of rows leave the same as alone, in one forward."""
    before = forwards.batching
    forwards.use(joined)
    try:
        limits = forwards.prompt_limits
        least, most = joined.joined_rows.start, limits.most_rows
        lengths = (least, max(least, most - least - 1))
        if sum(lengths) > most:
            return True  # no two prompts share a forward
        texts = [_text(forwards, n, seed) for seed, n in enumerate(lengths)]
        alone = list[tuple[bytes, bytes]]()
        for text in texts:
            slot = slots[len(alone)]
            slot.reset()
            logits = forwards.prefill(slot, text, "last")
            assert logits is not None
            alone.append(_and_behind(forwards, slot, text, logits[0]))
        for slot in slots[:2]:
            slot.reset()
        prompts = [PromptRows(slot, text, "last", False) for slot, text in zip(slots, texts, strict=False)]
        rows = forwards.prefill_together(prompts)
        assert rows is not None
        pairs = zip(slots, texts, rows, strict=False)
        return [_and_behind(forwards, slot, text, row) for slot, text, row in pairs] == alone
    finally:
        for slot in slots[:2]:
            slot.reset()
        forwards.use(before)


def _and_behind(
    forwards: Forwards, slot: Slot, text: Sequence[int], logits: npt.NDArray[np.float32]
) -> tuple[bytes, bytes]:
    """A prompt's logits, and those of a token behind it, which tell of the state."""
    slot.commit(len(text))
    return logits.tobytes(), forwards.decode(slot, text[0]).tobytes()


def _text(forwards: Forwards, n: int, seed: int) -> list[int]:
    return [(7919 * i + 13 + 101 * seed) % forwards.model.config.n_vocab for i in range(n)]
