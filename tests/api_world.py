"""A decoder with its HTTP API on a port of its own, and the official client."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import openai

from cloud.access.registry import Registry
from cloud.api.app import make_app
from cloud.api.listener import HttpListener
from cloud.server import Decoder
from tests.brains import small_brain, small_settings
from tests.test_cloud_server import World, model_folder

MODEL = str(model_folder())


class ApiWorld(World):
    """A decoder, vehicles over loopback, and clients over HTTP."""

    def __init__(self, decoder: Decoder, url: str) -> None:
        super().__init__(decoder)
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=30)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    @property
    def num_sequences(self) -> int:
        return len(list(self.decoder.brain.engine.sequences))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is to happen soon."""
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()


def in_api_world(
    test: Callable[[ApiWorld], Awaitable[None]],
    *,
    registry: Registry | None = None,
    **changes: object,
) -> None:
    """Run `test` against a fresh decoder; afterwards nothing may be left of it."""

    async def main() -> None:
        settings = small_settings(model_folder(), precision="exact", **changes)
        brain = small_brain(model_folder(), precision="exact", **changes)
        decoder = Decoder(brain, settings, registry)
        await decoder.start([])
        listener = HttpListener(make_app(decoder), "127.0.0.1:0")
        listener.start()
        world = ApiWorld(decoder, listener.name)
        free = decoder.brain.engine.num_free_blocks
        try:
            async with asyncio.timeout(60):
                await test(world)
                await world.until(lambda: world.num_sequences == 0)
                await world.idle()
            assert decoder.brain.engine.num_free_blocks == free, "blocks are left"
            assert not decoder._failed.done(), "the engine failed"
        finally:
            await world.close()
            await listener.close()
            await decoder.close()

    asyncio.run(main())
