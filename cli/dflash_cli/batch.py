"""`dflash batch`: a file of requests in, a file of records out. Layer 9."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import click

from dflash_cli.answer import StopOnInterrupt, open_engine
from dflash_cli.answer_flags import AnswerOptions, answer_options, sampling_options
from dflash_cli.batch_progress import BatchProgress
from dflash_cli.engine_flags import engine_options
from dflash_cli.flags import apply
from dflash_cli.main import INTERRUPTED
from dflash_cli.params import Text, WholeNumber
from dflash_cli.ui import ProgressBars, say
from pyggml_dflash.errors import UsageError
from pyggml_dflash.jsonl.files import LineBatch, settings_digest
from pyggml_dflash.jsonl.lines import Format
from pyggml_dflash.jsonl.on_ray import RayOptions, answer_on_ray, check_ray
from pyggml_dflash.jsonl.output import Existing
from pyggml_dflash.jsonl.records import Record
from pyggml_dflash.jsonl.worker import LineWorker, fitting
from pyggml_dflash.openai.asks import Defaults
from pyggml_dflash.options import EngineOptions, SamplingOptions

FAILED_LINES: Final = 5
NAMES: Final = {"jsonl": "JSON", "text": "plain text"}

_FILES: Final = (
    click.argument("source", metavar="IN", type=click.Path(path_type=Path)),
    click.option(
        "-o", "--output", type=click.Path(path_type=Path), required=True, help="File that gets the records."
    ),
    click.option(
        "--format",
        type=click.Choice(["auto", *get_args(Format)]),
        default="auto",
        show_default=True,
        help="What lines of IN are; 'auto': what its name says, else JSON if the first begins with '{'.",
    ),
    click.option("--resume", is_flag=True, help="Go on with the records that the output has."),
    click.option("--overwrite", is_flag=True, help="Start again if the output exists."),
    click.option(
        "--ordered/--unordered", default=True, help="Records in the order of lines, or as they get ready."
    ),
    click.option("--raw", is_flag=True, help="Continue prompts as they are, without the chat template."),
    click.option(
        "--model-name",
        type=Text(),
        multiple=True,
        help="Name under which lines may ask for the model, beside its own; repeatable.",
    ),
)
_RAY: Final = (
    click.option(
        "--ray",
        metavar="ADDRESS",
        help="Answer on a cluster of Ray, or with 'local' in processes of it here.",
    ),
    click.option(
        "--ray-workers", type=WholeNumber(), default=1, show_default=True, help="Engines that Ray runs."
    ),
    click.option(
        "--ray-gpus", type=float, default=0.0, show_default=True, help="GPUs that Ray gives to each engine."
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Which files, how they are read and written, and what their prompts are."""

    source: Path
    target: Path
    format: Format | None
    existing: Existing
    ordered: bool
    raw: bool
    model_names: tuple[str, ...]


def files_options(command: Callable[..., None]) -> Callable[..., None]:
    """IN and the flags of `Files`; the command receives them as `files`."""

    @functools.wraps(command)
    def with_files(
        *,
        source: Path,
        output: Path,
        format: str,
        resume: bool,
        overwrite: bool,
        ordered: bool,
        raw: bool,
        model_name: tuple[str, ...],
        **rest: Any,
    ) -> None:
        if resume and overwrite:
            raise UsageError("--resume and --overwrite contradict each other; pass one of them")
        files = Files(
            source=source,
            target=output,
            format="jsonl" if format == "jsonl" else "text" if format == "text" else None,
            existing="resume" if resume else "overwrite" if overwrite else "refuse",
            ordered=ordered,
            raw=raw,
            model_names=model_name,
        )
        command(files=files, **rest)

    return apply(_FILES, with_files)


def ray_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags of `RayOptions`; the command receives them as `where`, None without --ray."""

    @functools.wraps(command)
    def with_ray(*, ray: str | None, ray_workers: int, ray_gpus: float, **rest: Any) -> None:
        where = None if ray is None else RayOptions(address=ray, workers=ray_workers, gpus=ray_gpus)
        if where is not None:
            check_ray()
        elif (ray_workers, ray_gpus) != (1, 0):
            raise UsageError("--ray-workers and --ray-gpus need --ray")
        command(where=where, **rest)

    return apply(_RAY, with_ray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How the lines of a batch are answered."""

    engine: EngineOptions
    defaults: Defaults
    settings: str
    where: RayOptions | None
    ordered: bool
    quiet: bool


@click.command()
@files_options
@answer_options
@sampling_options
@engine_options
@ray_options
@click.option("--quiet", is_flag=True, help="No progress and notices on standard error.")
@click.pass_context
def batch(
    ctx: click.Context,
    files: Files,
    answer: AnswerOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    where: RayOptions | None,
    quiet: bool,
) -> None:
    """Answer every line of a file, and write one record for each.

    A line is a request of OpenAI's batch format, an object with "prompt" or "messages" and fields of such a
    request beside it, or plain text. A prompt is one user turn of the model's chat template. Flags hold
    where a line says nothing. A record is OpenAI's too. A line that fails gets one with its error, and the
    exit code is 5. Each record is on the disk before the next; after Ctrl-C or a crash --resume goes on.
    """
    answer.check()
    defaults = defaults_of(files, answer, sampling)
    settings = settings_digest(engine, defaults, files.format)
    work = Work(
        engine=engine, defaults=defaults, settings=settings, where=where, ordered=files.ordered, quiet=quiet
    )
    with open_batch(files, settings) as lines:
        if not quiet and files.format is None:
            say(f"taking the lines of {lines.source} for {NAMES[lines.format]}")
        answer_lines(lines, work)
        if lines.n_left:
            ctx.exit(INTERRUPTED)
        if not quiet:
            say(f"each of {lines.n_lines} lines has its record in {lines.target}; {lines.n_failed} failed")
        ctx.exit(FAILED_LINES if lines.n_failed else 0)


def defaults_of(files: Files, answer: AnswerOptions, sampling: SamplingOptions) -> Defaults:
    """What holds for lines that say nothing."""
    answer.check_template(raw=files.raw)
    return Defaults(
        system=answer.system,
        reasoning=answer.reasoning,
        reasoning_budget=answer.reasoning_budget,
        constraint=answer.constraint,
        stop=answer.stop,
        max_tokens=answer.max_tokens,
        sampling=sampling,
        raw=files.raw,
        model_names=files.model_names,
    )


def open_batch(files: Files, settings: str) -> LineBatch:
    """The batch; refuses what is wrong with its files."""
    return LineBatch(
        files.source,
        files.target,
        settings=settings,
        format=files.format,
        existing=files.existing,
        ordered=files.ordered,
    )


def answer_lines(lines: LineBatch, work: Work) -> None:
    """Write the records that are missing, all of them unless Ctrl-C comes first."""
    if lines.n_left == 0:
        lines.begin()
    elif work.where is None:
        answer_here(lines, work)
    else:
        answer_elsewhere(lines, work, work.where)


def answer_here(lines: LineBatch, work: Work) -> None:
    """With one engine in this process."""
    with (
        ProgressBars(quiet=work.quiet) as bars,
        open_engine(work.engine, bars, quiet=work.quiet) as engine,
    ):
        if not work.quiet and fitting(work.defaults, engine) != work.defaults:
            say("the model has no chat template: prompts are continued as with --raw")
        worker = LineWorker(engine, work.defaults, work.settings)
        with (
            worker.run(lines.tasks(), ordered=work.ordered) as records,
            StopOnInterrupt(records, last=2),
        ):
            write_records(lines, records, quiet=work.quiet)


def answer_elsewhere(lines: LineBatch, work: Work, where: RayOptions) -> None:
    """With the engines of Ray's workers."""
    records = answer_on_ray(
        lines.tasks(), where, work.engine, work.defaults, work.settings, ordered=work.ordered
    )
    with suppress(KeyboardInterrupt), closing(records):
        write_records(lines, records, quiet=work.quiet)


def write_records(lines: LineBatch, records: Iterable[Record], *, quiet: bool) -> None:
    """One after the other, as they come."""
    with BatchProgress(lines, quiet=quiet) as progress:
        for record in records:
            lines.write(record)
            progress.add(record)
