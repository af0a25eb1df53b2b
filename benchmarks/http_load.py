"""A server in a process of its own, and clients that ask it for completions at the same time.

Standard library only, and nothing of either side's: both servers get the same bytes from the same clients.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Final

from worker import SETTLE_S

Body = dict[str, Any]
START_S: Final = 120.0  # a server that has not loaded its model by then is given up
ANSWER_S: Final = 300.0
TAIL_LINES: Final = 15  # of a server's own words, shown when it fails


class ServerError(Exception):
    """A server did not start, ended, or refused a request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    n_prompt: int
    n_tokens: int
    ended: bool  # by itself, before the most tokens that it may have


class Server:
    """A server on a free port of loopback. Use it as a context manager; it answers once that is entered.

    `command` starts it, with HOST and PORT where those belong; `more` is what every body has beside its own.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], more: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self._more = dict(more or {})
        self._port = free_port()
        words = {"HOST": "127.0.0.1", "PORT": str(self._port)}
        self._command = [words.get(word, word) for word in command]
        self._env = dict(env)

    def __enter__(self) -> Server:
        self._said = tempfile.TemporaryFile()  # a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the server end, by force if it does not."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def whole(self, body: Body) -> Answer:
        """The answer to a request for a completion."""
        connection = self._ask(body)
        try:
            found = json.loads(self._response(connection).read())
        finally:
            connection.close()
        choice, usage = found["choices"][0], found["usage"]
        return Answer(
            text=choice["text"],
            n_prompt=usage["prompt_tokens"],
            n_tokens=usage["completion_tokens"],
            ended=choice["finish_reason"] != "length",
        )

    def first_text_s(self, body: Body) -> float:
        """Seconds from the request to the first text of its stream, or its end if it has none.

        The rest is read too.
        """
        started = time.perf_counter()
        connection = self._ask({**body, "stream": True})
        first = None
        try:
            for event in events(self._response(connection)):
                choice = event["choices"][0] if event["choices"] else {}
                if first is None and (choice.get("text") or choice.get("finish_reason")):
                    first = time.perf_counter() - started
        finally:
            connection.close()
        if first is None:
            raise ServerError(f"{self.name} sent a stream without an end")
        return first

    def _ask(self, body: Body) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, **self._more}), headers)
        return connection

    def _response(self, connection: HTTPConnection) -> HTTPResponse:
        try:
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.name} gave no answer: {error}\n{self._tail()}") from error
        if response.status != 200:
            raise ServerError(f"{self.name} answered {response.status}: {response.read().decode()}")
        return response

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                status = self._process.returncode
                raise ServerError(f"{self.name} ended with status {status}:\n{self._tail()}")
            if time.monotonic() > end:
                raise ServerError(f"{self.name} did not answer in {START_S:.0f} s:\n{self._tail()}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        self._said.seek(0)
        return "\n".join(self._said.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def events(response: HTTPResponse) -> Any:
    """What comes as server-sent events, up to the last."""
    for line in response:
        data = line.strip()
        if data.startswith(b"data:") and data != b"data: [DONE]":
            yield json.loads(data[5:])


def tokens_per_s(server: Server, bodies: Sequence[Body], n_clients: int) -> tuple[float, list[Answer]]:
    """Tokens of all answers over the seconds from the first request to the last answer; the answers in order.

    Clients take the next request each as soon as they have their answer.
    """
    with ThreadPoolExecutor(n_clients) as clients:
        started = time.perf_counter()
        answers = list(clients.map(server.whole, bodies))
        seconds = time.perf_counter() - started
    time.sleep(SETTLE_S)
    return sum(answer.n_tokens for answer in answers) / seconds, answers


def first_texts_s(server: Server, bodies: Sequence[Body], n_clients: int) -> list[float]:
    """Seconds to the first text of each answer, streamed to so many clients at a time."""
    with ThreadPoolExecutor(n_clients) as clients:
        found = list(clients.map(server.first_text_s, bodies))
    time.sleep(SETTLE_S)
    return found
