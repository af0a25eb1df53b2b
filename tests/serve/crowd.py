"""Many clients at once, some of whom read slowly or leave early, and what they are told."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.serve.live import CHAT, PATIENCE_S

Body = dict[str, Any]
WHO: Final = ("fox", "cat", "dog", "owl", "bear", "frog")
SCHEMA: Final = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 9}},
    "required": ["age"],
}


def _story(who: str) -> list[Body]:
    return [{"role": "user", "content": f"Tell me a story about a {who}."}]


def _requests() -> list[tuple[str, Body]]:
    drawn = {"temperature": 0.9, "top_p": 0.95}
    found: list[tuple[str, Body]] = []
    for i, who in enumerate(WHO):
        found.append((CHAT, {"messages": _story(who), "max_tokens": 12 + 4 * i}))
        found.append((CHAT, {"messages": _story(who), "max_tokens": 16, **drawn, "seed": i}))
        found.append(("/v1/completions", {"prompt": f"Once upon a time, a {who}", "max_tokens": 8 + i}))
    found.append((CHAT, {"messages": _story("hen"), "max_tokens": 8, "n": 3, **drawn, "seed": 9}))
    found.append((CHAT, {"messages": _story("cow"), "max_tokens": 20, "json_schema": SCHEMA}))
    found.append(("/v1/messages", {"messages": _story("pig"), "max_tokens": 16}))
    found.append(("/v1/responses", {"input": "Tell me of a duck. " * 20, "max_output_tokens": 8}))
    return found


REQUESTS: Final = _requests()


def texts_of(path: str, body: Any) -> list[str]:
    """The texts of a whole answer."""
    if path == "/v1/messages":
        return ["".join(block["text"] for block in body["content"])]
    if path == "/v1/responses":
        return ["".join(part["text"] for item in body["output"] for part in item["content"])]
    return [c["message"]["content"] if path == CHAT else c["text"] for c in body["choices"]]


def streamed_texts(path: str, events: list[Any], n: int) -> list[str]:
    """The texts of an answer that came as events."""
    texts = [""] * n
    for event in events:
        if path == "/v1/messages":
            texts[0] += event.get("delta", {}).get("text", "")
        elif path == "/v1/responses":
            texts[0] += event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            for choice in event["choices"]:
                more = choice["delta"].get("content") if path == CHAT else choice["text"]
                texts[choice["index"]] += more or ""
    return texts


@dataclass
class Crowd:
    """What became of a crowd's requests."""

    url: str
    alone: list[list[str]] = field(default_factory=list)  # answers to `REQUESTS`, each asked alone
    answered: Counter[str] = field(default_factory=Counter)  # by how the client behaved
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def ask_alone(self) -> None:
        """Learn the answer to each request, one after the other."""
        async with self._client() as client:
            for path, body in REQUESTS:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                self.alone.append(texts_of(path, answer.json()))

    async def come(self, n_clients: int, *, n_requests: int = 10**9, seconds: float = 10**9) -> None:
        """Clients that ask one thing after the other, up to so many each or for so long."""
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(self._visit(i, n_requests, end) for i in range(n_clients)))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=10 * PATIENCE_S)

    async def _visit(self, number: int, n_requests: int, end: float) -> None:
        rng = random.Random(number)
        loop = asyncio.get_running_loop()
        async with self._client() as client:
            n_done = 0
            while n_done < n_requests and loop.time() < end:
                which = rng.randrange(len(REQUESTS))
                manner = rng.choices(("whole", "stream", "slow", "leaves"), (4, 4, 1, 1))[0]
                status = await self._ask(client, which, manner, rng)
                self.statuses[status] += 1
                if status == 429:
                    await asyncio.sleep(rng.uniform(0.2, 1.0))
                else:
                    self.answered[manner] += 1
                    n_done += 1

    async def _ask(self, client: httpx.AsyncClient, which: int, manner: str, rng: random.Random) -> int:
        path, body = REQUESTS[which]
        if manner == "whole":
            answer = await client.post(path, json=body)
            if answer.status_code == 200:
                self._compare(which, manner, texts_of(path, answer.json()))
            return answer.status_code
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return answer.status_code
            events = []
            n_lines = rng.randrange(1, 40) if manner == "leaves" else 10**9
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    events.append(json.loads(line[6:]))
                if manner == "slow":
                    await asyncio.sleep(0.02)
                n_lines -= 1
                if not n_lines:
                    return 200
            if manner != "leaves":
                self._compare(which, manner, streamed_texts(path, events, len(self.alone[which])))
            return 200

    def _compare(self, which: int, manner: str, texts: list[str]) -> None:
        if texts != self.alone[which]:
            self.wrong.append(f"{manner} {REQUESTS[which]}: {texts} and not {self.alone[which]}")
