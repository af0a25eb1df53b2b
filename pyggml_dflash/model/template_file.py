"""A chat template from a file of its own, tried out before a model is loaded. Layer 2.

A template that comes with a model is taken as it is, since the model is good for more than chats. One that
a user gives has to work: whatever is wrong is refused by file and line.
"""

from __future__ import annotations

import codecs
import traceback
from pathlib import Path
from typing import Any, Final

import jinja2

from pyggml_dflash.errors import UsageError
from pyggml_dflash.model.chat import rendered, sandbox

MAX_TEMPLATE_BYTES: Final = 2**20  # of models that are published the largest has some 30 KiB
SAID: Final = "Good morning"
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_USER: Final = {"role": "user", "content": SAID}
# A template may insist on a system message, so a conversation with one will do as well.
_TRIALS: Final = ([_USER], [_SYSTEM, _USER])


def read_template(path: Path | None) -> str | None:
    """The text of a template file; None where there is none. Raises `UsageError` for one that cannot work.

    What cannot: a template that does not compile, or that writes no prompt with what a user says in it.
    """
    if path is None:
        return None
    source = _decoded(path, _read(path))
    environment = sandbox()
    try:
        variables = environment.variables_of(source)
        template = environment.template(source)
    except jinja2.TemplateSyntaxError as error:
        raise _refused(path, f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # what Jinja accepts may still be too deep or too long for Python
        raise _refused(path, f"it cannot be compiled: {error}") from error
    if "messages" not in variables:
        raise _refused(path, "it does not read 'messages', which the conversation is in")
    with environment.bounded():
        _try_out(path, template)
    return source


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise _refused(path, "it is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise _refused(path, "it is no regular file")
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
    except FileNotFoundError as error:
        raise _refused(path, "there is no such file") from error
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror}") from error
    if len(data) > MAX_TEMPLATE_BYTES:
        raise _refused(path, f"it is larger than {MAX_TEMPLATE_BYTES // 1024} KiB, so it is no chat template")
    return data


def _decoded(path: Path, data: bytes) -> str:
    text = data.removeprefix(codecs.BOM_UTF8)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise _refused(path, f"line {line}: not UTF-8, there is a byte {text[error.start]:#04x}") from error


def _try_out(path: Path, template: jinja2.Template) -> None:
    """Refuse what fails for every conversation, or leaves out what is said in it."""
    problems = []
    for messages in _TRIALS:
        variables: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "add_generation_prompt": True,
            "bos_token": "",
            "eos_token": "",
        }
        try:
            if SAID in rendered(template, variables):
                return
            problems.append("its prompt for a user's message is without what the message says")
        except Exception as error:  # a template fails in as many ways as Python does
            at = _line_of(error)
            where = "" if at is None else f"line {at}: "
            problems.append(f"{where}a user's message makes it fail: {str(error) or type(error).__name__}")
    raise _refused(path, problems[0])


def _line_of(error: Exception) -> int | None:
    """The line of the template that raised it."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame.lineno for frame in frames if frame.filename == "<template>"), None)


def _refused(path: Path, problem: str) -> UsageError:
    return UsageError(f"chat_template is {str(path)!r}; {problem}")
