"""POST /tokenize, /detokenize and /apply-template: between texts and what the model reads. Layer 8."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Response
from pydantic import WithJsonSchema

from pyggml_dflash.api import Engine
from pyggml_dflash.openai.asks import Body, turn_of
from pyggml_dflash.openai.fields import MESSAGES, TOKEN, TOOLS
from pyggml_dflash.openai.forms import tool
from pyggml_dflash.openai.values import FLAG, TEXT, check_items, items, record
from pyggml_dflash.serve.bodies import JsonRoute, Object, ResponseBody, json_response
from pyggml_dflash.serve.documents import responses
from pyggml_dflash.serve.service import Service, off_loop

_STATUSES = (400, 401, 403, 413, 500, 503)


_TOKENIZE: Final = record(
    {
        "content": TEXT,
        "add_special": FLAG.about("With what the model expects at the start (BOS)."),
        "parse_special": FLAG.about("Control tokens written in the text are read as such; true if absent."),
        "with_pieces": FLAG.about("Each token with its text."),
    },
    required=("content",),
)
_DETOKENIZE: Final = record(
    {"tokens": items(TOKEN), "skip_special": FLAG.about("Leave control tokens out.")}, required=("tokens",)
)
_TEMPLATE: Final = record(
    {
        "messages": MESSAGES,
        "tools": TOOLS,
        "reasoning": FLAG.about("Whether the model thinks first; null: the template's."),
        "add_generation_prompt": FLAG.about("True if absent."),
    },
    required=("messages",),
)
TokenizeBody = Annotated[Object, WithJsonSchema(dict(_TOKENIZE.schema))]
DetokenizeBody = Annotated[Object, WithJsonSchema(dict(_DETOKENIZE.schema))]
TemplateBody = Annotated[Object, WithJsonSchema(dict(_TEMPLATE.schema))]


class TokenPiece(ResponseBody):
    """A token and its text; where that is a part of a character, its bytes."""

    id: int
    piece: str | list[int]


class Tokens(ResponseBody):
    """Token ids, or tokens with their text."""

    tokens: list[int] | list[TokenPiece]


class Text(ResponseBody):
    """A text."""

    content: str


class Prompt(ResponseBody):
    """A conversation as the model reads it."""

    prompt: str


def text_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["texts"], route_class=JsonRoute)

    @router.post("/tokenize", responses=responses(Tokens, *_STATUSES))
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a text."""
        _TOKENIZE.check("", body)
        engine = service.engine
        return json_response(await off_loop(lambda: _tokens(engine, body)))

    @router.post("/detokenize", responses=responses(Text, *_STATUSES))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of tokens."""
        _DETOKENIZE.check("", body)
        engine, skip = service.engine, bool(body.get("skip_special"))
        text = await off_loop(lambda: engine.detokenize(body["tokens"], skip_special=skip))
        return json_response(Text(content=text))

    @router.post("/apply-template", responses=responses(Prompt, *_STATUSES))
    async def apply_template(body: TemplateBody) -> Response:
        """The prompt that the model's chat template makes of a conversation."""
        _TEMPLATE.check("", body)
        engine = service.engine
        check_items("messages", body["messages"], service.options.max_messages)
        return json_response(await off_loop(lambda: _prompt(engine, body)))

    return router


def _tokens(engine: Engine, body: Body) -> Tokens:
    ids = engine.tokenize(
        body["content"],
        add_special=bool(body.get("add_special")),
        parse_special=body.get("parse_special") is not False,
    )
    if not body.get("with_pieces"):
        return Tokens(tokens=ids)
    return Tokens(tokens=[_piece(token, engine.token_bytes(token)) for token in ids])


def _piece(token: int, data: bytes) -> TokenPiece:
    try:
        return TokenPiece(id=token, piece=data.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token, piece=list(data))


def _prompt(engine: Engine, body: Body) -> Prompt:
    return Prompt(
        prompt=engine.render_chat(
            [turn_of(message) for message in body["messages"]],
            tools=[tool(given["function"]) for given in body.get("tools") or ()] or None,
            reasoning=body.get("reasoning"),
            add_generation_prompt=body.get("add_generation_prompt") is not False,
        )
    )
