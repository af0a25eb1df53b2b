"""A batch from one file to another: which lines have their record, and which are to be answered. Layer 8.

Everything that can be refused is refused here, before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from pyggml_dflash.api import DEFAULT_MODEL, read_template
from pyggml_dflash.errors import UsageError
from pyggml_dflash.jsonl.lines import Format, Task, TaskReader, find_format, read_lines
from pyggml_dflash.jsonl.output import Existing, OutputFile, Progress
from pyggml_dflash.jsonl.records import Record, digest_of
from pyggml_dflash.openai.asks import Defaults
from pyggml_dflash.options import EngineOptions

_GGUF: Final = b"GGUF"


class LineBatch:
    """An input file and the output file that gets a record for each of its lines; a context manager."""

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        settings: str,
        format: Format | None = None,
        existing: Existing = "refuse",
        ordered: bool = True,
    ) -> None:
        """`settings`: the digest that records bear; `format` None: as `find_format` says."""
        with ExitStack() as stack:
            self._input = stack.enter_context(_open_input(source))
            self.format: Format = format or find_format(source, self._input)
            self._output = stack.enter_context(OutputFile(target, existing))
            if self._output.is_same(os.fstat(self._input.fileno())):
                raise UsageError(f"{target} is the input; records need a file of their own")
            self._done = self._output.read(settings) if existing == "resume" else Progress()
            if ordered and not self._done.in_order:
                raise UsageError(f"the records in {target} are not in order; go on with --unordered")
            self.source, self.target = source, target
            self.n_lines = self._survey()
            self.n_records, self.n_failed = len(self._done.digests), self._done.n_failed
            self._begun = False
            self._stack = stack.pop_all()

    @property
    def n_left(self) -> int:
        """Lines without a record."""
        return self.n_lines - self.n_records

    def begin(self) -> None:
        """Make the output ready, which the first record does as well; from here on it changes."""
        self._output.begin()
        self._begun = True

    def tasks(self) -> Iterator[Task]:
        """The lines without a record, in their order."""
        reader = TaskReader(self.format)
        for line in read_lines(self._input):
            task = reader.read(line)
            if task.number not in self._done.digests:
                yield task

    def write(self, record: Record) -> None:
        """Append a record; when this returns it is on the disk."""
        if not self._begun:
            self.begin()
        self._output.append(record.data)
        self.n_records += 1
        self.n_failed += record.failed

    def close(self) -> None:
        """Let go of both files; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> LineBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _survey(self) -> int:
        """Count the lines; refuse an input that is not the one that was answered."""
        n_lines, done = 0, self._done.digests
        for line in read_lines(self._input):
            n_lines = line.number
            if done.get(n_lines, line.digest) != line.digest:
                raise UsageError(
                    f"line {n_lines} of {self.source} is not the one that {self.target} has a record of; "
                    "start again with --overwrite"
                )
        last = max(done, default=0)
        if last > n_lines:
            raise UsageError(f"{self.target} has a record of line {last}; {self.source} has {n_lines} lines")
        return n_lines


def settings_digest(options: EngineOptions, defaults: Defaults, format: Format | None) -> str:
    """A digest of what decides which answer a line gets, as far as it is known before the model is loaded."""
    model, template = options.model or DEFAULT_MODEL, read_template(options.chat_template)
    return digest_of(
        model=model.name,
        model_bytes=model.stat().st_size,
        max_ctx=options.max_ctx,
        allow_batch_variance=options.allow_batch_variance,
        cache_types=[options.cache_type_k, options.cache_type_v],
        nfc=options.nfc,
        defaults=defaults,
        format=format,
        **({} if template is None else {"chat_template": template}),
    )


def _open_input(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no regular file; a batch reads its lines more than once")
        file = path.open("rb")
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # a name with a NUL
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}") from error
    with ExitStack() as stack:
        stack.enter_context(file)
        if file.read(len(_GGUF)) == _GGUF:
            raise UsageError(f"{path} is a model; the lines come first, as in: dflash batch IN.jsonl MODEL")
        stack.pop_all()
    return file
