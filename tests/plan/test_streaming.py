"""Experts are streamed as asked, or from so many rows on beside a GPU; what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, get_args

import pytest

from pyggml_dflash import UsageError
from pyggml_dflash.options import EngineOptions, HostMemory
from pyggml_dflash.plan.streaming import AUTO_ROWS, StreamRequest, choose_streaming

BESIDE_A_GPU: Final = StreamRequest(
    rows="auto", memory="pageable", repacks=False, most_rows=4096, target="gpu", experts="cpu"
)
OBSTACLES: Final = (
    ({"experts": None}, "no other device has experts in host memory"),
    ({"experts": "rpc"}, "no other device has experts in host memory"),
    ({"target": "cpu"}, "no other device has experts in host memory"),
    ({"repacks": True}, "experts in CPU layouts cannot be copied"),
    ({"lacks": "'blk.0.ffn_up_exps.weight' of type iq1_m"}, "cannot compute with 'blk.0.ffn_up_exps.weight'"),
)


def request(**options: Any) -> StreamRequest:
    return replace(BESIDE_A_GPU, **options)


@pytest.mark.parametrize("memory", get_args(HostMemory))
def test_experts_beside_a_gpu_are_streamed_from_a_fixed_number_of_rows_on(memory: HostMemory) -> None:
    found = choose_streaming(request(memory=memory))
    assert (found.rows, found.pinned, found.may_be_left_out) == (AUTO_ROWS[memory], memory == "pinned", True)


def test_pinned_memory_pays_for_fewer_rows_and_a_target_without_it_waits_for_more() -> None:
    pinned = choose_streaming(request(memory="pinned"))
    assert AUTO_ROWS["pinned"] < AUTO_ROWS["pageable"]
    assert pinned.in_ordinary_memory == choose_streaming(BESIDE_A_GPU)
    asked = choose_streaming(request(memory="pinned", rows=300))
    assert asked.in_ordinary_memory == choose_streaming(request(rows=300))


def test_a_number_is_used_as_given_and_off_means_never() -> None:
    found = choose_streaming(request(rows=300, target="rpc"))
    assert (found.rows, found.may_be_left_out) == (300, False)
    assert choose_streaming(request(rows=0)).rows == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *OBSTACLES,
        ({"target": "rpc"}, "over a network"),
        ({"most_rows": 1023}, "no chunk has 1024 rows"),
    ],
)
def test_auto_leaves_them_where_streaming_cannot_work_or_pay(options: dict[str, Any], reason: str) -> None:
    found = choose_streaming(request(**options))
    assert (found.rows, found.may_be_left_out) == (0, False)
    assert reason in found.reason
    few = {**options, "most_rows": AUTO_ROWS["pinned"] - 1} if "most_rows" in options else options
    with pytest.raises(UsageError, match="expert_memory is 'pinned'"):
        choose_streaming(request(memory="pinned", **few))


@pytest.mark.parametrize(("options", "reason"), OBSTACLES)
def test_a_number_that_cannot_be_used_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"stream_experts is 2048; .*{reason}"):
        choose_streaming(request(rows=2048, **options))


@pytest.mark.parametrize("rows", [-1, 1, 127, True, None, "on", 2.0])
def test_rows_that_decoded_tokens_may_have_are_refused(rows: Any) -> None:
    with pytest.raises(UsageError, match="stream_experts is "):
        EngineOptions(stream_experts=rows)
