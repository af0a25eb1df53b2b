"""Answers in the shapes of OpenAI's chat and text completions. Layer 8."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyggml_dflash.api import CallEnd, Engine, ParsedAnswer
from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.openai.asks import Ask
from pyggml_dflash.requests import GenerationResult, TokenLogprob

NO_LOGPROB: Final = -9999.0  # OpenAI's figure for a token that cannot be


def body_of(engine: Engine, ask: Ask, results: Sequence[GenerationResult], model: str) -> dict[str, Any]:
    """The body of a response; `results` are of `ask.all_requests`, in their order."""
    is_chat = ask.kind == "chat"
    choices = [
        _chat_choice(engine, ask, i, result) if is_chat else _text_choice(engine, i, result)
        for i, result in enumerate(results)
    ]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(results, ask.n),
    }


def _usage(results: Sequence[GenerationResult], n: int) -> dict[str, Any]:
    """Token counts of all answers; a prompt that has `n` of them counts once."""
    prompt = sum(result.usage.prompt_tokens for result in results[::n])
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.usage.cached_tokens for r in results[::n])},
    }


def _chat_choice(engine: Engine, ask: Ask, index: int, result: GenerationResult) -> dict[str, Any]:
    request = ask.requests[index // ask.n]
    message = _message(engine, request, result.text, one_call=ask.calls.one)
    reason = "tool_calls" if "tool_calls" in message and result.finish_reason == "stop" else _reason(result)
    logprobs = [_token(engine, token) for token in result.logprobs]
    return {
        "index": index,
        "message": message,
        "logprobs": None if request.logprobs is None else {"content": logprobs},
        "finish_reason": reason,
    }


def _message(engine: Engine, request: BatchRequest, text: str, *, one_call: bool) -> dict[str, Any]:
    assert request.messages is not None
    prompt = engine.render_chat(
        request.messages,
        tools=request.tools,
        reasoning=request.reasoning,
        reasoning_budget=request.reasoning_budget,
    )
    parser = engine.answer_parser(prompt, tools=request.tools)
    events = [*parser.push(text), *parser.finish()]
    ends = [i for i, event in enumerate(events, 1) if isinstance(event, CallEnd)]
    parsed = ParsedAnswer.gather(events[: ends[0]] if one_call and ends else events)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in parsed.calls
        ]
    return message


def _reason(result: GenerationResult) -> str:
    return "length" if result.finish_reason == "length" else "stop"


def _token(engine: Engine, token: TokenLogprob) -> dict[str, Any]:
    best = [_described(engine, other, logprob) for other, logprob in token.top]
    return {**_described(engine, token.token, token.logprob), "top_logprobs": best}


def _described(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    text = engine.token_bytes(token)
    return {"token": _text(text), "logprob": max(logprob, NO_LOGPROB), "bytes": list(text)}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _text_choice(engine: Engine, index: int, result: GenerationResult) -> dict[str, Any]:
    logprobs = _text_logprobs(engine, result.logprobs) if result.logprobs else None
    return {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": _reason(result)}


def _text_logprobs(engine: Engine, logprobs: Sequence[TokenLogprob]) -> Mapping[str, Any]:
    """One list for each property, in the form of older completions."""
    texts = [_text(engine.token_bytes(token.token)) for token in logprobs]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, NO_LOGPROB) for token in logprobs],
        "top_logprobs": [
            {_text(engine.token_bytes(other)): max(logprob, NO_LOGPROB) for other, logprob in token.top}
            for token in logprobs
        ],
        "text_offset": offsets,
    }
