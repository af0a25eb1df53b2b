"""How a server is run, as frozen data that is checked when it is made. Layer 8."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pyggml_dflash.options import SamplingOptions, check_flag, check_int, check_number, refusal
from pyggml_dflash.requests import GenerationRequest

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server allows, and what a request gets that does not say."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: one that is free
    api_key: str | None = field(default=None, repr=False)  # None: nobody is asked for one
    queue_limit: int = 32  # answers that may wait for a slot; one more is refused with 429
    max_body_bytes: int = 16 * MIB
    max_messages: int = 4096
    max_choices: int = 16  # answers that one request may ask for
    cors_origins: tuple[str, ...] = ()  # pages of other origins that may call; '*': any
    allowed_hosts: tuple[str, ...] = ()  # names that requests may come under; empty: see `host_names`
    model_names: tuple[str, ...] = ()  # of the model, for clients; empty: its own
    default_max_tokens: int | None = None  # None: up to the end of the context
    reasoning_budget: int = -1  # tokens of reasoning where a request does not say; -1: any number
    sampling: SamplingOptions = field(default_factory=SamplingOptions)  # where a request leaves it open
    show_paths: bool = False  # whole paths of files in reports, not only their names
    keep_alive_s: float = 15.0  # a stream says something at least this often
    grace_s: float = 10.0  # how long answers may go on when the server is told to stop

    def __post_init__(self) -> None:
        _check_text("host", self.host)
        check_int("port", self.port, 0, 65535)
        if self.api_key is not None:
            _check_key(self.api_key)
        check_int("queue_limit", self.queue_limit, 0, 100_000)
        check_int("max_body_bytes", self.max_body_bytes, 1024, 2**34)
        check_int("max_messages", self.max_messages, 1)
        check_int("max_choices", self.max_choices, 1, 1024)
        for name in ("cors_origins", "allowed_hosts", "model_names"):
            _check_texts(name, getattr(self, name))
        for origin in self.cors_origins:
            _check_origin(origin)
        GenerationRequest(tokens=(0,), max_tokens=self.default_max_tokens, sampling=self.sampling)
        check_int("reasoning_budget", self.reasoning_budget, -1)
        check_flag("show_paths", self.show_paths)
        check_number("keep_alive_s", self.keep_alive_s, 0, 3600, above=True)
        check_number("grace_s", self.grace_s, 0, 3600)

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        return self.host == "localhost" or is_loopback(self.host)

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """Names that the Host header may have; None: any.

        A server for this machine alone that asks for no key answers to local names only: a page on the web
        may point a name of its own at 127.0.0.1, and the browser would let it read the answers.
        """
        if self.allowed_hosts:
            return self.allowed_hosts
        return ("localhost", "127.0.0.1", "::1", self.host) if self.is_local and not self.api_key else None


def _check_origin(origin: str) -> None:
    """What browsers send as the origin of a page; anything else would never match."""
    parts = urlsplit(origin)
    if origin != "*" and (
        not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        what = "it must be scheme and host alone, such as 'https://chat.example:8443', or '*'"
        raise refusal("cors_origins", origin, what)


def is_loopback(host: str) -> bool:
    """True for an address of this machine itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise refusal(name, value, "it must be text that is not empty")


def _check_texts(name: str, values: Sequence[object]) -> None:
    if not isinstance(values, tuple):
        raise refusal(name, values, "it must be a tuple of texts")
    for value in values:
        _check_text(name, value)


def _check_key(key: object) -> None:
    """A key goes into a header, and never into a message."""
    if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or " " in key:
        raise refusal("api_key", "***", "it must be ASCII text without blanks")
