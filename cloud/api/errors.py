"""Every failure as the OpenAI API tells it: a status, a type, a code and the parameter meant."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from shared.errors import (
    AccessError,
    CapacityError,
    ContextLengthError,
    DeltarelayError,
    InputError,
    ModelError,
    TurnError,
)

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[DeltarelayError], int, str, str | None], ...] = (
    (AccessError, 401, "authentication_error", "invalid_api_key"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (InputError, 400, "invalid_request_error", None),
    (ModelError, 400, "invalid_request_error", None),
    (TurnError, 400, "invalid_request_error", None),
    (CapacityError, 503, "overloaded_error", None),
)


class ApiError(Exception):
    """A failure that knows how HTTP tells it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        detail = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": detail}

    def response(self) -> Response:
        """As an answer."""
        wait = self.retry_after
        headers = {} if wait is None else {"Retry-After": str(math.ceil(wait))}
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, headers, "application/json")


def as_api_error(error: DeltarelayError) -> ApiError:
    """Return how HTTP tells an error of ours."""
    for kind, status, name, code in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error), kind=name, code=code)
    return ApiError(500, str(error), kind="server_error")


def handle_errors(app: FastAPI) -> None:
    """Make `app` tell all of its failures so."""

    @app.exception_handler(ApiError)
    async def of_api(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(DeltarelayError)
    async def of_ours(_: Request, error: DeltarelayError) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(_: Request, error: RequestValidationError) -> Response:
        return _invalid(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        place = f"{request.method} {request.url.path}"
        return ApiError(error.status_code, f"{place}: {error.detail}").response()

    @app.exception_handler(Exception)
    async def of_bugs(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        message = "the decoder failed on this request; its log says more"
        return ApiError(500, message, kind="server_error").response()

    _ = of_api, of_ours, of_validation, of_http, of_bugs


def _invalid(errors: Sequence[Any]) -> ApiError:
    """Name what is wrong: of the ways a value could have been read, the one that came farthest."""
    first = max(errors, key=lambda error: len(error["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "model_attributes_type" and first["loc"] == ("body",):
        return ApiError(400, "the body must be a JSON object, with Content-Type: application/json")
    path = [str(part) for part in first["loc"] if not _is_branch(part)]
    name = ".".join(path)
    return ApiError(400, f"{name or 'body'}: {first['msg']}", param=path[0] if path else None)


def _is_branch(part: str | int) -> bool:
    """Tell whether a part of a place is pydantic's name for a way to read a value."""
    return isinstance(part, str) and (part in ("body", "str", "int") or "[" in part)
