"""POST /tokenize, /detokenize and /apply-template: between texts and what the model reads. Layer 8."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from pyggml_dflash.api import Engine
from pyggml_dflash.serve.bodies import RequestBody, ResponseBody, json_response
from pyggml_dflash.serve.documents import responses
from pyggml_dflash.serve.fields import ChatMessage, TokenId, check_count
from pyggml_dflash.serve.service import Service, off_loop
from pyggml_dflash.serve.tool_fields import ChatTool

_STATUSES = (400, 401, 403, 413, 500, 503)


class TokenizeRequest(RequestBody):
    """POST /tokenize."""

    content: str
    add_special: bool = Field(False, description="With what the model expects at the start (BOS).")
    parse_special: bool = Field(True, description="Control tokens written in the text are read as such.")
    with_pieces: bool = Field(False, description="Each token with its text.")


class TokenPiece(ResponseBody):
    """A token and its text; where that is a part of a character, its bytes."""

    id: int
    piece: str | list[int]


class Tokens(ResponseBody):
    """Token ids, or tokens with their text."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    tokens: list[TokenId]
    skip_special: bool = Field(False, description="Leave control tokens out.")


class Text(ResponseBody):
    """A text."""

    content: str


class TemplateRequest(RequestBody):
    """POST /apply-template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ChatTool] | None = None
    reasoning: bool | None = Field(None, description="Whether the model thinks first; null: the template's.")
    add_generation_prompt: bool = True


class Prompt(ResponseBody):
    """A conversation as the model reads it."""

    prompt: str


def text_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["texts"])

    @router.post("/tokenize", responses=responses(Tokens, *_STATUSES))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text."""
        engine = service.engine
        return json_response(await off_loop(lambda: _tokens(engine, body)))

    @router.post("/detokenize", responses=responses(Text, *_STATUSES))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        engine = service.engine
        text = await off_loop(lambda: engine.detokenize(body.tokens, skip_special=body.skip_special))
        return json_response(Text(content=text))

    @router.post("/apply-template", responses=responses(Prompt, *_STATUSES))
    async def apply_template(body: TemplateRequest) -> Response:
        """The prompt that the model's chat template makes of a conversation."""
        engine = service.engine
        check_count(body.messages, service.options.max_messages)
        return json_response(await off_loop(lambda: _prompt(engine, body)))

    return router


def _tokens(engine: Engine, body: TokenizeRequest) -> Tokens:
    ids = engine.tokenize(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return Tokens(tokens=ids)
    return Tokens(tokens=[_piece(token, engine.token_bytes(token)) for token in ids])


def _piece(token: int, data: bytes) -> TokenPiece:
    try:
        return TokenPiece(id=token, piece=data.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token, piece=list(data))


def _prompt(engine: Engine, body: TemplateRequest) -> Prompt:
    return Prompt(
        prompt=engine.render_chat(
            [message.for_template() for message in body.messages],
            tools=[tool.for_engine() for tool in body.tools] if body.tools else None,
            reasoning=body.reasoning,
            add_generation_prompt=body.add_generation_prompt,
        )
    )
