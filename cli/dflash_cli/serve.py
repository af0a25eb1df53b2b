"""`dflash serve`: a model behind HTTP. Layer 9."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

from dflash_cli.answer import warn_of_cpu
from dflash_cli.answer_flags import sampling_options
from dflash_cli.engine_flags import engine_options
from dflash_cli.params import Text, WholeNumber
from dflash_cli.ui import ProgressBars, say
from pyggml_dflash.api import Engine
from pyggml_dflash.errors import DflashError
from pyggml_dflash.options import EngineOptions, SamplingOptions

MIB: Final = 2**20


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@click.option("--port", type=WholeNumber(), default=8080, show_default=True, help="Port; 0: a free one.")
@click.option(
    "--api-key",
    envvar="DFLASH_API_KEY",
    hide_input=True,
    help="Key that clients must send.  [default: DFLASH_API_KEY, else none]",
)
@click.option(
    "--queue-limit",
    type=WholeNumber(),
    default=32,
    show_default=True,
    help="Answers that may wait for a slot; more are refused with 429. 0: none waits.",
)
@click.option(
    "--model-name",
    "model_names",
    type=Text(),
    multiple=True,
    help="Name of the model for clients; repeatable.  [default: its own]",
)
@click.option(
    "--default-max-tokens",
    type=WholeNumber(),
    help="Most tokens of an answer whose request does not say.  [default: up to the end of the context]",
)
@click.option(
    "--reasoning-budget",
    type=WholeNumber(),
    default=-1,
    show_default=True,
    help="Most tokens of reasoning where a request does not say; 0: none, -1: any number.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    type=Text(),
    multiple=True,
    help="Origin whose pages may call, as in https://example.org; '*': any; repeatable.  [default: none]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    type=Text(),
    multiple=True,
    help="Name that clients may use for this server; repeatable.  [default: local names where only this "
    "machine can connect and there is no key, else any]",
)
@click.option(
    "--max-body-mib", type=WholeNumber(), default=16, show_default=True, help="Largest request in MiB."
)
@click.option(
    "--max-messages", type=WholeNumber(), default=4096, show_default=True, help="Most messages of a request."
)
@click.option(
    "--max-choices",
    type=WholeNumber(),
    default=16,
    show_default=True,
    help="Most answers to one request (n).",
)
@click.option("--props-paths", is_flag=True, help="Show whole paths of files in /props, not only names.")
@click.option("--log-requests", is_flag=True, help="One line for each request on standard error.")
@click.option("--quiet", is_flag=True, help="No progress and notices on standard error.")
@sampling_options
@engine_options
def serve(
    host: str,
    port: int,
    api_key: str | None,
    queue_limit: int,
    model_names: tuple[str, ...],
    default_max_tokens: int | None,
    reasoning_budget: int,
    cors_origins: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
    max_body_mib: int,
    max_messages: int,
    max_choices: int,
    props_paths: bool,
    log_requests: bool,
    quiet: bool,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's and Anthropic's clients expect it.

    The flags of sampling are for requests that do not say. Without MODEL the small model that ships with
    the package is served. Ctrl-C stops: answers may go on for ten seconds, a second one ends them.
    """
    try:
        from pyggml_dflash.serve.server import serve as run
        from pyggml_dflash.serve.settings import ServeOptions
    except ImportError as error:
        raise DflashError(str(error)) from error
    options = ServeOptions(
        host=host,
        port=port,
        api_key=api_key,
        queue_limit=queue_limit,
        model_names=model_names,
        default_max_tokens=default_max_tokens,
        reasoning_budget=reasoning_budget,
        cors_origins=cors_origins,
        allowed_hosts=allowed_hosts,
        max_body_bytes=max_body_mib * MIB,
        max_messages=max_messages,
        max_choices=max_choices,
        show_paths=props_paths,
        sampling=sampling,
    )
    if log_requests:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
        logging.getLogger("pyggml_dflash.serve").setLevel(logging.INFO)
    with ProgressBars(quiet=quiet) as bars:

        def ready(opened: Engine, url: str) -> None:
            bars.close()
            if engine.device is None:
                warn_of_cpu(opened.info.device)
            if not quiet:
                info = opened.info
                say(f"serving {info.name} at {url} ({info.n_ctx} tokens x {engine.slots})")

        run(engine, options, progress=bars, ready=ready)
