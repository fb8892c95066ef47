"""Adapters over HTTP: loaded, asked for by name, swapped and unloaded while replies are drawn."""

import asyncio
from pathlib import Path

import openai
import pytest

from tests.api_world import MODEL, ApiWorld, in_api_world
from tests.small_adapters import adapter_folder
from tests.test_cloud_api import chat
from tests.test_cloud_server import answer


async def reply(world: ApiWorld, model: str, **about: object) -> str:
    made = await world.openai.chat.completions.create(
        **chat(model=model, extra_body={"ignore_eos": True}, **about)
    )
    return made.choices[0].message.content or ""


async def load(world: ApiWorld, name: str, folder: Path) -> str:
    body = {"lora_name": name, "lora_path": str(folder)}
    response = await world.http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["digest"])


def test_adapters_are_asked_for_by_name_several_at_once(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        base = await reply(world, MODEL)
        digests = [
            await load(world, name, adapter_folder(tmp_path / name, seed))
            for seed, name in enumerate(("city", "truck"))
        ]
        names = [MODEL, "city", "truck"]
        listed = (await world.openai.models.list()).data
        assert [model.id for model in listed] == names
        assert [model.model_dump()["root"] for model in listed] == [MODEL, *digests]
        assert [model.model_dump()["parent"] for model in listed] == [None, MODEL, MODEL]
        alone = [await reply(world, name) for name in names]
        assert alone[0] == base
        assert len(set(alone)) == 3
        together = await asyncio.gather(*(reply(world, name) for name in names * 3))
        assert together == alone * 3

    in_api_world(test, adapter_updates=True)


def test_a_name_that_is_loaded_again_replies_with_its_new_content(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        first = await load(world, "city", adapter_folder(tmp_path / "a", 1))
        before = await reply(world, "city")
        assert await reply(world, "city") == before  # from shared keys and values
        long = asyncio.create_task(reply(world, "city", max_tokens=300))
        await world.until(lambda: world.num_sequences > 0)
        second = await load(world, "city", adapter_folder(tmp_path / "b", 2))
        assert first != second
        after = await reply(world, "city")
        assert after != before
        await load(world, "other", tmp_path / "b")
        assert await reply(world, "other") == after
        assert (await long).startswith(before)
        await load(world, "city", tmp_path / "a")
        assert await reply(world, "city") == before

    in_api_world(test, adapter_updates=True)


def test_an_adapter_that_is_unloaded_is_not_found_and_never_the_base_model(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        await load(world, "city", adapter_folder(tmp_path / "a", 1))
        async with world.agent() as agent, agent.conversation(adapter="city") as talk:
            assert await answer(talk, "Find a charger")
        body = {"lora_name": "city"}
        assert (await world.http.post("/v1/unload_lora_adapter", json=body)).status_code == 200
        with pytest.raises(openai.NotFoundError, match="'city' is not served here"):
            await reply(world, "city")
        again = await world.http.post("/v1/unload_lora_adapter", json=body)
        assert again.status_code == 404

    in_api_world(test, adapter_updates=True)


def test_what_is_no_adapter_of_this_model_is_refused(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        wrong = adapter_folder(tmp_path / "wrong", 1, layers=range(5))
        for name, path, says in (
            ("city", wrong, "layer"),
            ("city", tmp_path / "nothing", "nothing"),
            (MODEL, wrong, "own name"),
        ):
            body = {"lora_name": name, "lora_path": str(path)}
            response = await world.http.post("/v1/load_lora_adapter", json=body)
            assert response.status_code == 400, response.text
            assert says in response.json()["error"]["message"]
        assert world.decoder.voice.adapters.names() == []

    in_api_world(test, adapter_updates=True)


def test_only_a_decoder_that_says_so_loads_adapters_over_http(tmp_path: Path) -> None:
    async def test(world: ApiWorld) -> None:
        body = {"lora_name": "city", "lora_path": str(adapter_folder(tmp_path / "a", 1))}
        refused = await world.http.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 403
        assert "adapter_updates" in refused.json()["error"]["message"]

    in_api_world(test)
