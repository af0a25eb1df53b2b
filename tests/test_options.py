"""Options and requests take what can be used as it is, and refuse the rest with its value."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pyggml_dflash import EngineOptions, GenerationRequest, SamplingOptions, UsageError
from pyggml_dflash.options import Margin, parse_trim_interval, split_max_ctx

Options = type[EngineOptions] | type[SamplingOptions] | type[GenerationRequest]

STRANGE: list[Any] = [
    True, 0, -1, 10**400, -(10**400), 10**5000, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, 1j,
    "", "x", "5", "on", "\ud800", b"x", [], [1], (), (1,), ("",), ("a", 1), {}, {1: "a"}, {"a": 1.0},
    {1: None}, {1: 10**400}, {1: math.nan}, {-1: 1.0}, {True: 1.0}, {1: np.float32(1)}, {np.int64(1): 1.0},
    np.int64(5), np.float32(0.5), np.bool_(True), np.array([1, 2]), np.array([]), object(), Path("x"), len,
]  # fmt: skip


def fields_of(*classes: Options) -> list[tuple[Options, str]]:
    return [(options, field.name) for options in classes for field in dataclasses.fields(options)]


def made(options: Options, **values: Any) -> Any:
    given = {"tokens": (1,), **values} if options is GenerationRequest else values
    return options(**given)


@pytest.mark.parametrize(("options", "name"), fields_of(EngineOptions, SamplingOptions, GenerationRequest))
def test_a_value_is_kept_as_given_or_refused_by_name(options: Options, name: str) -> None:
    for value in STRANGE:
        message = ""
        try:
            kept = getattr(made(options, **{name: value}), name)
        except UsageError as error:
            message = str(error)
        if message:
            assert name in message or (name == "tokens" and "prompt" in message)
            assert len(message) < 300
        else:
            assert kept is value or (kept == value and type(kept) is type(value))


def test_defaults_are_accepted_and_greedy() -> None:
    assert EngineOptions() == EngineOptions()
    assert SamplingOptions().greedy
    assert not SamplingOptions().changes_logits
    assert GenerationRequest(tokens=(1, 2)).sampling == SamplingOptions()


@pytest.mark.parametrize(
    ("options", "name", "good", "bad"),
    [
        (EngineOptions, "max_ctx", [1, 2**31 - 1], [0, 2**31, 4096.0, "32k"]),
        (EngineOptions, "chunk", ["auto", 1, 32768], [0, 32769, "512", None]),
        (EngineOptions, "threads", [None, 1, 512], [0, 513]),
        (EngineOptions, "model", [None, Path("x")], ["x"]),
        (EngineOptions, "device", [None, "CPU"], [0, b"CPU"]),
        (EngineOptions, "cache_type_k", ["f32", "f16", "bf16", "q8_0", "q4_0"], ["q5_0", "F16", None]),
        (EngineOptions, "cache_type_v", ["f32", "f16", "bf16", "q8_0", "q4_0"], ["q5_0", "F16", None]),
        (EngineOptions, "flash_attn", ["auto", "on", "off"], [True, "yes", None]),
        (EngineOptions, "repack", ["auto", "on", "off"], [True, "yes", None]),
        (EngineOptions, "spec", ["auto", "off", "dflash", "mtp"], ["on", True, None]),
        (EngineOptions, "spec_width", ["auto", 2, 16], [1, 17, "4", None]),
        (EngineOptions, "nfc", [True, False], [1, "no", None]),
        (EngineOptions, "prefill_share", [0, 0.25, 1.0], [-0.1, 1.1, "1", None, True]),
        (EngineOptions, "admission_coalesce_ms", [0, 20, 1000], [-1, 1001, 0.5, None]),
        (EngineOptions, "allow_batch_variance", [True, False], [1, "no", None]),
        (EngineOptions, "draft", [None, Path("x")], ["x", b"x"]),
        (EngineOptions, "chat_template", [None, Path("x")], ["x", b"x", 0]),
        (EngineOptions, "expert_placement", [None, Path("x")], ["x", b"x", 0]),
        (EngineOptions, "kv_cache_dir", [None, Path("x")], ["x", b"x", 0]),
        (EngineOptions, "draft_causal", ["auto", "none", "swa", "all"], [None, False, "SWA", "full"]),
        (SamplingOptions, "temperature", [0, 0.0, 1e-30, 100], [-0.1, 100.1, None]),
        (SamplingOptions, "top_k", [0, 1, 2**31 - 1], [-1, 1.0, 2**31]),
        (SamplingOptions, "top_p", [1e-9, 0.5, 1], [0, 0.0, 1.1]),
        (SamplingOptions, "min_p", [0, 0.5, 1], [-0.1, 1.1]),
        (SamplingOptions, "repetition_penalty", [1e-9, 1, 100], [0, -1, 100.1]),
        (SamplingOptions, "frequency_penalty", [-100, 0, 100], [-101, 101]),
        (SamplingOptions, "presence_penalty", [-100, 0, 100], [-101, 101]),
        (SamplingOptions, "seed", [None, 0, 2**63 - 1], [-1, 2**63, 1.0]),
        (
            SamplingOptions,
            "logit_bias",
            [{}, {0: 1}, {5: -math.inf}, {5: math.inf}, {2**40: -1e308}],
            [[(1, 1.0)], {1: 10**309}, {"1": 1.0}],
        ),
        (GenerationRequest, "tokens", [(0,), (1, 2)], [(), [1], (1, -1), (True,), (1.0,), "ab", b"ab"]),
        (GenerationRequest, "max_tokens", [None, 1, 2**31 - 1], [0, -1, 2**31, 1.0]),
        (GenerationRequest, "stop", [(), ("a", "\n")], ["a", ["a"], ("",), (b"a",), None]),
        (GenerationRequest, "logprobs", [None, 0, 100], [-1, 101, True]),
        (GenerationRequest, "sampling", [SamplingOptions(seed=1)], [None, {}]),
        (GenerationRequest, "spec", [None, "auto", "off", "dflash", "mtp"], ["on", True]),
        (GenerationRequest, "spec_width", [None, "auto", 2, 16], [1, 17, "4", True]),
        (GenerationRequest, "ignore_eos", [True, False], [1, None]),
    ],
)
def test_limits_are_part_of_what_is_allowed(
    options: Options, name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert getattr(made(options, **{name: value}), name) == value
    for value in bad:
        with pytest.raises(UsageError, match=" is "):
            made(options, **{name: value})


def test_a_refusal_quotes_the_value_and_says_what_would_work() -> None:
    for call, words in (
        (lambda: EngineOptions(max_ctx=0), "max_ctx is 0; it must be a whole number of at least 1"),
        (
            lambda: EngineOptions(cache_type_k=cast(Any, "q5_0")),
            "cache_type_k is 'q5_0'; it must be one of f32",
        ),
        (lambda: SamplingOptions(top_p=0), "top_p is 0; it must be a number above 0 up to 1"),
        (
            lambda: SamplingOptions(logit_bias={7: math.nan}),
            "logit_bias of token 7 is nan; it must be a number",
        ),
        (lambda: GenerationRequest(tokens=()), "prompt is ''; it must have at least one token"),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert str(raised.value).startswith(words)


def test_a_refusal_is_short_whatever_was_given() -> None:
    with pytest.raises(UsageError) as raised:
        EngineOptions(flash_attn="x" * 10_000)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 200
    with pytest.raises(UsageError, match="thousands of digits"):
        SamplingOptions(seed=10**5000)


def test_a_quantised_value_cache_needs_fused_attention() -> None:
    for kind in ("q8_0", "q4_0"):
        with pytest.raises(UsageError, match="without flash attention"):
            EngineOptions(cache_type_v=kind, flash_attn="off")
        EngineOptions(cache_type_k=kind, flash_attn="off")
        EngineOptions(cache_type_v=kind)


def test_options_do_not_change_once_they_are_made() -> None:
    biases = {1: 2.0}
    sampling = SamplingOptions(logit_bias=biases)
    biases[2] = math.nan
    assert sampling.logit_bias == {1: 2.0}
    for value in (EngineOptions(), sampling, GenerationRequest(tokens=(1,))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)
        assert pickle.loads(pickle.dumps(value)) == value
        assert dataclasses.replace(value) == value


@pytest.mark.parametrize(
    ("changes", "greedy", "moves"),
    [
        ({}, True, False),
        ({"temperature": 1}, False, False),
        ({"temperature": 1, "top_k": 1}, True, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"presence_penalty": -1}, True, True),
        ({"frequency_penalty": 0.5, "temperature": 1}, False, True),
        ({"logit_bias": {1: 0.0}}, True, True),
    ],
)
def test_what_sampling_does_follows_from_its_options(
    changes: dict[str, Any], greedy: bool, moves: bool
) -> None:
    sampling = SamplingOptions(**changes)
    assert (sampling.greedy, sampling.changes_logits) == (greedy, moves)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("", 0),
        ("0", 0),
        ("8192", 8192),
        (" 8192 ", 8192),
        ("\t007\t", 7),
        ("2147483647", 2**31 - 1),
        ("auto", "auto"),
        ("off", 0),
        ("-1", None),
        ("+1", None),
        ("8k", None),
        ("0x10", None),
        ("99999999999", None),
        ("2147483648", None),
        ("12.5", None),
        ("8 192", None),
        ("8192\n", None),
        ("٣", None),
        ("9" * 5000, None),
    ],
)
def test_a_trim_interval_is_digits_with_blanks_around_them(text: str, interval: object) -> None:
    assert parse_trim_interval(text) == interval


@pytest.mark.parametrize(
    "name",
    [
        "max_ctx",
        "chunk",
        "spec_width",
        "stream_experts",
        "prompt_streams",
        "trim_interval",
        "prefix_cache_max_mib",
    ],
)
@pytest.mark.parametrize("value", ["many", -1])
def test_a_refusal_tells_where_auto_works(name: str, value: Any) -> None:
    EngineOptions(**{name: "auto"})
    with pytest.raises(UsageError, match=f"{name} is {value!r}; .*'auto'"):
        EngineOptions(**{name: value})


@pytest.mark.parametrize("value", ["auto", "auto:1", "auto:32768", 1, None])
def test_a_context_is_a_number_or_what_fits(value: int | str | None) -> None:
    assert EngineOptions(max_ctx=value).max_ctx == value


@pytest.mark.parametrize(
    "value", ["auto:0", "auto:", "auto:x", "auto:-1", "Auto", "8192", "auto:8k", " auto"]
)
def test_other_words_for_a_context_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"max_ctx is .*'auto:N'"):
        EngineOptions(max_ctx=value)


def test_a_context_that_fits_may_have_a_limit() -> None:
    assert split_max_ctx(8192) == (False, 8192)
    assert split_max_ctx("auto") == (True, None)
    assert split_max_ctx("auto:65536") == (True, 65536)


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        ("10%", Margin(part=0.1)),
        ("7.5%", Margin(part=0.075)),
        ("0%", Margin(part=0.0)),
        ("512", Margin(n_bytes=512 * 2**20)),
        ("0.5MiB", Margin(n_bytes=2**19)),
        ("0", Margin(n_bytes=0)),
    ],
)
def test_a_margin_is_a_part_or_bytes(text: str, margin: Margin) -> None:
    assert Margin.parse(text) == margin


@pytest.mark.parametrize("text", ["", "91%", "-5%", "10 %", "512GiB", "x", "1e3", "nan"])
def test_other_margins_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="fit_margin is"):
        EngineOptions(fit_margin=text)


def test_a_part_of_what_is_free_has_a_floor() -> None:
    assert Margin().of(1000) == 100
    assert Margin(part=0.25).of(1000, floor=400) == 400
    assert Margin(part=0.25).of(2000, floor=400) == 500
    assert Margin(part=0.0).of(2000, floor=400) == 0
    assert Margin(n_bytes=7).of(2000, floor=400) == 7


def test_a_folder_for_states_needs_states() -> None:
    with pytest.raises(UsageError, match="prefix_cache_max_mib is 0; it must be more with a kv_cache_dir"):
        EngineOptions(prefix_cache_max_mib=0, kv_cache_dir=Path("x"))
    assert EngineOptions(prefix_cache_max_mib=1, kv_cache_dir=Path("x")).stores_states
    assert not EngineOptions(prefix_cache_max_mib=0).stores_states
