"""The application: its routes, how it fails, and what it says of itself."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from cloud.api import operation, replies, responses, tokens
from cloud.api.body_limit import BodyLimit
from cloud.api.errors import handle_errors
from cloud.api.house import House
from cloud.api.shapes import Json

MAX_BODY = 2 * 1024 * 1024
"""Bytes of a request."""

_FAILURES = {
    400: "The request is not acceptable.",
    401: "An API key is wanted.",
    403: "This decoder does not allow it.",
    404: "There is no such thing here.",
    413: "The body is too long.",
    429: "The client is over a limit; Retry-After says for how long.",
    503: "The decoder is overloaded, or stands still.",
}


def make_app(house: House) -> ASGIApp:
    """Return the application that serves a decoder."""
    failures: dict[int | str, Json] = {
        status: {"model": responses.ErrorBody, "description": about}
        for status, about in _FAILURES.items()
    }
    app = FastAPI(
        title="deltarelay",
        description="OpenAI-compatible API of a deltarelay decoder.",
        version="1",
        responses=failures,
    )
    app.state.house = house
    for part in (replies, tokens, operation):
        app.include_router(part.router)
    handle_errors(app)
    _leave_out_422(app)
    return BodyLimit(app, MAX_BODY)


def _leave_out_422(app: FastAPI) -> None:
    """FastAPI documents a status for invalid bodies that this API answers with 400."""
    document: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        schema = document()
        for path in schema["paths"].values():
            for described in path.values():
                described["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
