"""`dflash route-stats`: counts which experts a model picks. Layer 9."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_cli.engine_flags import engine_options
from dflash_cli.prompt import PromptSource, prompt_options
from dflash_cli.ui import ProgressBars
from pyggml_dflash import api
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import EngineOptions


@click.command()
@prompt_options
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write, for --expert-placement.",
)
@engine_options
@click.option("--quiet", is_flag=True, help="No progress on standard error.")
def route_stats(source: PromptSource, out: Path, engine: EngineOptions, quiet: bool) -> None:
    """Count which experts a model picks while it reads a text.

    The text should be like those the model will meet. The text is taken as it is, without the chat template.
    """
    prompt = source.read()
    if prompt is None:
        raise UsageError("no text to read; give one with -p TEXT, -f FILE or through a pipe")
    with ProgressBars(quiet=quiet) as bars:
        stats = api.route_stats(engine, [prompt.text], bars)
    stats.write(out)
    n_layer, n_expert = stats.picks.shape
    click.echo(f"{stats.n_tokens} tokens, {n_layer} layers of {n_expert} experts: {out}")
