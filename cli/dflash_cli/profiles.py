"""Named sets of flags for kinds of machines, as data, and `dflash profiles`, which lists them. Layer 9."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import click

from dflash_cli.flags import JSON
from dflash_cli.ui import open_stdout, print_json, print_table
from pyggml_dflash.options import refusal


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


def find_profile(name: str, *, origin: str = "") -> Profile:
    """The profile of that name, which comes from `origin` where it is no word of the command line."""
    found = {profile.name: profile for profile in PROFILES}
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        what = f"profile ({origin})" if origin else "profile"
        raise refusal(what, name, f"{hint}'dflash profiles' lists those there are")
    return found[name]


@click.command()
@JSON
@click.argument("names", nargs=-1, metavar="[NAME]...")
def profiles(names: tuple[str, ...], as_json: bool) -> None:
    """List the profiles that --profile takes.

    All of them, or those that are named. A profile gives flags values that a configuration file, the
    environment and flags overrule.
    """
    shown = [find_profile(name) for name in names] or PROFILES
    open_stdout()
    if as_json:
        print_json(shown)
        return
    for i, profile in enumerate(shown):
        click.echo(f"{'' if i == 0 else chr(10)}{profile.name}: {profile.summary}")
        rows = [["flags", shlex.join(word for pair in profile.flags for word in pair)]]
        if profile.environment:
            variables = (f"{name}={shlex.quote(value)}" for name, value in profile.environment)
            rows.append(["environment", " ".join(variables)])
        print_table(rows, "<<", indent="  ")
