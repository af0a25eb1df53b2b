"""Keys and values of every cache type give the logits of single-precision ones, but for their rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import KVType
from tests.reference.opened import Floats, OnOff, continued, on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

# The largest relative rounding of one number: half precision keeps 11 bits, bfloat16 8, q8_0 and q4_0 have
# 255 and 16 steps for the range of a block.
STEP: dict[KVType, float] = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254, "q4_0": 1 / 16}
# Logits move by at most so many steps, as root mean square in terms of their own spread. Most was 1.7: fused
# attention sums half-precision values in half precision.
STEPS = 3

IDS = tokens(280, seed=10)  # the last ones lie in the second bucket of the cache
N_PROMPT = 270


@pytest.fixture(scope="module", params=["llama", "qwen35", "qwen4exp"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("cache"), Tiny(architecture=request.param))


@pytest.fixture(scope="module", params=["on", "off"])
def flash_attn(request: pytest.FixtureRequest) -> OnOff:
    return "on" if request.param == "on" else "off"


def logits(model: Path, flash_attn: OnOff, k: KVType, v: KVType) -> Floats:
    """Of all tokens at once, then of the last ones decoded."""
    options = on_the_cpu(model, max_ctx=512, flash_attn=flash_attn, cache_type_k=k, cache_type_v=v)
    with open_core(options) as core:
        return np.array([*core.logits(IDS), *continued(core, IDS[:N_PROMPT], IDS[N_PROMPT:])])


@pytest.fixture(scope="module")
def exact(model: Path, flash_attn: OnOff) -> Floats:
    return logits(model, flash_attn, "f32", "f32")


def pairs() -> Iterator[tuple[KVType, KVType]]:
    """Each type for both, and each for one of them beside another."""
    for kind in STEP:
        yield kind, kind
    for kind in STEP:
        yield from ((kind, "f16"), ("f16", kind)) if kind != "f16" else ()
    yield from (("q8_0", "q4_0"), ("q4_0", "q8_0"), ("bf16", "q8_0"))


@pytest.mark.parametrize(("k", "v"), list(pairs()))
def test_logits_move_by_the_rounding_of_the_types(
    model: Path, flash_attn: OnOff, exact: Floats, k: KVType, v: KVType
) -> None:
    if flash_attn == "off" and v in ("q8_0", "q4_0"):
        with pytest.raises(UsageError, match=f"cache_type_v is '{v}'.*without flash attention"):
            logits(model, flash_attn, k, v)
        return
    found = logits(model, flash_attn, k, v)
    off = np.sqrt(np.mean((found - exact) ** 2)) / exact.std()
    assert off <= STEPS * max(STEP[k], STEP[v])
    assert off > 0 or k == v == "f32"


@pytest.mark.parametrize("which", ["cache_type_k", "cache_type_v"])
def test_heads_that_are_no_whole_blocks_are_refused(tmp_path: Path, which: str) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama", head_dim=16))
    quantised: dict[str, KVType] = {which: "q8_0"}
    options = on_the_cpu(
        path,
        cache_type_k=quantised.get("cache_type_k", "f16"),
        cache_type_v=quantised.get("cache_type_v", "f16"),
    )
    refused = pytest.raises(UsageError, match=f"{which} is 'q8_0'; heads of 16 .* blocks of 32: use f16")
    with refused, open_core(options):
        pass
