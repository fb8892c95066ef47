"""Devices and decoders at real brokers: who finds whom, and who learns of whose end."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from random import Random

import msgspec
import pytest

from shared.backoff import Backoff
from shared.errors import CapacityError, ConfigError, LinkError
from shared.transport import mqtt_door, mqtt_listener
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_door import choose_decoder, connect_mqtt
from shared.transport.mqtt_listener import MqttListener
from shared.transport.mqtt_topics import State, check_name
from shared.transport.mqtt_transport import MqttTransport
from simulations.broker import Broker as RealBroker
from simulations.broker import open_broker
from tests.conformance.ends import HELLO, End, Waiting, greet, listening, run, until
from tests.conformance.peer import spawned

pytestmark = pytest.mark.mqtt
NOWHERE = Broker("127.0.0.1", 1)


@pytest.fixture
def fleet() -> str:
    """A fleet of its own, so that tests at one broker do not meet."""
    return f"f{secrets.token_hex(4)}"


def decoder(broker: Broker, fleet: str, name: str = "d1") -> MqttListener:
    listener = MqttListener(broker, fleet=fleet, decoder=name, boot="b", rng=Random(1))
    listener._backoff = Backoff(Random(1), base=0.01, out_of_reach=0.05, kicked=0.05)
    return listener


@asynccontextmanager
async def device(broker: Broker, fleet: str, name: str = "car") -> AsyncGenerator[End, None]:
    """Connect a device."""
    end = End(await connect_mqtt(broker, fleet=fleet, device=name)).start()
    with closing(end.transport):
        yield end


@contextmanager
def own_broker(name: str) -> Generator[tuple[RealBroker, Broker], None, None]:
    """A broker of the same kind that this test may stop."""
    with open_broker(prefer="mosquitto" if name == "mosquitto" else "embedded") as real:
        yield real, Broker(real.host, real.port)


# --- finding each other


def test_without_a_broker_a_device_is_told_so() -> None:
    async def test() -> None:
        with pytest.raises(LinkError, match=r"mqtt://127\.0\.0\.1:1: Connection refused"):
            await connect_mqtt(NOWHERE, fleet="f", device="car")

    run(test)


@pytest.mark.parametrize("wanted", [None, "d9"])
def test_without_a_decoder_a_device_is_told_where_it_looked(
    broker: Broker, fleet: str, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    monkeypatch.setattr(mqtt_door, "DISCOVERY", 0.1)

    async def test() -> None:
        async with listening(decoder(broker, fleet if wanted else "another")):
            who = "decoder 'd9' does not announce itself" if wanted else "no decoder"
            with pytest.raises(LinkError, match=rf"{who} under dr/v1/{fleet}/\+/state; start one"):
                await connect_mqtt(broker, fleet=fleet, device="car", decoder=wanted)

    run(test)


def test_a_device_gets_the_decoder_it_asks_for_and_waits_until_it_is_there(
    broker: Broker, fleet: str
) -> None:
    async def test() -> None:
        async with listening(decoder(broker, fleet)):
            connecting = asyncio.ensure_future(
                connect_mqtt(broker, fleet=fleet, device="car", decoder="d2")
            )
            await asyncio.sleep(0.1)
            assert not connecting.done()
            async with listening(decoder(broker, fleet, "d2")) as second:
                with closing(await connecting) as transport:
                    await greet(transport, second)
                    assert transport.name.endswith("/d2")

    run(test)


def test_a_device_of_several_decoders_finds_the_same_one_again(broker: Broker, fleet: str) -> None:
    async def test() -> None:
        async with (
            listening(decoder(broker, fleet, "d1")),
            listening(decoder(broker, fleet, "d2")),
            listening(decoder(broker, fleet, "d3")),
        ):
            for name in ("car", "van"):
                for _ in range(3):
                    async with device(broker, fleet, name) as end:
                        chosen = choose_decoder(name, {"d1", "d2", "d3"})
                        assert end.transport.name.endswith(f"/{chosen}")

    run(test)


def test_a_fleet_spreads_over_its_decoders_and_moves_no_more_than_it_must() -> None:
    cars = [f"car-{n}" for n in range(3000)]
    before = {car: choose_decoder(car, {"a", "b", "c"}) for car in cars}
    after = {car: choose_decoder(car, {"a", "b"}) for car in cars}
    assert all(900 < list(before.values()).count(name) < 1100 for name in "abc")
    assert all(after[car] == before[car] for car in cars if before[car] != "c")


@pytest.mark.parametrize("name", ["", "a/b", "a+", "#", "x" * 65, "ä", "a b"])
def test_a_name_that_cannot_be_a_level_of_a_topic_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        check_name("fleet", name)


def test_every_name_is_checked_before_anything_is_opened() -> None:
    async def test() -> None:
        for fleet, name in (("a/b", "car"), ("f", "car/1")):
            with pytest.raises(ConfigError):
                await connect_mqtt(NOWHERE, fleet=fleet, device=name)
            with pytest.raises(ConfigError):
                MqttListener(NOWHERE, fleet=fleet, decoder=name, boot="b")

    run(test)


# --- who learns of whose end


@pytest.mark.parametrize("killed", [False, True])
def test_a_decoder_that_leaves_ends_its_devices_connections(
    broker: Broker, fleet: str, killed: bool
) -> None:
    async def test() -> None:
        if killed:
            where = f"mqtt://127.0.0.1:{broker.port}"
            async with (
                spawned("decoder", where, fleet) as process,
                device(broker, fleet) as end,
            ):
                end.transport.send(b"hello")
                await end.has(1)
                process.kill()
                assert "the decoder left" in str(await end.ended())
            return
        listener = decoder(broker, fleet)
        await listener.start(Waiting())
        async with device(broker, fleet) as end:
            await listener.close()
            assert "the decoder left" in str(await end.ended())

    run(test)


def test_another_decoder_that_leaves_is_none_of_a_devices_business(
    broker: Broker, fleet: str
) -> None:
    async def test() -> None:
        async with listening(decoder(broker, fleet)) as first:
            async with listening(decoder(broker, fleet, "d2")):
                transport = await connect_mqtt(broker, fleet=fleet, device="car", decoder="d1")
            with closing(transport):
                end = End(transport).start()
                await greet(transport, first)
                assert end.ends == []

    run(test)


def test_a_device_that_dies_ends_its_connection_at_the_decoder(broker: Broker, fleet: str) -> None:
    async def test() -> None:
        async with listening(decoder(broker, fleet)) as waiting:
            async with spawned("device", f"mqtt://127.0.0.1:{broker.port}", fleet) as process:
                end = await waiting.next()
                await end.has(1)
                process.kill()
                assert "the device left" in str(await end.ended())
            async with device(broker, fleet) as again:
                again.transport.send(b"back")
                assert await (await waiting.next(2)).has(1) == [b"back"]

    run(test)


def test_a_second_device_of_the_same_name_takes_the_first_ones_place(
    broker: Broker, fleet: str
) -> None:
    async def test() -> None:
        async with (
            listening(decoder(broker, fleet)) as waiting,
            device(broker, fleet) as first,
        ):
            await greet(first.transport, waiting)
            async with device(broker, fleet) as second:
                second.transport.send(b"me")
                assert isinstance(await first.ended(), LinkError)
                assert isinstance(await waiting.ends[0].ended(), LinkError)
                assert await (await waiting.next(2)).has(1) == [b"me"]

    run(test)


def test_a_decoder_hangs_up_on_one_device_only(broker: Broker, fleet: str) -> None:
    async def test() -> None:
        async with (
            listening(decoder(broker, fleet)) as waiting,
            device(broker, fleet, "bad") as bad,
            device(broker, fleet, "good") as good,
        ):
            bad.transport.send(b"nonsense")
            end = await waiting.next()
            good.transport.send(b"sense")
            await waiting.next(2)
            end.transport.close()
            assert "the peer hung up" in str(await bad.ended())
            waiting.ends[1].transport.send(b"answer")
            assert await good.has(1) == [b"answer"]

    run(test)


def test_a_device_hears_nothing_of_other_devices(broker: Broker, fleet: str) -> None:
    async def test() -> None:
        heard: list[str] = []
        async with listening(decoder(broker, fleet)):
            async with device(broker, fleet, "nosy"):
                nosy = MqttClient(
                    broker,
                    f"eavesdropper-{fleet}",  # subscribes as a device does
                    will_topic=f"dr/v1/{fleet}/nosy2/presence",
                    on_message=lambda topic, payload: heard.append(topic),
                    on_lost=lambda why: None,
                )
                await nosy.connect()
                await nosy.subscribe([f"dr/v1/{fleet}/nosy/down", f"dr/v1/{fleet}/+/state"])
                async with device(broker, fleet, "private"):
                    pass
                await asyncio.sleep(0.1)
                nosy.close()
        assert heard == [f"dr/v1/{fleet}/d1/state"]

    run(test)


# --- brokers that go away


@pytest.mark.parametrize("name", ["mosquitto", "embedded"])
def test_after_a_restart_of_the_broker_both_ends_find_each_other_again(
    request: pytest.FixtureRequest, name: str, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    request.getfixturevalue(name)  # skips if it is not installed

    async def test() -> None:
        with own_broker(name) as (real, broker):
            async with listening(decoder(broker, fleet)) as waiting:
                async with device(broker, fleet) as end:
                    await greet(end.transport, waiting)
                    await asyncio.to_thread(real.stop)
                    assert isinstance(await end.ended(), LinkError)
                    assert isinstance(await waiting.ends[0].ended(), LinkError)
                with pytest.raises(LinkError):
                    await connect_mqtt(broker, fleet=fleet, device="car")
                real.start()
                async with device(broker, fleet) as again:
                    again.transport.send(b"back")
                    assert await (await waiting.next(2)).has(1) == [b"back"]

    with caplog.at_level(logging.INFO, logger="shared.transport.mqtt_listener"):
        run(test)
    assert "connected again" in caplog.text


def test_a_decoder_waits_for_a_broker_that_is_not_there_yet(
    fleet: str, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        listener = decoder(NOWHERE, fleet)
        async with listening(listener) as waiting:
            await asyncio.sleep(0.05)
            listener._broker = mosquitto  # it appears
            async with device(mosquitto, fleet) as end:
                await greet(end.transport, waiting)

    run(test)
    assert "Connection refused; is a broker running there" in caplog.text
    assert "trying again" in caplog.text


def test_a_decoder_that_waits_for_a_broker_can_be_closed() -> None:
    async def test() -> None:
        for seconds in (0.0, 0.02):
            listener = decoder(NOWHERE, "f")
            await listener.start(Waiting())
            await asyncio.sleep(seconds)
            await listener.close()
        await decoder(NOWHERE, "f").close()

    run(test)


def test_a_decoder_whose_subscription_is_refused_tries_again(
    broker: Broker, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = MqttClient.subscribe
    refused = [True]

    async def refuse_once(client: MqttClient, topics: list[str]) -> None:
        if refused and topics[0].endswith("/up"):
            refused.pop()
            raise LinkError("refused")
        await subscribe(client, topics)

    monkeypatch.setattr(MqttClient, "subscribe", refuse_once)

    async def test() -> None:
        async with listening(decoder(broker, fleet)) as waiting, device(broker, fleet) as end:
            await greet(end.transport, waiting)

    run(test)
    assert not refused


def test_a_device_whose_broker_dies_while_it_looks_for_a_decoder_is_told_at_once(
    mosquitto: Broker, fleet: str
) -> None:
    assert mosquitto.port

    async def test() -> None:
        with own_broker("mosquitto") as (real, broker):
            connecting = asyncio.ensure_future(connect_mqtt(broker, fleet=fleet, device="car"))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(real.stop)
            started = asyncio.get_running_loop().time()
            with pytest.raises(LinkError):
                await connecting
            assert asyncio.get_running_loop().time() - started < mqtt_door.DISCOVERY / 2

    run(test)


# --- bounds and strangers


def test_a_device_whose_place_is_taken_while_it_chooses_a_decoder_is_told(
    broker: Broker, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with listening(decoder(broker, fleet)):
            choosing = asyncio.ensure_future(connect_mqtt(broker, fleet=fleet, device="car"))
            await asyncio.sleep(0.3)
            async with device(broker, fleet):
                with pytest.raises(LinkError, match="closed"):
                    await choosing

    monkeypatch.setattr(mqtt_door, "SETTLE", 1.0)
    run(test)


def test_more_devices_than_a_decoder_takes_are_ignored(
    broker: Broker,
    fleet: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mqtt_listener, "MAX_DEVICES", 1)

    async def test() -> None:
        async with (
            listening(decoder(broker, fleet)) as waiting,
            device(broker, fleet, "first") as first,
            device(broker, fleet, "second") as second,
        ):
            await greet(first.transport, waiting)
            second.transport.send(b"x")
            await until(lambda: "second is ignored" in caplog.text)
            assert len(waiting.ends) == 1

    with caplog.at_level(logging.WARNING):
        run(test)


def test_states_of_strangers_are_no_decoders(
    broker: Broker, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_door, "DISCOVERY", 0.2)

    async def test() -> None:
        stranger = MqttClient(
            broker,
            f"stranger-{fleet}",
            will_topic=f"dr/v1/{fleet}/stranger/state",
            on_message=lambda topic, payload: None,
            on_lost=lambda why: None,
        )
        await stranger.connect()
        for n, state in enumerate(
            (
                b"{",
                b"[]",
                b'{"role":7}',
                b'{"x":' + b"[" * 99_999,
                msgspec.json.encode(State("device")),
            )
        ):
            stranger.publish_state(f"dr/v1/{fleet}/s{n}/state", state)
        await asyncio.sleep(0.1)
        with pytest.raises(LinkError, match="no decoder"):
            await connect_mqtt(broker, fleet=fleet, device="car")
        for n in range(5):
            stranger.publish_state(f"dr/v1/{fleet}/s{n}/state", b"")
        await asyncio.sleep(0.05)
        stranger.close()

    run(test)


def test_what_arrives_before_the_start_is_bounded_too() -> None:
    async def test() -> None:
        ended: list[bool] = []
        transport = MqttTransport("mqtt:x", lambda payload, *, provisional: None, ended.append)
        for _ in range(100):
            transport.deliver(bytes(65_536))
        end = End(transport).start()
        assert isinstance(await end.ended(), CapacityError)
        assert end.frames == []
        assert ended == [False]

    run(test)


def test_a_frame_that_ends_the_connection_is_the_last_of_those_that_waited() -> None:
    async def test() -> None:
        transport = MqttTransport("mqtt:x", lambda payload, *, provisional: None, lambda _: None)
        for frame in (b"a", b"b", b"c"):
            transport.deliver(frame)
        end = End(transport)

        def take(frame: bytes) -> None:
            end.frames.append(frame)
            transport.close()

        end.on_frame = take
        end.start()
        assert (end.frames, end.ends) == ([b"a"], [None])

    run(test)


def test_a_device_that_asks_for_more_than_it_takes_costs_nobody_else_the_broker(
    broker: Broker, fleet: str
) -> None:
    async def test() -> None:
        listener = decoder(broker, fleet)
        async with listening(listener) as waiting:
            async with device(broker, fleet, "greedy") as greedy, device(broker, fleet) as quiet:
                await greet(greedy.transport, waiting)
                ours = waiting.ends[0]
                quiet.transport.send(HELLO)
                other = await waiting.next(2)
                client = listener._client
                assert client is not None
                size, client.window.size = (
                    client.window.size,
                    0,
                )  # the broker takes nothing for a while
                for _ in range(200):
                    ours.transport.send(bytes(65_536))
                other.transport.send(b"unharmed")
                client.window.size = size
                client._send_waiting()
                assert isinstance(await ours.ended(), CapacityError)
                assert "hung up" in str(await greedy.ended())
                assert await quiet.has(1) == [b"unharmed"]
                assert listener._client is client, "the broker was never lost"
                assert client.window._by_topic.total() == client.window.num_bytes == 0

    run(test)
