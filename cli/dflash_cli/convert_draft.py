"""`dflash convert-draft`: a published draft as a GGUF file. Layer 9."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from dflash_cli.flags import JSON
from dflash_cli.params import DraftPath, ModelFile
from dflash_cli.ui import ProgressBars, open_stdout, print_json, say
from pyggml_dflash import api
from pyggml_dflash.errors import human_bytes
from pyggml_dflash.options import DraftType


@click.command("convert-draft")
@click.argument("draft", type=DraftPath())
@click.argument("out", type=click.Path())
@click.option(
    "--target",
    type=ModelFile(),
    help="The model that the draft was made for: its tokenizer is copied, and the pair is checked.",
)
@click.option(
    "--type",
    "type_",
    type=click.Choice(get_args(DraftType)),
    default="keep",
    show_default=True,
    help="Element type of the matrices; 'keep' leaves them as they are.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@JSON
@click.option("--quiet", is_flag=True, help="No progress and notices on standard error.")
def convert_draft(
    draft: Path, out: str, target: Path | None, type_: DraftType, overwrite: bool, as_json: bool, quiet: bool
) -> None:
    """Write a DFlash draft as a GGUF file, which llama.cpp reads as well.

    DRAFT is the folder of a published draft, or a GGUF file also with older names. To speculate with OUT,
    llama.cpp needs the tokenizer that --target brings. OUT stands under its name only once it is complete.
    """
    open_stdout()
    with ProgressBars(quiet=quiet) as bars:
        done = api.convert_draft(draft, out, type=type_, target=target, overwrite=overwrite, progress=bars)
    if not quiet:
        if done.kept_f16:
            say(f"{len(done.kept_f16)} matrices have rows that are no whole blocks of {type_}; they are f16")
        if not done.has_tokenizer:
            say("the file has no tokenizer: llama.cpp can load it, but needs one to speculate (--target)")
    if as_json:
        print_json(done)
        return
    types = ", ".join(f"{n} {name}" for name, n in done.types.items())
    click.echo(f"{done.path}: {human_bytes(done.n_bytes)}, {types}")
