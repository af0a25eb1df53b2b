"""JSON as it leaves the server, and what all request and response bodies have in common. Layer 8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Body, Response
from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic_core import PydanticSerializationError

# Valid in JSON, but line ends to many programs that read a stream by lines.
_LINE_ENDS: Final = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


def _whole_object(value: object) -> dict[str, Any]:
    """A body that is an object; what is in it is checked where its members are known."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    return value


# A request's body as FastAPI reads it; what its members may be is the table's to check and to document.
Object = Annotated[dict[str, Any], Body(), PlainValidator(_whole_object)]


class ResponseBody(BaseModel):
    """A response; only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=())

    def json_bytes(self) -> bytes:
        """UTF-8 JSON on one line."""
        try:
            return _escaped(self.model_dump_json(exclude_unset=True)).encode()
        except PydanticSerializationError:  # text that is no Unicode, which a request may have brought
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
