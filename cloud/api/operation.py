"""Routes for those who run a decoder: models, adapters, health, metrics."""

from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cloud.api import responses
from cloud.api.errors import ApiError
from cloud.api.house import House, OwnHouse, adapter_of, as_json
from cloud.api.requests import LoadAdapterRequest, UnloadAdapterRequest
from cloud.api.shapes import Json
from cloud.api.visitor import known

PATIENCE = 5.0
"""Seconds for a step, after which the engine counts as standing still."""

router = APIRouter(tags=["operation"])


@router.get("/v1/models", response_model=responses.ModelList, dependencies=[known])
async def models(house: OwnHouse) -> Response:
    """List what can be asked: the model, and every adapter under its name."""
    names = [house.model, *house.voice.adapters.names()]
    return as_json({"object": "list", "data": [_model(name, house) for name in names]})


@router.get("/v1/models/{model:path}", response_model=responses.ModelBody, dependencies=[known])
async def model(model: str, house: OwnHouse) -> Response:
    """Describe one model."""
    adapter_of(model, house)
    return as_json(_model(model, house))


@router.post("/v1/load_lora_adapter", response_model=responses.AdapterBody, dependencies=[known])
async def load_adapter(body: LoadAdapterRequest, house: OwnHouse) -> Response:
    """Load an adapter, or swap the one of this name; replies under way end as they began."""
    _check_updates(house)
    if body.lora_name == house.model:
        raise ApiError(400, f"{body.lora_name!r} is the model's own name", param="lora_name")
    loaded = await house.voice.adapters.load(body.lora_name, Path(body.lora_path))
    return as_json({"lora_name": body.lora_name, "digest": loaded.digest})


@router.post("/v1/unload_lora_adapter", response_model=responses.AdapterBody, dependencies=[known])
async def unload_adapter(body: UnloadAdapterRequest, house: OwnHouse) -> Response:
    """Unload an adapter; replies under way end as they began."""
    _check_updates(house)
    adapter_of(body.lora_name, house)
    await house.voice.adapters.unload(body.lora_name)
    return as_json({"lora_name": body.lora_name, "digest": ""})


@router.get("/health", response_model=responses.HealthBody)
async def health(house: OwnHouse) -> Response:
    """Answer 200 if the engine moves: it was asked, and it answered. 503: about to leave."""
    if house.draining:
        raise ApiError(503, "this decoder is about to leave", kind="service_unavailable")
    state = await house.state(PATIENCE)
    return as_json({"status": "ok", "steps": state.steps})


@router.get("/metrics", response_class=Response)
async def metrics(house: OwnHouse) -> Response:
    """Return metrics for Prometheus."""
    text = house.voice.metrics.scrape(await house.state(PATIENCE))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _check_updates(house: House) -> None:
    if not house.adapter_updates:
        raise ApiError(
            403,
            "adapters are loaded over HTTP only where the decoder's setting adapter_updates is "
            "true: they name folders of its host",
            kind="permission_error",
        )


def _model(name: str, house: House) -> Json:
    adapter = adapter_of(name, house)
    return {
        "id": name,
        "object": "model",
        "created": house.started,
        "owned_by": "deltarelay",
        "max_model_len": house.voice.context,
        "root": name if adapter is None else adapter.digest,
        "parent": None if adapter is None else house.model,
    }
