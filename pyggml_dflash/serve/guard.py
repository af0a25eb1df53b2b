"""What every request passes before a route sees it: name, origin, key, size. Layer 8.

A page on the web can make a browser send requests to this machine. So changes are refused to pages of other
origins unless these are allowed, and a server for this machine alone answers to local names only.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyggml_dflash.errors import human_bytes
from pyggml_dflash.serve.metrics import Metrics
from pyggml_dflash.serve.problems import BODY_TOO_LARGE, Problem
from pyggml_dflash.serve.settings import ServeOptions, is_loopback

LOG: Final = logging.getLogger(__name__)
OPEN_PATHS: Final = frozenset({"/", "/health"})  # need no key
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ID: Final = "dflash_request_id"


def request_id(connection: HTTPConnection) -> str:
    """The id that the answer to this request bears."""
    return str(connection.scope[_ID])


class Guard:
    """The outermost part of the application; also counts and logs requests."""

    def __init__(self, app: ASGIApp, *, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # the client went before there was an answer
        scope[_ID] = f"req_{uuid.uuid4().hex}"
        # HEAD is GET whose body is not sent; a route is found, and left in the scope, as for that.
        asked = scope if scope["method"] != "HEAD" else {**scope, "method": "GET"}

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = scope[_ID]
                headers["x-content-type-options"] = "nosniff"
            elif asked is not scope:
                message = {**message, "body": b""}
            await send(message)

        try:
            headers = Headers(scope=scope)
            problem = self._problem(scope, headers)
            if problem is None:
                await self._app(asked, self._limited(receive), counted)
            else:
                await problem.response(scope["path"])(scope, receive, counted)
        finally:
            route = asked.get("route")
            self._metrics.on_request(getattr(route, "path", "other"), status)
            seconds = time.perf_counter() - started
            LOG.info("%s %s %d %.3f s %s", scope["method"], scope["path"], status, seconds, scope[_ID])

    def _problem(self, scope: Scope, headers: Headers) -> Problem | None:
        return (
            self._host_problem(headers)
            or self._origin_problem(scope, headers)
            or self._key_problem(scope, headers)
            or self._size_problem(headers)
        )

    def _host_problem(self, headers: Headers) -> Problem | None:
        names, name = self._options.host_names, _host_name(headers.get("host", ""))
        if names is None or name in names:
            return None
        return Problem(
            403, f"this server does not answer as {name!a}; start it with --allowed-host", code="host"
        )

    def _origin_problem(self, scope: Scope, headers: Headers) -> Problem | None:
        origin = headers.get("origin")
        if origin is None or scope["method"] in SAFE_METHODS:
            return None
        allowed = self._options.cors_origins
        own = origin.partition("://")[2] == headers.get("host")
        if own or "*" in allowed or origin in allowed:
            return None
        message = f"pages of {origin[:80]!a} may not call; start the server with --cors-origin"
        return Problem(403, message, code="origin")

    def _key_problem(self, scope: Scope, headers: Headers) -> Problem | None:
        key = self._options.api_key
        if key is None:
            client = scope.get("client")
            if not scope["path"].startswith("/admin/") or (client is not None and is_loopback(client[0])):
                return None
            return Problem(403, "without an API key this is for the server's own machine", code="not_local")
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        bearer = headers.get("authorization", "").partition(" ")
        given = bearer[2].strip() if bearer[0].lower() == "bearer" else headers.get("x-api-key", "")
        if hmac.compare_digest(given.encode(), key.encode()):
            return None
        what = "wrong" if given else "missing"
        return Problem(
            401,
            f"the API key is {what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _size_problem(self, headers: Headers) -> Problem | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._options.max_body_bytes:
            return Problem(413, self._too_large, code=BODY_TOO_LARGE, headers={"Connection": "close"})
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {human_bytes(self._options.max_body_bytes)}"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that ends a body whose length was not told, once it is too long."""
        n_bytes = 0

        async def limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._options.max_body_bytes:
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return limited


def _host_name(host: str) -> str | None:
    """The name in a Host header, without a port; None for what is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
