"""A conversation as `dflash chat` keeps, saves and loads it: messages in their order. Layer 9."""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyggml_dflash.errors import UsageError


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant, in turn, with an optional system message in front."""

    system: str | None = None
    turns: list[str] = field(default_factory=list)  # user, assistant, user, ...

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the engine and a file have them."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + [{"role": _role(i), "content": text} for i, text in enumerate(self.turns)]

    @property
    def unanswered(self) -> bool:
        """True if the last turn is the user's."""
        return len(self.turns) % 2 == 1

    def save(self, path: Path) -> None:
        """Write the messages as JSON; a file that holds something else is not overwritten."""
        try:
            data = (json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n").encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the conversation has {error.object[error.start]!r}, no character") from error
        try:
            mode: int | None = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be written: {_reason(error)}") from error
        if mode is not None:
            try:
                load_conversation(path)
            except UsageError as error:
                raise UsageError(f"{path} exists and holds something else; choose another name") from error
        try:
            _replace(path, data, mode)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {_reason(error)}") from error


def load_conversation(path: Path) -> Conversation:
    """The conversation of a file that `Conversation.save` could have written; else `UsageError`."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no regular file")
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}") from error
    except UsageError:
        raise
    except ValueError as error:  # a name with a NUL
        raise UsageError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        messages = json.loads(text.decode())
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply to hold messages") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(messages, list):
        raise UsageError(f"{path} holds {type(messages).__name__}; it must hold a list of messages")
    found = Conversation()
    for i, message in enumerate(messages):
        _append(found, message, f"{path}: message {i}", first=i == 0)
    return found


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """Write a file whole or not at all; one that a link names is written where it is."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f".dflash-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        if mode is not None:
            part.chmod(stat.S_IMODE(mode))
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _append(conversation: Conversation, message: Any, where: str, *, first: bool) -> None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise UsageError(f"{where} must be an object with 'role' and 'content', nothing else")
    role, content = message["role"], message["content"]
    if not isinstance(content, str):
        raise UsageError(f"{where} has the content {str(content)[:60]!r}; it must be a string")
    if first and role == "system":
        conversation.system = content
        return
    expected = _role(len(conversation.turns))
    if role != expected:
        raise UsageError(f"{where} has the role {str(role)[:60]!r}; {expected!r} is expected there")
    conversation.turns.append(content)


def _role(turn: int) -> str:
    return "assistant" if turn % 2 else "user"
