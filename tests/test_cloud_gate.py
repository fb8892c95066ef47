"""Devices at the gate of a running decoder: who is let in, who is cut off, who is forgotten."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cloud.access.registry import Registry
from cloud.access.roster import Roster
from cloud.engine.engine import Engine
from cloud.operate import operate
from cloud.settings import AdmissionSettings, TenantSettings
from edge.agent import Agent
from shared.errors import AccessError, CapacityError, LocalProtocolError
from shared.frames import Sampling
from tests.test_cloud_server import World, answer, in_world

ENDLESS = Sampling(logit_bias={5: 100.0})
TEXT = "Find a charging station near the office, please, and then drive me home"


@asynccontextmanager
async def refused(world: World, device: str, says: str) -> AsyncIterator[None]:
    """A device is refused at its first HELLO."""
    with pytest.raises(AccessError, match=says):
        async with world.agent(device):
            pass
    yield


async def lost(agent: Agent, within: float = 1.0) -> BaseException:
    """Wait until the agent has given up; return why."""
    async with asyncio.timeout(within):
        while agent._failure is None:
            await asyncio.sleep(0.005)
    return agent._failure


def test_a_revoked_device_is_cut_off_within_a_second_and_cannot_come_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        runner = world.decoder.brain.engine.runner
        run = runner.run
        runner.run = lambda batch: time.sleep(0.01) or run(batch)  # type: ignore[method-assign,func-returns-value]
        async with world.agent("car") as agent, world.agent("van") as other:
            async with (
                agent.conversation(max_tokens=400, sampling=ENDLESS) as talk,
                other.conversation() as good,
            ):
                pieces = talk.finish("Tell me everything")
                await anext(pieces)
                operator.revoke_device("car")
                with pytest.raises(AccessError, match="device car was revoked"):
                    async with asyncio.timeout(1.0):
                        async for _ in pieces:
                            pass
                connects = len(world.transports)
                await asyncio.sleep(0.3)
                assert len(world.transports) == connects, "it does not even try"
                assert "car" not in world.decoder.devices
                assert await answer(good, "hello")
        async with refused(world, "car", "device car was revoked: .* registered again"):
            operator.add_device("car")
            await asyncio.sleep(0.3)
        async with world.agent("car") as agent, agent.conversation(max_tokens=3) as talk:
            assert await answer(talk, "hello")

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        in_world(test, registry=registry)


def test_a_device_revoked_while_its_link_is_down_stops_when_it_comes_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.agent("car") as agent, agent.conversation(max_tokens=3) as talk:
            await answer(talk, "hello")
            gate = world.decoder.gate
            operator.revoke_device("car")
            assert gate._registry is not None
            gate._admission.roster = gate._registry.roster()
            world.transports[-1].close()
            assert "was revoked" in str(await lost(agent, 3.0))
            with pytest.raises(AccessError, match="was revoked"):
                async with agent.conversation():
                    pass
        world.decoder.expel("car", AccessError("gone"))

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        in_world(test, registry=registry)


def test_a_pattern_cuts_off_all_whom_it_matches(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.agent("taxi-1") as one, world.agent("taxi-2") as two:
            async with world.agent("bus-1") as bus, bus.conversation(max_tokens=2) as talk:
                operator.revoke_device("taxi-*")
                for agent in (one, two):
                    assert "with all of taxi-*" in str(await lost(agent))
                assert await answer(talk, "hello")

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        in_world(test, registry=registry)


def test_where_devices_must_be_registered_others_are_refused(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.agent("taxi-1") as agent, agent.conversation(max_tokens=2) as talk:
            assert await answer(talk, "hello")
            assert world.decoder.admission.tenant_of_device("taxi-1") == "taxi"
        async with refused(world, "bus-1", r"bus-1 is not registered .*require_devices"):
            pass

    with Registry(tmp_path) as registry:
        registry.add_device("taxi-*", "taxi")
        in_world(test, registry=registry, admission=AdmissionSettings(require_devices=True))


def test_without_a_registry_nobody_is_registered() -> None:
    async def test(world: World) -> None:
        async with refused(world, "car", "not registered"):
            pass

    in_world(test, admission=AdmissionSettings(require_devices=True))


def test_a_device_is_who_its_transport_says_it_is() -> None:
    async def test(world: World) -> None:
        async with world.agent("car") as agent, agent.conversation(max_tokens=2) as talk:
            await answer(talk, "hello")
            world.peer = "evil"
            async with refused(world, "car", "device evil says it is car"):
                pass
            async with world.agent("evil"):
                pass
            world.peer = ""
            assert await answer(talk, "still mine")
            assert agent.num_reconnects == 0

    in_world(test)


@pytest.mark.parametrize("name", ["a b", "a\nb", "key:1234", "", "x" * 65, "1HGCM82633A004352"])
def test_what_cannot_be_a_name_in_topics_and_logs_is_refused(name: str) -> None:
    async def test(world: World) -> None:
        with pytest.raises(LocalProtocolError, match="device"):
            async with world.agent(name):
                pass

    in_world(test)


def test_a_registry_that_breaks_leaves_things_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(world: World) -> None:
        (tmp_path / "registry.db").rename(tmp_path / "aside")
        await asyncio.sleep(0.6)
        async with refused(world, "car", "was revoked"):
            (tmp_path / "aside").rename(tmp_path / "registry.db")
        operator.revoke_device("van")
        await asyncio.sleep(0.5)
        async with refused(world, "van", "was revoked"):
            pass

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        registry.revoke_device("car")
        in_world(test, registry=registry)
    assert caplog.text.count("keys and devices stay as they were") == 1


def test_a_change_that_could_not_be_read_at_once_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        read, failures = registry.roster, [CapacityError("busy")]

        def roster() -> Roster:
            if failures:
                raise failures.pop()
            return read()

        async with world.agent("car") as agent:
            monkeypatch.setattr(registry, "roster", roster)
            operator.revoke_device("car")
            assert "was revoked" in str(await lost(agent, 2.0))

    with Registry(tmp_path) as registry, Registry(tmp_path) as operator:
        in_world(test, registry=registry)


# --- tenants share nothing


TENANTS = AdmissionSettings(
    tenants={name: TenantSettings(devices=[f"{name}-*"]) for name in ("taxi", "bus")}
)


async def adopted(world: World, device: str) -> int:
    """Return how many tokens a turn of a device did not have to run."""
    engine = world.decoder.brain.engine
    before = engine.num_adopted
    async with world.agent(device) as agent:
        async with agent.conversation(system="You drive. " * 8, max_tokens=3) as talk:
            await answer(talk, TEXT)
    await world.idle()
    return engine.num_adopted - before


def test_not_a_token_is_reused_across_tenants() -> None:
    async def test(world: World) -> None:
        assert await adopted(world, "taxi-1") == 0
        within = await adopted(world, "taxi-2")
        assert within >= 16, "the same words of the same tenant are run once"
        assert await adopted(world, "bus-1") == 0
        assert await adopted(world, "bus-2") == within
        assert await adopted(world, "private") == 0

    in_world(test, admission=TENANTS)


# --- forgetting


def cached(world: World) -> int:
    """Return how many blocks can be found by who comes next."""
    return len(world.decoder.brain.engine._pool._index)


def test_a_forgotten_device_leaves_nothing_and_its_tenants_others_go_on(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        decoder = world.decoder
        assert await adopted(world, "taxi-1") == 0  # it said goodbye: only cached blocks are left
        assert await adopted(world, "bus-1") == 0
        kept = cached(world)
        async with world.agent("taxi-1") as agent, world.agent("taxi-2") as other:
            async with agent.conversation(max_tokens=3) as talk, other.conversation() as good:
                assert await answer(talk, "Find a charger")
                assert await answer(good, "hello")
                assert cached(world) > kept
                before = decoder.conversations.get("taxi-1", talk.stream.body.conversation)
                result = await asyncio.to_thread(
                    operate, ["forget", "taxi-1", "--set", f"state={tmp_path}"]
                )
                assert result == 0
                assert await answer(good, "hello again")
                assert await answer(talk, "And home")
                assert agent.num_reconnects == 1
                after = decoder.conversations.get("taxi-1", talk.stream.body.conversation)
                assert after is not before, "its words were said again"
                assert other.num_reconnects == 0
        await decoder.forget_device("taxi-1")
        assert "taxi-1" not in {device for device, _ in decoder.conversations.keys}
        assert decoder.conversations.epoch_of("taxi-1") == 0
        assert ("taxi", "taxi-1") not in decoder.admission._devices
        assert await adopted(world, "bus-2") > 0, "another tenant's blocks stay"

    with Registry(tmp_path) as registry:
        in_world(test, registry=registry, admission=TENANTS)


def test_who_comes_after_a_forgotten_device_finds_nothing_of_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        at_start = cached(world)
        assert await adopted(world, "taxi-1") == 0
        assert cached(world) > at_start
        began = time.monotonic()
        command = ["forget", "taxi-1", "--set", f"state={tmp_path}"]
        assert await asyncio.to_thread(operate, command) == 0
        assert time.monotonic() - began < 1.0
        assert cached(world) == at_start
        assert await adopted(world, "taxi-2") == 0

    with Registry(tmp_path) as registry:
        in_world(test, registry=registry, admission=TENANTS)


def test_blocks_that_another_device_holds_stay_when_one_is_forgotten(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        system = "You are the car's assistant. " * 4
        async with world.agent("taxi-2") as other, other.conversation(system=system) as good:
            await answer(good, "hello")
            assert await adopted_by(world, "taxi-1", system) >= 16
            held = cached(world)
            assert await world.decoder.forget_device("taxi-1") == 0
            assert 0 < cached(world) < held
            assert await adopted_by(world, "taxi-1", system) >= 16

    in_world(test, admission=TENANTS)


async def adopted_by(world: World, device: str, system: str) -> int:
    engine = world.decoder.brain.engine
    before = engine.num_adopted
    async with world.agent(device) as agent:
        async with agent.conversation(system=system, max_tokens=3) as talk:
            await answer(talk, TEXT)
    await world.idle()
    return engine.num_adopted - before


def test_an_engine_that_does_not_answer_leaves_the_order_to_be_carried_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cloud.server._FORGET_WITHIN", 0.05)

    async def test(world: World) -> None:
        def hold(_engine: Engine) -> None:
            time.sleep(0.8)

        world.decoder.worker.submit(hold)
        command = ["forget", "car", "--set", f"state={tmp_path}"]
        assert await asyncio.to_thread(operate, command) == 0

    with Registry(tmp_path) as registry:
        in_world(test, registry=registry)
    assert "device car is not forgotten yet: the engine stands still" in caplog.text
