"""Flags that say how an engine is opened, and the options made of them. Layer 9."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, get_args

import click

from dflash_cli.device_flags import DEVICES
from dflash_cli.flags import MODEL, Flag, apply_settings, each_once
from dflash_cli.params import (
    ContextLength,
    DraftPath,
    Folder,
    MaxContext,
    NumberOrAuto,
    TextFile,
    TrimInterval,
    WholeNumber,
)
from pyggml_dflash.options import (
    KV_TYPES,
    TRIM_VARIABLE,
    DraftCausal,
    EngineOptions,
    HostMemory,
    MtpConvention,
    Spec,
    Switch,
)

_SWITCH: Final = click.Choice(get_args(Switch))


def cache_type_flag(which: str, what: str) -> Flag[Any]:
    """`--cache-type-k` or `--cache-type-v`."""
    return click.option(
        f"--cache-type-{which}",
        type=click.Choice(KV_TYPES),
        default="f16",
        show_default=True,
        help=f"Element type of {what} in the KV cache.",
    )


CACHE_TYPES: Final = (cache_type_flag("k", "keys"), cache_type_flag("v", "values"))
_CONTEXT: Final = (
    click.option(
        "--max-ctx",
        type=MaxContext(),
        default="auto",
        show_default=True,
        help="Context in tokens, also as 32k or 1m; 'auto': the largest that fits, 'auto:N' up to N.",
    ),
    click.option(
        "--min-ctx",
        type=ContextLength(),
        help="Least context that 'auto' may choose.  [default: 4096, or 256 for models of short contexts]",
    ),
    click.option("--slots", type=WholeNumber(), default=1, show_default=True, help="Sequences at a time."),
    click.option(
        "--prefill-share",
        type=float,
        default=1.0,
        show_default=True,
        help="Most of the time that prompts may take while others are answered; 1: any, 0: none.",
    ),
    click.option(
        "--admission-coalesce-ms",
        type=WholeNumber(),
        default=0,
        show_default=True,
        help="How long an idle engine waits for more requests when one comes.",
    ),
    click.option(
        "--allow-batch-variance",
        is_flag=True,
        help="Decode slots together even where that changes how their numbers are rounded.",
    ),
    click.option(
        "--chunk",
        type=NumberOrAuto("chunk", "chunk in tokens", 512),
        default="auto",
        show_default=True,
        help="Prompt tokens of one forward, or 'auto'.",
    ),
)
_COMPUTING: Final = (
    click.option(
        "--fit-margin",
        default="10%",
        show_default=True,
        help="What a context leaves free: a part of what is free beside weights and state, or MiB.",
    ),
    click.option(
        "--threads", type=WholeNumber(), help="CPU threads that compute.  [default: one per physical core]"
    ),
    *CACHE_TYPES,
    click.option("--flash-attn", type=_SWITCH, default="auto", show_default=True, help="Fused attention."),
    click.option(
        "--repack",
        type=_SWITCH,
        default="auto",
        show_default=True,
        help="Copy weights into CPU layouts that compute faster.",
    ),
)
_DRAFTING: Final = (
    click.option(
        "--draft",
        type=DraftPath(),
        help="Draft made for the model: GGUF file or published folder, or a file with its MTP block."
        "  [default: that of the shipped model]",
    ),
    click.option(
        "--draft-causal",
        type=click.Choice(get_args(DraftCausal)),
        default="auto",
        show_default=True,
        help="Layers of a DFlash draft in which a row sees no later ones: none, those with a window "
        "('swa') or all. 'auto' does what the draft says, and 'swa' if it says nothing.",
    ),
    click.option(
        "--spec",
        type=click.Choice(get_args(Spec)),
        default="auto",
        show_default=True,
        help="What drafts tokens: a draft, the model's MTP block or nothing; 'auto': the first there is.",
    ),
    click.option(
        "--spec-width",
        type=NumberOrAuto("rows", "number of rows", 4),
        default="auto",
        show_default=True,
        help="Rows of every verify forward, or 'auto' for what measured cost and acceptance say.",
    ),
    click.option(
        "--mtp-convention",
        type=click.Choice(get_args(MtpConvention)),
        default="all-streams",
        show_default=True,
        help="How a qwen4exp MTP block reads the model; changes what is accepted, never the text.",
    ),
)
_STORING: Final = (
    click.option(
        "--prefill-pool-trim-tokens",
        "trim_interval",
        type=TrimInterval(),
        help="Trim a legacy scratch pool after every N prompt tokens; 'auto': when memory runs low; 'off'."
        f"  [default: {TRIM_VARIABLE}, else off]",
    ),
    click.option(
        "--prefix-cache-max-mib",
        type=NumberOrAuto("mib", "number of MiB", 4096),
        default="auto",
        show_default=True,
        help="Most memory of stored states, which prompts continue that begin alike; 0: none. 'auto': for two"
        " per slot and one more, within a quarter of what is free; 'dflash run' stores none without"
        " --kv-cache-dir.",
    ),
    click.option(
        "--prefix-cache-entries",
        type=WholeNumber(),
        default=32,
        show_default=True,
        help="Most stored states in memory.",
    ),
    click.option(
        "--snapshot-memory",
        type=click.Choice(get_args(HostMemory)),
        default="pageable",
        show_default=True,
        help="System memory for stored states beside a GPU; pinned is copied faster.",
    ),
    click.option("--kv-cache-dir", type=Folder(), help="Folder in which stored states outlive the process."),
    click.option(
        "--kv-cache-budget",
        type=WholeNumber(),
        default=4096,
        show_default=True,
        help="Most MiB of files in --kv-cache-dir.",
    ),
    click.option(
        "--kv-cache-min-tokens",
        type=WholeNumber(),
        default=512,
        show_default=True,
        help="Fewest tokens of a state that is worth a file.",
    ),
)
_TEXT: Final = (
    click.option(
        "--chat-template-file",
        "chat_template",
        type=TextFile(),
        help="Jinja file with a chat template, in place of the model's own.",
    ),
    click.option(
        "--nfc/--no-nfc", default=True, help="Unicode NFC before tokenizing, where the model wants it."
    ),
)
_SOURCES: Final = (
    click.option(
        "--profile",
        multiple=True,
        expose_value=False,
        metavar="NAME",
        help="Take flags that nothing else sets from a profile; 'dflash profiles' lists them.",
    ),
    click.option(
        "--config",
        type=click.Path(),
        expose_value=False,
        metavar="FILE",
        help="TOML file with values of flags; 'dflash env' shows which are in force."
        "  [default: config.toml in the user's folder for configuration]",
    ),
)

_FIELDS: Final = tuple(
    field.name for field in dataclasses.fields(EngineOptions) if field.name != "queue_limit"
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """MODEL and the flags of `EngineOptions`; the command receives them as `engine`."""

    @functools.wraps(command)
    def with_engine(**values: Any) -> None:
        given = {name: values.pop(name) for name in _FIELDS}
        given["device_cap"] = each_once("--device-cap", "device", given["device_cap"])
        command(engine=EngineOptions(**given), **values)

    flags = (MODEL, *_CONTEXT, *DEVICES, *_COMPUTING, *_DRAFTING, *_STORING, *_TEXT, *_SOURCES)
    return apply_settings(flags, with_engine)
