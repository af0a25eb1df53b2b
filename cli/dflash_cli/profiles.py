"""Named sets of flags for kinds of machines, as data, and `dflash profiles`, which lists them. Layer 9."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

import click

from dflash_cli.flags import JSON
from dflash_cli.ui import open_stdout, print_json, print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Flags with their values, and environment variables that are set unless they are already."""

    name: str
    summary: str
    flags: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...] = ()


PROFILES: Final = (
    Profile(
        name="cpu-tiny",
        summary="A small model on the CPU, in little memory.",
        flags=(("--device", "CPU"), ("--max-ctx", "auto:8k"), ("--min-ctx", "256")),
    ),
    Profile(
        name="cuda-1",
        summary="One NVIDIA GPU, with the largest context that fits.",
        flags=(("--device", "CUDA0"), ("--max-ctx", "auto")),
    ),
    Profile(
        name="cuda-split-2",
        summary="Two NVIDIA GPUs: dense weights on the first, experts on the second.",
        flags=(("--target-device", "CUDA0"), ("--expert-device", "CUDA1"), ("--max-ctx", "auto")),
    ),
    Profile(
        name="qwen-next-r9700-strix",
        summary="Qwen3.8-Flash-Next on a Radeon AI PRO R9700, its experts on a Strix Halo.",
        flags=(("--target-device", "hip:0"), ("--expert-device", "hip:1"), ("--max-ctx", "auto")),
    ),
)


@click.command()
@JSON
def profiles(as_json: bool) -> None:
    """List the profiles that --profile takes.

    A profile gives flags values that a configuration file, the environment and flags overrule.
    """
    open_stdout()
    if as_json:
        print_json(PROFILES)
        return
    for i, profile in enumerate(PROFILES):
        click.echo(f"{'' if i == 0 else chr(10)}{profile.name}: {profile.summary}")
        rows = [["flags", shlex.join(word for pair in profile.flags for word in pair)]]
        if profile.environment:
            variables = (f"{name}={shlex.quote(value)}" for name, value in profile.environment)
            rows.append(["environment", " ".join(variables)])
        print_table(rows, "<<", indent="  ")
