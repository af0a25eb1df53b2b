"""Keys and values of some layers on another device, where the target's memory binds. Layer 6."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from pyggml_dflash.engine.assembly import Blueprint, first_ctx
from pyggml_dflash.engine.fit import Planner, find_fit
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.plan.context import ContextChoice

LOG: Final = logging.getLogger(__name__)
Found = tuple[Planner, ContextChoice]


def find_fit_with_overflow(blueprint: Blueprint, ledger: Ledger, stack: ExitStack) -> Found:
    """The largest context, with as few layers moved as it takes where another device may hold some.

    The more layers are moved, the larger the context, until the other device binds: the turning point is
    found by halving. `stack` closes planners.
    """
    planner, choice = find_fit(blueprint, ledger, stack)
    split, layers = blueprint.split, blueprint.config.attention_layers
    if split.kv_device is None or not _target_binds(planner, choice):
        return planner, choice
    tried: dict[int, Found] = {0: (planner, choice)}

    def moved(n: int) -> Found:
        if n not in tried:
            there = replace(split, kv_layers=frozenset(layers[len(layers) - n :]))
            tried[n] = find_fit(replace(blueprint, split=there), ledger, stack)
        return tried[n]

    turn = first_that(lambda n: not _target_binds(*moved(n)), 1, len(layers))
    for n in (turn, turn - 1):
        moved(n)
    best = max(tried, key=lambda n: (_n_ctx(tried[n][1]), -n))
    if best:
        name = split.devices[split.kv_device]
        LOG.info("keys and values of %d of %d layers lie on %s", best, len(layers), name)
    return tried[best]


def first_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first number for which something holds that goes on holding; the last if it never does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _target_binds(planner: Planner, choice: ContextChoice) -> bool:
    """True if a larger context was missed for memory of the target."""
    if _n_ctx(choice) >= first_ctx(planner.options, planner.config):
        return False
    miss = choice.smallest_miss
    return miss is not None and miss.device == planner.blueprint.backend.name


def _n_ctx(choice: ContextChoice) -> int:
    return 0 if choice.plan is None else choice.plan.n_ctx
