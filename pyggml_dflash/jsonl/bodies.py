"""What a line asks for: the form of a line, and which of OpenAI's bodies is in it. Layer 8.

What the members of these bodies mean is the same as for a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyggml_dflash.errors import UsageError, quoted
from pyggml_dflash.jsonl.problems import refused
from pyggml_dflash.openai.asks import Ask, Defaults, chat_ask, completion_ask
from pyggml_dflash.options import refusal

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
_ENVELOPE: Final = ("method", "url", "body")


def understand(value: Mapping[str, Any] | str, defaults: Defaults) -> Ask:
    """The requests of a line. Raises `Refused` or `UsageError` for what cannot be one."""
    ask = _read(value, defaults)
    if ask.stream:
        raise UsageError("stream is true; a batch has whole answers", param="stream")
    return ask


def _read(value: Mapping[str, Any] | str, defaults: Defaults) -> Ask:
    if isinstance(value, str):
        return _simple({"prompt": value}, defaults)
    line = {name: item for name, item in value.items() if name != "custom_id"}
    if line.keys() & set(_ENVELOPE):
        return _enveloped(line, defaults)
    return _simple(line, defaults)


def _enveloped(line: Mapping[str, Any], defaults: Defaults) -> Ask:
    for name in line:
        if name not in _ENVELOPE:
            raise UsageError(f"{name[:60]!r} is not known beside {', '.join(_ENVELOPE)}", param=name[:60])
    method, url, body = (line.get(name) for name in _ENVELOPE)
    if method != "POST":
        raise refused("invalid_method", f"method is {quoted(method)}; it must be 'POST'")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise refused("invalid_url", f"url is {quoted(url)}; it must be {CHAT_URL!r} or {COMPLETION_URL!r}")
    if not isinstance(body, Mapping):
        raise refusal("body", body, "it must be an object")
    return chat_ask(body, defaults) if url == CHAT_URL else completion_ask(body, defaults)


def _simple(line: Mapping[str, Any], defaults: Defaults) -> Ask:
    prompt, messages = line.get("prompt"), line.get("messages")
    if (prompt is None) == (messages is None):
        known = "'prompt', 'messages', or 'method', 'url' and 'body'"
        raise UsageError(f"the line has {_names(line)}; a request has one of {known}")
    rest = {name: item for name, item in line.items() if name not in ("prompt", "messages")}
    if messages is not None:
        return chat_ask({**rest, "messages": messages}, defaults)
    if defaults.raw:
        return completion_ask({**rest, "prompt": prompt}, defaults)
    if not isinstance(prompt, str) or not prompt:
        raise refusal("prompt", prompt, "it must be text; tokens and lists need --raw")
    return chat_ask({**rest, "messages": [{"role": "user", "content": prompt}]}, defaults)


def _names(line: Mapping[str, Any]) -> str:
    return ", ".join(repr(name[:60]) for name in list(line)[:8]) or "nothing"
