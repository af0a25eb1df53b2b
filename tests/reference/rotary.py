"""Rotary position embedding in double precision, with the published ways to stretch it.

Linear: positions are divided by the factor. YaRN (arXiv 2309.00071): dimensions that turn often within the
trained context keep their speed, those that turn seldom are slowed down by the factor, with a ramp over the
dimensions between; queries and keys grow by 1 + 0.1 ln(factor).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Rotary:
    """Angles per position from a model's metadata, read through `key(name, default)`."""

    def __init__(self, key: Callable[..., Any], head_dim: int, factors: Array | None) -> None:
        self.n_dims = int(key("rope.dimension_count", head_dim))
        self.base = float(key("rope.freq_base", 10000.0))
        speeds: Array = self.base ** (-np.arange(0, self.n_dims, 2) / self.n_dims)
        self.size = 1.0
        old = float(key("rope.scale_linear", 1.0))  # the factor where the file names no kind
        kind = str(key("rope.scaling.type", "none" if old == 1 else "linear"))
        if kind == "linear":
            speeds = speeds / float(key("rope.scaling.factor", old))
        elif kind == "yarn":
            factor = float(key("rope.scaling.factor"))
            trained = int(key("rope.scaling.original_context_length", key("context_length")))
            fast, slow = key("rope.scaling.yarn_beta_fast", 32.0), key("rope.scaling.yarn_beta_slow", 1.0)
            share = self._slowed(trained, float(fast), float(slow))
            speeds = speeds / factor * share + speeds * (1 - share)
            self.size = (1 + 0.1 * math.log(factor)) * float(key("rope.scaling.attn_factor", 1.0))
        self.speeds: Array = speeds if factors is None else speeds / factors

    def _slowed(self, trained: int, fast: float, slow: float) -> Array:
        """Per pair of dimensions: 0 keeps its speed, 1 is slowed down by the whole factor."""

        def pair_that_turns(times: float) -> float:
            return self.n_dims * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(math.floor(pair_that_turns(fast)), 0)
        high = min(math.ceil(pair_that_turns(slow)), self.n_dims - 1)
        ramp = (np.arange(self.n_dims // 2) - low) / max(high - low, 0.001)
        return np.asarray(np.clip(ramp, 0, 1))

    def turn(self, x: Array, *, halves: bool) -> Array:
        """x [n_tokens, head, head_dim] at positions 0, 1, ...; pairs are (i, i + n/2), or neighbours."""
        angles = np.arange(len(x))[:, None, None] * self.speeds
        cos, sin = self.size * np.cos(angles), self.size * np.sin(angles)
        n, out = self.n_dims, np.array(x, np.float64)
        first, second = (slice(0, n // 2), slice(n // 2, n)) if halves else (slice(0, n, 2), slice(1, n, 2))
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out
