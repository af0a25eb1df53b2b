"""Which cache rows a sparse attention layer reads: sizes, form, and the inputs of its indexer. Layer 4.

Every `ratio` consecutive tokens of a sequence, counted from its start, are a group. A complete group has
one pooled key: the mean of its tokens' raw keys, normalised, rotated at its first position. A query
scores the pooled keys of the groups that are complete at its position and attends to the tokens of the
best ones, plus to the tokens behind the last complete group, its tail. As long as no group has to be
left out, that is plain causal attention.

Everything here is arithmetic on numbers and arrays; the graph's part is in `sparse`. Cache rows of a
slot are its tokens in order. Raw keys live in a ring, since only the group that is being filled, and
tokens that are taken back, read them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pyggml_dflash.ggml.element import ElementType

MAX_TAKEN_BACK: Final = 64  # rows of one forward that may be taken back; more need a larger ring
# Budgets in the cache from which copies of the chosen rows cost less than a mask over all of them, on a CPU
# (docs/measurements/sparse-attention-cpu.md).
GATHER_FROM: Final = 8
MAX_GATHERED: Final = 512  # rows of a forward that gathers on a host device
MAX_GATHERED_GPU: Final = 8  # elsewhere: a product over the whole cache is cheaper than copies of many rows
GATHER_STEP: Final = 256  # gathered cache rows; GPU attention kernels want multiples of it
MAX_RATIO: Final = 64  # tokens of a group; a power of two, so that cache buckets hold whole groups

# How a forward attends: to every earlier row, to chosen rows through a mask over all of them, or to
# copies of the chosen rows.
AttentionForm = Literal["dense", "masked", "gathered"]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The indexer's sizes. `ratio` is a power of two up to `MAX_RATIO` and divides `budget`."""

    n_head: int
    head_dim: int
    budget: int  # tokens of chosen groups
    ratio: int  # tokens of a group

    @property
    def n_chosen(self) -> int:
        """Groups that a query chooses."""
        return self.budget // self.ratio

    @property
    def dense_limit(self) -> int:
        """Visible tokens up to which a query attends to all of them."""
        return self.budget + self.ratio - 1

    @property
    def n_raw(self) -> int:
        """Rows of a slot's ring of raw keys."""
        return MAX_TAKEN_BACK + self.ratio

    @property
    def n_gathered(self) -> int:
        """Groups that a gathered row reads: the chosen ones, its tail, and what fills up the last step."""
        step = GATHER_STEP // self.ratio
        return -(-(self.n_chosen + 1) // step) * step

    @property
    def n_tail(self) -> int:
        """Groups that a gathered row reads behind the chosen ones; the first is its tail."""
        return self.n_gathered - self.n_chosen

    def n_new(self, n_tokens: int) -> int:
        """Groups that a forward pools: as many as its rows can complete."""
        return -(-n_tokens // self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows of a forward: `n_tokens` behind `n_past` of one slot, which see `n_kv` cache rows.

    `n_kv` and `n_ctx` are whole numbers of groups. `first_position` is that of the slot's first row.
    """

    n_past: int
    n_tokens: int
    n_kv: int
    slot: int
    n_ctx: int  # cache rows of a slot
    first_position: int = 0


def attention_form(
    config: IndexerConfig, *, n_past: int, n_tokens: int, n_kv: int, host: bool = False
) -> AttentionForm:
    """How a forward attends, on a `host` device or another; part of its graph's key.

    Up to `n_past + n_tokens == config.dense_limit` every row sees everything.
    """
    if n_past + n_tokens <= config.dense_limit:
        return "dense"
    all_choose = n_past + 1 > config.dense_limit
    few = n_tokens <= (MAX_GATHERED if host else MAX_GATHERED_GPU)
    return "gathered" if all_choose and few and n_kv >= GATHER_FROM * config.budget else "masked"


def index_inputs(config: IndexerConfig, max_rows: int, max_kv: int) -> dict[str, tuple[ElementType, int]]:
    """Inputs that forwards of up to `max_rows` rows and `max_kv` cache rows read: type, elements."""
    n_new, n_gather = config.n_new(max_rows), min(max_rows, MAX_GATHERED)
    return {
        "index.raw_rows": (ElementType.I64, min(max_rows, config.n_raw)),
        "index.members": (ElementType.I32, n_new * config.ratio),
        "index.groups": (ElementType.I64, n_new),
        "index.positions": (ElementType.I32, n_new),
        "index.mask": (ElementType.F16, max_rows * (max_kv // config.ratio)),
        "index.tails": (ElementType.I32, max(max_rows, n_gather * config.n_tail)),
        "index.gathered_mask": (ElementType.F16, n_gather * config.n_gathered * config.ratio),
    }


def fill_index(arrays: Arrays, config: IndexerConfig, form: AttentionForm, span: Span) -> dict[str, int]:
    """Write the inputs of a forward into flat arrays; by name, how many elements were written."""
    assert span.n_past + span.n_tokens <= span.n_kv <= span.n_ctx
    counts = _fill_keys(arrays, config, span)
    if form == "dense":
        return counts
    n_visible = range(span.n_past + 1, span.n_past + span.n_tokens + 1)  # cache rows, per row of the forward
    n_complete = [n // config.ratio for n in n_visible]
    counts["index.mask"] = _fill_mask(arrays["index.mask"], n_complete, span.n_kv // config.ratio)
    if form == "masked":
        arrays["index.tails"][: span.n_tokens] = n_complete
        counts["index.tails"] = span.n_tokens
    else:
        counts |= _fill_gathered(arrays, config, span, n_complete)
    return counts


def _fill_keys(arrays: Arrays, config: IndexerConfig, span: Span) -> dict[str, int]:
    """Where raw keys go, and which of them make which groups.

    Members are rows of the ring with the forward's raw keys behind it. The last group may still lack
    tokens. Then it is pooled from what is there: no query sees it before it is complete, and then it
    is pooled again.
    """
    n_raw, ratio, n_past, n_tokens = config.n_raw, config.ratio, span.n_past, span.n_tokens
    n_kept, n_new, end = min(n_tokens, n_raw), config.n_new(n_tokens), n_past + n_tokens
    own = span.slot * n_raw
    arrays["index.raw_rows"][:n_kept] = [own + rank % n_raw for rank in range(end - n_kept, end)]

    first = n_past // ratio
    start, stop = first * ratio, (first + n_new) * ratio  # the members' ranks in the sequence
    assert stop <= span.n_ctx
    stored, fresh = range(start, n_past), range(n_raw, n_raw + min(stop, end) - n_past)
    lacking = [n_raw] * (stop - end)
    arrays["index.members"][: stop - start] = [*(rank % n_raw for rank in stored), *fresh, *lacking]
    own = span.slot * (span.n_ctx // ratio) + first
    arrays["index.groups"][:n_new] = range(own, own + n_new)
    arrays["index.positions"][:n_new] = range(span.first_position + start, span.first_position + stop, ratio)
    return {
        "index.raw_rows": n_kept,
        "index.members": stop - start,
        "index.groups": n_new,
        "index.positions": n_new,
    }


def _fill_mask(flat: npt.NDArray[Any], n_complete: list[int], n_pool: int) -> int:
    """Row i sees the first `n_complete[i]` groups."""
    n_tokens, low, high = len(n_complete), n_complete[0], n_complete[-1]
    mask = flat[: n_tokens * n_pool].reshape(n_tokens, n_pool)
    mask[:, :low] = 0
    mask[:, high:] = -np.inf
    if high > low:
        sees = np.arange(low, high) < np.array(n_complete)[:, None]
        mask[:, low:high] = np.where(sees, 0, -np.inf)
    return n_tokens * n_pool


def _fill_gathered(
    arrays: Arrays, config: IndexerConfig, span: Span, n_complete: list[int]
) -> dict[str, int]:
    """The tail's group of each row, and which gathered cache rows it sees: chosen groups, then its tail."""
    n_tokens, n_tail, n, budget = (
        span.n_tokens,
        config.n_tail,
        config.n_gathered * config.ratio,
        config.budget,
    )
    tails = arrays["index.tails"][: n_tokens * n_tail].reshape(n_tokens, n_tail)
    mask = arrays["index.gathered_mask"][: n_tokens * n].reshape(n_tokens, n)
    tails[:] = 0
    mask[:, :budget] = 0
    mask[:, budget:] = -np.inf
    last = span.n_kv // config.ratio - 1
    for i, group in enumerate(n_complete):
        tails[i, 0] = min(group, last)  # a full cache has an empty tail behind its last group
        mask[i, budget : budget + span.n_past + i + 1 - group * config.ratio] = 0
    return {"index.tails": n_tokens * n_tail, "index.gathered_mask": n_tokens * n}
