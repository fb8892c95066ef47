"""Limits and keys over HTTP: who is over a limit is told when to come back, and nobody else."""

import asyncio
import threading
from collections.abc import Callable

import httpx
import openai
import pytest

from cloud.settings import (
    AdmissionSettings,
    DeviceLimitSettings,
    LimitSettings,
    TenantSettings,
)
from tests.api_world import ApiWorld, in_api_world
from tests.test_cloud_admission import written
from tests.test_cloud_api import LONG, chat
from tests.test_cloud_server import answer


def limited(burst: float, rate: float = 1.0) -> AdmissionSettings:
    """Bound each device."""
    return AdmissionSettings(device=DeviceLimitSettings(rate=rate, burst=burst, per_minute=0))


def test_a_client_over_its_limit_is_told_when_to_come_back_and_a_vehicle_goes_on() -> None:
    async def test(world: ApiWorld) -> None:
        create = world.openai.chat.completions.create
        await create(**chat(max_tokens=300, **LONG))
        with pytest.raises(openai.RateLimitError) as error:
            await create(**chat(max_tokens=300, **LONG))
        assert error.value.code == "rate_limit_exceeded"
        assert int(error.value.response.headers["retry-after"]) >= 1
        assert "over its limit" in str(error.value)
        async with world.agent() as agent, agent.conversation(max_tokens=8) as talk:
            assert await answer(talk, "Find a charger")

    in_api_world(test, admission=limited(400))


def test_what_a_reply_did_not_use_is_given_back() -> None:
    async def test(world: ApiWorld) -> None:
        for stream in (False, True) * 2:
            body = chat(max_tokens=300, stop_token_ids=[5], stream=stream, **LONG)
            assert (await world.http.post("/v1/chat/completions", json=body)).status_code == 200

    in_api_world(test, admission=limited(700, rate=0.001))


def test_a_client_that_hangs_up_counts_no_more_as_under_way() -> None:
    async def test(world: ApiWorld) -> None:
        hold = threading.Event()
        world.decoder.worker.submit(lambda _engine: hold.wait() and None)
        ask: Callable[..., object] = world.http.post
        asking = [
            asyncio.create_task(ask("/v1/chat/completions", json=chat(stream=stream)))  # type: ignore[arg-type]
            for stream in (False, True)
        ]
        await asyncio.sleep(0.1)
        refused = await world.http.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        assert "max_active" in refused.json()["error"]["message"]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.sleep(0.1)
        hold.set()
        assert (await world.http.post("/v1/chat/completions", json=chat())).status_code == 200

    in_api_world(test, admission=AdmissionSettings(max_active=2))


KEYS = AdmissionSettings(
    tenants={
        "taxi": TenantSettings(keys=[written("taxi-key")]),
        "bus": TenantSettings(keys=[written("bus-key")], limit=LimitSettings(rate=1, burst=100)),
    }
)


def test_where_there_are_keys_a_client_comes_with_one() -> None:
    async def test(world: ApiWorld) -> None:
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/tokenize", {"prompt": "a"}),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ):
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "taxi-key"}):
                response = await world.http.post(path, json=body, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await world.http.get("/health")).status_code == 200
        client = world.openai.with_options(api_key="taxi-key")
        assert (await client.models.list()).data
        await client.chat.completions.create(**chat())

    in_api_world(test, admission=KEYS)


def test_tenants_have_limits_of_their_own_and_share_no_prefix() -> None:
    async def test(world: ApiWorld) -> None:
        taxi, bus = (world.openai.with_options(api_key=f"{who}-key") for who in ("taxi", "bus"))
        body = chat(messages=[{"role": "user", "content": "Drive me home. " * 9}], max_tokens=2)
        cached = [
            (await client.chat.completions.create(**body)).usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
            for client in (taxi, taxi, bus)
        ]
        assert cached[0] == 0
        assert cached[1]
        assert cached[2] == 0
        with pytest.raises(openai.RateLimitError, match="tenant bus"):
            await bus.chat.completions.create(**body)
        await taxi.chat.completions.create(**body)

    in_api_world(test, admission=KEYS)


def test_every_reply_of_a_request_is_one_under_way_and_no_header_makes_another_client() -> None:
    async def test(world: ApiWorld) -> None:
        too_many = await world.http.post("/v1/chat/completions", json=chat(n=5))
        assert too_many.status_code == 400
        assert "at most 4" in too_many.json()["error"]["message"]
        hold = threading.Event()
        world.decoder.worker.submit(lambda _engine: hold.wait() and None)
        asking = asyncio.create_task(world.http.post("/v1/chat/completions", json=chat(n=3)))
        await asyncio.sleep(0.1)
        for headers in ({}, {"x-forwarded-for": "10.0.0.7"}):
            refused = await world.http.post("/v1/chat/completions", json=chat(n=2), headers=headers)
            assert refused.status_code == 429
        hold.set()
        assert (await asking).status_code == 200
        assert (await world.http.post("/v1/chat/completions", json=chat(n=4))).status_code == 200

    in_api_world(test, admission=AdmissionSettings(max_active=4))


def test_a_body_over_a_limit_is_refused_before_it_is_begun() -> None:
    async def test(world: ApiWorld) -> None:
        async with httpx.AsyncClient(base_url=world.url) as client:
            for _ in range(2):
                await client.post("/v1/chat/completions", json=chat(max_tokens=60, **LONG))
            steps = world.decoder.worker.num_steps
            refused = await client.post("/v1/chat/completions", json=chat(max_tokens=60, **LONG))
        assert refused.status_code == 429
        assert world.decoder.worker.num_steps == steps

    in_api_world(test, admission=limited(150, rate=0.01))
