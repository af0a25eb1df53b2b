"""On the CPU few rows of a prompt fill tiles of flash attention: the same numbers but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.arch.tiled import LEAST_ROWS, MOST_ROWS, TILE_ROWS, joined_heads, mask_rows
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.options import KVType, Switch
from tests.engine.tiny import opened, prompt
from tests.tiny import Tiny, write_tiny

N_CTX = 512
PAST = 150  # no multiple of the kernel's steps over the cache


def last_logits(path: Path, flash_attn: Switch, kv: KVType, sizes: range, **options: object) -> list[object]:
    """Logits behind prompts of `PAST` tokens and `sizes` more, these in one forward."""

    def run(core: EngineCore) -> list[object]:
        slot, found = core.slots[0], []
        for n in sizes:
            slot.reset()
            tokens = [t % 200 for t in prompt(PAST + n)]
            core.prefill(slot, tokens[:PAST], last=False)
            rows = core.prefill(slot, tokens[PAST:], last=True)
            assert rows is not None
            found.append(rows.copy())
        return found

    keys = {"cache_type_k": kv, "cache_type_v": kv, "max_ctx": N_CTX, "chunk": PAST}
    with opened(path, flash_attn=flash_attn, **keys, **options) as engine:
        return engine._thread.call(lambda core, _: run(core))


@pytest.mark.parametrize("n_head_kv", [1, 3, 6])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_every_remainder_gives_what_attention_without_flash_gives(
    architecture: str, n_head_kv: int, tmp_path: Path
) -> None:
    tiny = Tiny(architecture=architecture, n_head=6, n_head_kv=n_head_kv, n_layer=2)
    path = write_tiny(tmp_path, tiny)
    sizes = range(1, TILE_ROWS + 2)
    tiled, plain = (last_logits(path, flash, "f32", sizes) for flash in ("on", "off"))
    np.testing.assert_allclose(tiled, plain, atol=1e-4)


def test_threads_do_not_show_in_the_rows_of_a_tile(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen3", n_head=6, n_head_kv=2))
    sizes = range(5, TILE_ROWS, 7)
    one, three = (last_logits(path, "auto", "f16", sizes, threads=n) for n in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_rows_of_joined_heads_fill_the_fewest_tiles() -> None:
    for n_sharing in (1, 2, 3, 4, 6, 8, 16):
        for n in range(2, TILE_ROWS):
            joined, made = joined_heads(n, n_sharing), mask_rows(n, n_sharing)
            assert made % n == 0
            if not joined:
                assert made == n < LEAST_ROWS
                continue
            tiles = n_sharing // joined * -(-joined * n // TILE_ROWS)
            assert n_sharing % joined == 0
            assert tiles <= n_sharing, "more work than each head in a tile of its own"
            assert max(TILE_ROWS, joined * n) <= made < MOST_ROWS + n
        assert joined_heads(1, n_sharing) == joined_heads(TILE_ROWS, n_sharing) == 0
    assert joined_heads(4, 1) == 0
    assert (joined_heads(21, 3), joined_heads(34, 3), joined_heads(63, 3)) == (3, 3, 1)


@pytest.mark.parametrize(("k", "v"), [("f16", "f16"), ("f32", "f32"), ("q8_0", "q8_0"), ("f16", "f32")])
def test_only_prompts_over_caches_that_have_tiles_fill_them(k: KVType, v: KVType, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama"))
    with opened(path, max_ctx=N_CTX, cache_type_k=k, cache_type_v=v) as engine:
        model = engine._thread.call(lambda core, _: core._forwards.model)
    rest = {"n_kv": 256, "slot": 0}
    assert model.in_tiles(GraphKey(n_tokens=34, output="last", **rest)) is (k == v != "q8_0")
    for n in (1, TILE_ROWS):
        assert not model.in_tiles(GraphKey(n_tokens=n, output="last", **rest))
    assert not model.in_tiles(GraphKey(n_tokens=8, output="all", update="replay", **rest))
