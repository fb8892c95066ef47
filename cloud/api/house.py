"""What the API asks of the decoder it belongs to."""

from typing import Annotated, Protocol

import msgspec
from fastapi import Depends, Request, Response

from cloud.access.admission import Admission
from cloud.access.gate import Gate
from cloud.api.errors import ApiError
from cloud.api.shapes import Json
from cloud.engine.sequence import LoadedAdapter
from cloud.metrics import DecoderState
from cloud.voice import Voice


class House(Protocol):
    """A decoder."""

    @property
    def voice(self) -> Voice: ...
    @property
    def model(self) -> str: ...
    @property
    def started(self) -> int: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def adapter_updates(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def blob_of(self, digest: str) -> bytes | None: ...
    async def state(self, patience: float) -> DecoderState: ...


async def _house_of(http: Request) -> House:
    house: House = http.app.state.house
    return house


OwnHouse = Annotated[House, Depends(_house_of)]
"""The decoder, as a parameter of a route."""


def adapter_of(name: str, house: House) -> LoadedAdapter | None:
    """Return the adapter that a model's name asks for; None: the model itself is meant.

    Raises:
        ApiError: there is no such model.
    """
    if name == house.model:
        return None
    adapter = house.voice.adapters.find(name)
    if adapter is None:
        known = ", ".join(map(repr, [house.model, *house.voice.adapters.names()]))
        raise ApiError(
            404,
            f"model {name!r} is not served here; there are: {known}",
            param="model",
            code="model_not_found",
        )
    return adapter


def as_json(value: Json) -> Response:
    """Return an answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")
