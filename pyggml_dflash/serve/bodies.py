"""JSON as it comes and leaves, and what all request and response bodies have in common. Layer 8."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Final

from fastapi import Body, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic_core import PydanticSerializationError

from pyggml_dflash.openai.texts import read_json

# Valid in JSON, but line ends to many programs that read a stream by lines.
_LINE_ENDS: Final = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


def _whole_object(value: object) -> dict[str, Any]:
    """A body that is an object; what is in it is checked where its members are known."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    return value


# A request's body as FastAPI reads it; what its members may be is the table's to check and to document.
Object = Annotated[dict[str, Any], Body(), PlainValidator(_whole_object)]


class _JsonRequest(Request):
    """A request whose body is read like a line of a batch."""

    async def json(self) -> Any:
        """The value of the body, which is UTF-8."""
        data = await self.body()
        try:
            return read_json(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            at = len(data) - len(error.object) + error.start  # behind a mark of the order of bytes
            reason = f"it is not UTF-8: byte {at} is {data[at]:#04x}"
            raise json.JSONDecodeError(reason, "", 0) from error
        except ValueError as error:  # FastAPI passes on no more than the words of a JSON error
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route whose bodies have to be JSON that can be written again."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind our reading."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class ResponseBody(BaseModel):
    """A response; only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=())

    def json_bytes(self) -> bytes:
        """UTF-8 JSON on one line."""
        try:
            return _escaped(self.model_dump_json(exclude_unset=True)).encode()
        except PydanticSerializationError:  # text that is no Unicode, which a request may have brought
            return json_bytes(self.model_dump(exclude_unset=True))


class FreeBody(ResponseBody):
    """A response with members that a request or a model has named."""

    def json_bytes(self) -> bytes:
        """UTF-8 JSON on one line; names that are no Unicode are escaped, which pydantic would replace."""
        return json_bytes(self.model_dump(exclude_unset=True))


def json_bytes(value: Any) -> bytes:
    """UTF-8 JSON on one line; text that is no Unicode, as a request may quote, is escaped."""
    try:
        return _escaped(json.dumps(value, ensure_ascii=False, allow_nan=False)).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def json_response(
    value: ResponseBody | Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    content = value.json_bytes() if isinstance(value, ResponseBody) else json_bytes(value)
    return Response(content, status, dict(headers or {}), media_type="application/json")


def _escaped(text: str) -> str:
    for char, escape in _LINE_ENDS.items():
        text = text.replace(char, escape)
    return text
