"""Values of flags: what parses, and that what does not is quoted, exits 2 and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from dflash_cli.main import cli
from dflash_cli.params import (
    ContextLength,
    DeviceCap,
    MaxContext,
    NumberOrAuto,
    Seed,
    TokenBias,
    TrimInterval,
    WholeNumber,
)

K, M = 1024, 1024 * 1024


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (ContextLength(), "1", 1),
        (ContextLength(), "8192", 8192),
        (ContextLength(), "8k", 8 * K),
        (ContextLength(), "32K", 32 * K),
        (ContextLength(), "1m", M),
        (MaxContext(), "auto", "auto"),
        (MaxContext(), "auto:64k", "auto:65536"),
        (MaxContext(), "8k", 8 * K),
        (DeviceCap(), "CUDA0=24576", ("CUDA0", 24576 * M)),
        (DeviceCap(), "CPU=1.5GiB", ("CPU", 1536 * M)),
        (DeviceCap(), "a=b=900KiB", ("a=b", 900 * K)),
        (TrimInterval(), " 8192 ", 8192),
        (TrimInterval(), "off", 0),
        (TrimInterval(), "auto", "auto"),
        (NumberOrAuto("chunk", "chunk in tokens", 512), "512", 512),
        (NumberOrAuto("chunk", "chunk in tokens", 512), "auto", "auto"),
        (NumberOrAuto("rows", "number of rows", 1024, off=True), "off", 0),
        (TokenBias(), "198=-5", (198, -5.0)),
        (TokenBias(), "0=1e3", (0, 1000.0)),
        (Seed(), "42", 42),
        (DeviceCap(), "CPU=7340033B", ("CPU", 7 * M + 1)),
        (WholeNumber(), "-1", -1),
        (WholeNumber(), "007", 7),
        (TokenBias(), "7=-inf", (7, float("-inf"))),
    ],
)
def test_a_value_is_read_as_it_stands(kind: click.ParamType[Any], text: str, value: object) -> None:
    assert kind.convert(text, None, None) == value


REFUSED = [
    ("--max-ctx", "N"),
    ("--max-ctx", "0"),
    ("--max-ctx", "0k"),
    ("--max-ctx", "-5"),
    ("--max-ctx", "12q"),
    ("--max-ctx", "1e3"),
    ("--max-ctx", "8 k"),
    ("--max-ctx", "٣"),
    ("--max-ctx", ""),
    ("--max-ctx", "auto:"),
    ("--max-ctx", "auto:0"),
    ("--max-ctx", "auto:x"),
    ("--max-ctx", "most:8k"),
    ("--min-ctx", "auto"),
    ("--device-cap", "CPU"),
    ("--device-cap", "=5"),
    ("--device-cap", "CPU=5TiB"),
    ("--device-cap", "CPU=-5"),
    ("--prefill-pool-trim-tokens", "8k"),
    ("--prefill-pool-trim-tokens", "-1"),
    ("--prefill-pool-trim-tokens", ""),
    ("--prefill-pool-trim-tokens", "99999999999"),
    ("--chunk", "12q"),
    ("--chunk", "-1"),
    ("--logit-bias", "5"),
    ("--logit-bias", "x=1"),
    ("--logit-bias", "1=y"),
    ("--logit-bias", "=1"),
    ("--logit-bias", "5=1e400"),
    ("--logit-bias", "1_0=1"),
    ("--logit-bias", "1=1_0"),
    ("--seed", "1_0"),
    ("--slots", "٣"),
    ("--device-reserve-mib", "1_0"),
    ("--threads", " 2"),
    ("--spec-width", "4.0"),
    ("--top-k", "²"),
    ("-n", "9" * 5000),
    ("--logprobs", "١"),
    ("--seed", "9" * 5000),
    ("--cache-type-k", "q9"),
    ("--flash-attn", "maybe"),
    ("--temperature", "hot"),
    ("--seed", "1.5"),
    ("--stop", ""),
    ("--file", "no/such/prompt.txt"),
]


@pytest.mark.parametrize(("flag", "value"), REFUSED)
def test_a_value_that_does_not_parse_is_quoted_and_exits_2(flag: str, value: str) -> None:
    prompt = [] if flag == "--file" else ["-p", "x"]
    done = CliRunner().invoke(cli, ["run", *prompt, flag, value])
    assert done.exit_code == 2
    assert f"'{value}'" in done.output
    assert flag in done.output


OUT_OF_RANGE = [
    (("--chunk", "0"), "chunk is 0"),
    (("--max-ctx", "2048m"), "max_ctx is 2147483648"),
    (("--threads", "0"), "threads is 0"),
    (("--temperature", "-1"), "temperature is -1.0"),
    (("--temperature", "nan"), "temperature is nan"),
    (("--top-p", "0"), "top_p is 0.0"),
    (("--top-k", "-1"), "top_k is -1"),
    (("--min-p", "1.5"), "min_p is 1.5"),
    (("--repetition-penalty", "0"), "repetition_penalty is 0.0"),
    (("--seed", "-1"), "seed is -1"),
    (("--logit-bias", "-1=2"), "logit_bias token is -1"),
    (("--logit-bias", "1=2", "--logit-bias", "1=3"), "--logit-bias names token 1 twice"),
    (("-n", "0"), "max_tokens is 0"),
    (("--json", "--logprobs", "101"), "logprobs is 101"),
    (("--logprobs", "2"), "--logprobs needs --json"),
    (("--raw", "--system", "s"), "--system works through the chat template"),
    (("--raw", "--no-reasoning"), "--reasoning works through the chat template"),
    (("--flash-attn", "off", "--cache-type-v", "q8_0"), "cache_type_v is 'q8_0'"),
    (("--file", __file__), "-p and -f both give a prompt"),
]


@pytest.mark.parametrize(("flags", "message"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_before_a_model_is_opened(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    not_a_model = tmp_path / "model.gguf"
    not_a_model.write_bytes(b"opening this file would fail with exit code 3")
    done = CliRunner().invoke(cli, ["run", str(not_a_model), "-p", "x", *flags])
    assert done.exit_code == 2, done.output
    assert done.output.startswith("dflash: error: ")
    assert message in done.output


@pytest.mark.parametrize(
    "args", [("run", "", "-p", "x"), ("fit", "--draft", ""), ("convert-draft", "", "o.gguf")]
)
def test_an_empty_path_is_not_the_current_folder(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2
    assert "'' is empty; name a file." in done.output
