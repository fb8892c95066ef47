"""API keys over HTTP: whose they are, what they may, and what becomes of who loses one."""

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest

from cloud.access.registry import Registry
from cloud.settings import AdmissionSettings, DeviceLimitSettings, LimitSettings, TenantSettings
from tests.api_world import ApiWorld, in_api_world
from tests.test_cloud_admission import written
from tests.test_cloud_api import LONG, chat

SHARED = [{"role": "user", "content": "Drive me home by the river. " * 9}]


def slow(world: ApiWorld) -> None:
    """Let every step take a while, so that replies last."""
    runner = world.decoder.brain.engine.runner
    run = runner.run
    runner.run = lambda batch: time.sleep(0.01) or run(batch)  # type: ignore[method-assign,func-returns-value]


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_stream_ends_with_an_error_within_a_second_of_its_keys_revocation(
    tmp_path: Path,
) -> None:
    async def test(world: ApiWorld) -> None:
        slow(world)
        body = chat(max_tokens=400, stream=True, **LONG)
        events: list[str] = []
        revoked_at = 0.0
        async with world.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=bearer(text)
        ) as response:
            async for line in response.aiter_lines():
                events += [line.removeprefix("data: ")] if line else []
                if len(events) == 3:
                    operator.revoke_key(key.id)
                    revoked_at = time.monotonic()
        assert time.monotonic() - revoked_at < 1.0
        error = json.loads(events[-1])["error"]
        assert error["code"] == "invalid_api_key"
        assert error["message"] == f"the API key {key.id} was revoked"
        again = await world.http.post("/v1/chat/completions", json=chat(), headers=bearer(text))
        assert again.status_code == 401
        assert again.json()["error"] == error
        assert (
            await world.http.post("/v1/chat/completions", json=chat(), headers=bearer(other))
        ).status_code == 200

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        key, text = registry.add_key("web", "default", None)
        _, other = registry.add_key("web", "default", None)
        in_api_world(test, registry=registry)


def test_a_reply_under_way_is_answered_401_when_its_key_is_revoked(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        slow(world)
        client = world.openai.with_options(api_key=text)
        asking = asyncio.create_task(
            client.chat.completions.create(**chat(max_tokens=400, **LONG))  # type: ignore[call-overload]
        )
        await world.until(lambda: world.num_sequences == 1)
        operator.revoke_key(key.id)
        with pytest.raises(openai.AuthenticationError, match="was revoked"):
            async with asyncio.timeout(1.0):
                await asking

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        key, text = registry.add_key("web", "default", None)
        in_api_world(test, registry=registry)


def test_who_revokes_the_last_key_does_not_open_the_door(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        assert (await world.http.get("/v1/models")).status_code == 401
        response = await world.http.get("/v1/models", headers=bearer(text))
        assert response.status_code == 401

    with Registry(tmp_path) as registry:
        key, text = registry.add_key("web", "default", None)
        registry.revoke_key(key.id)
        in_api_world(test, registry=registry)


def test_a_new_key_is_known_to_a_running_decoder_and_closes_an_open_one(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        assert (await world.http.get("/v1/models")).status_code == 200
        _, text = operator.add_key("web", "default", None)
        await asyncio.sleep(0.5)
        assert (await world.http.get("/v1/models")).status_code == 401
        assert (await world.http.get("/v1/models", headers=bearer(text))).status_code == 200

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        in_api_world(test, registry=registry)


def test_a_key_has_its_own_limit_wherever_it_is_used_and_others_have_theirs(
    tmp_path: Path,
) -> None:
    async def test(world: ApiWorld) -> None:
        tight_one, plain = (
            world.openai.with_options(api_key=one).chat.completions for one in (tight, free)
        )
        await tight_one.create(**chat(max_tokens=60, **LONG))
        with pytest.raises(openai.RateLimitError, match=r"is over its limit \(its own\)"):
            await tight_one.create(**chat(max_tokens=60, **LONG))
        for _ in range(3):
            await plain.create(**chat(max_tokens=60, **LONG))
        with pytest.raises(openai.RateLimitError, match=r"key \w+ is over its limit \(adm"):
            await plain.create(**chat(max_tokens=300, **LONG))

    with Registry(tmp_path) as registry:
        _, tight = registry.add_key("small", "default", LimitSettings(0.01, 150.0, 0.0))
        _, free = registry.add_key("plain", "default", None)
        limit = DeviceLimitSettings(rate=0.01, burst=500, per_minute=0)
        in_api_world(test, registry=registry, admission=AdmissionSettings(limit))


def test_keys_of_two_tenants_reuse_not_a_token_of_each_other(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        engine = world.decoder.brain.engine
        reused: list[int] = []
        for text in (taxi, taxi, bus, listed, bus):
            before = engine.num_adopted
            client = world.openai.with_options(api_key=text)
            await client.chat.completions.create(**chat(messages=SHARED, max_tokens=2))
            reused.append(engine.num_adopted - before)
        assert reused[1] >= 16
        assert reused == [0, reused[1], 0, reused[1], reused[1]]

    with Registry(tmp_path) as registry:
        _, taxi = registry.add_key("web", "taxi", None)
        _, bus = registry.add_key("web", "bus", None)
        listed = "a long random key in the settings"
        tenants = {"bus": TenantSettings(keys=[written(listed)])}
        in_api_world(test, registry=registry, admission=AdmissionSettings(tenants=tenants))
