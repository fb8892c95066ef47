"""A broker as it should be run: certificates, passwords, and topics that are one device's own."""

import gc
import os
import ssl
import warnings
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import ConfigError, LinkError
from shared.transport import mqtt_door
from shared.transport.credentials import PASSWORD, Credentials
from shared.transport.mqtt_address import parse_broker
from shared.transport.mqtt_client import MqttClient
from shared.transport.mqtt_door import connect_mqtt
from shared.transport.mqtt_listener import MqttListener
from shared.transport.mqtt_topics import check_name
from tests.conformance.ends import End, greet, listening, run, until
from tests.conformance.secure_broker import SecureBroker, secure_broker

pytestmark = pytest.mark.mqtt
PLUGIN = Path("/usr/lib/x86_64-linux-gnu/mosquitto_dynamic_security.so")
"""Where Debian has it, as the example configuration says."""
FLEET = "fleet"
"""The fleet of the example access list."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecureBroker, None, None]:
    with secure_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(autouse=True)
def _paho_leaves_the_socket_of_a_failed_handshake_to_the_collector() -> Generator[None, None, None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


class Spy:
    """A client of somebody's credentials that does as it likes."""

    def __init__(self, broker: SecureBroker, name: str, *, client_id: str = "spy") -> None:
        self.heard: list[str] = []
        self.refused: list[str] = []
        self.client = MqttClient(
            parse_broker(broker.url, broker.credentials(name)),
            client_id,
            will_topic=f"dr/v1/{FLEET}/{name}/presence",
            on_message=lambda topic, _payload: self.heard.append(topic),
            on_lost=lambda _why: None,
            on_refused=lambda topic, _why: self.refused.append(topic),
        )


def decoder(broker: SecureBroker) -> MqttListener:
    found = parse_broker(broker.url, broker.credentials("decoder-1"))
    return MqttListener(found, fleet=FLEET, decoder="decoder-1", boot="b")


def test_a_device_and_a_decoder_find_each_other_with_certificates_and_with_passwords(
    broker: SecureBroker,
) -> None:
    async def test() -> None:
        async with listening(decoder(broker)) as waiting:
            for number, (url, credentials) in enumerate(
                (
                    (broker.url, broker.credentials("car")),
                    (broker.password_url, broker.with_password("car")),
                )
            ):
                found = parse_broker(url, credentials)
                with closing(await connect_mqtt(found, fleet=FLEET, device="car")) as transport:
                    device = End(transport).start()
                    transport.send(b"words")
                    end = await waiting.next(number + 1)
                    assert await end.has(1) == [b"words"]
                    assert end.transport.peer == "car", "the broker vouches for it"
                    end.transport.send(b"reply")
                    assert await device.has(1) == [b"reply"]
                await end.ended()

    run(test)


@pytest.mark.parametrize(
    ("credentials", "says"),
    [
        (lambda b: b.credentials(""), "before it answered: check credentials.certificate"),
        (lambda b: b.credentials("expired"), "before it answered: check credentials.certificate"),
        (lambda b: b.credentials("foreign"), "before it answered: check credentials.certificate"),
        (
            lambda b: b.credentials("car", ca="another-ca"),
            "certificate is not trusted: .*credentials.ca says whom to trust",
        ),
    ],
    ids=["no certificate", "an expired one", "another authority's", "a broker of another's"],
)
def test_who_cannot_show_the_right_certificate_is_told_what_to_look_at(
    broker: SecureBroker, credentials: object, says: str
) -> None:
    assert callable(credentials)

    async def test() -> None:
        with pytest.raises(LinkError, match=says):
            found = parse_broker(broker.url, credentials(broker))
            await connect_mqtt(found, fleet=FLEET, device="car")

    run(test)


def test_a_broker_whose_certificate_is_for_another_host_is_not_trusted(
    broker: SecureBroker,
) -> None:
    async def test() -> None:
        url = f"mqtts://localhost:{broker.certificate_port}"
        with pytest.raises(LinkError, match="not trusted: Hostname mismatch"):
            await connect_mqtt(
                parse_broker(url, broker.credentials("car")), fleet=FLEET, device="car"
            )

    run(test)


def test_without_tls_a_secure_port_says_so(broker: SecureBroker) -> None:
    async def test() -> None:
        url = broker.url.replace("mqtts", "mqtt")
        with pytest.raises(LinkError, match="if it wants TLS, say mqtts"):
            await connect_mqtt(parse_broker(url), fleet=FLEET, device="car")

    run(test)


def test_a_wrong_password_is_refused_and_not_shown(
    broker: SecureBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        wrong = broker.with_password("car", "guessed")
        with pytest.raises(LinkError, match="check user name and password") as error:
            found = parse_broker(broker.password_url, wrong)
            await connect_mqtt(found, fleet=FLEET, device="car")
        assert "guessed" not in str(error.value)
        monkeypatch.setenv(PASSWORD, "car's word")
        from_environment = Credentials(wrong.ca, username="car")
        monkeypatch.setattr(mqtt_door, "DISCOVERY", 0.1)
        with pytest.raises(LinkError, match="no decoder"):  # it got in
            found = parse_broker(broker.password_url, from_environment)
            await connect_mqtt(found, fleet=FLEET, device="car")

    run(test)


def test_a_device_reaches_only_its_own_topics(broker: SecureBroker) -> None:
    async def test() -> None:
        async with listening(decoder(broker)) as waiting:
            found = parse_broker(broker.url, broker.credentials("car"))
            with closing(await connect_mqtt(found, fleet=FLEET, device="car")) as car:
                end = End(car).start()
                await greet(car, waiting)
                evil = Spy(broker, "evil")
                await evil.client.connect()
                # mosquitto 2.0 grants any subscription and delivers nothing that it must not
                spied = [f"dr/v1/{FLEET}/car/down", f"dr/v1/{FLEET}/decoder-1/+/up", "dr/#", "#"]
                await evil.client.subscribe([*spied, f"dr/v1/{FLEET}/+/presence"])
                foreign = [
                    f"dr/v1/{FLEET}/decoder-1/car/up",
                    f"dr/v1/{FLEET}/car/down",
                    f"dr/v1/{FLEET}/car/presence",
                    f"dr/v1/{FLEET}/decoder-1/state",
                    f"dr/v1/{FLEET}/evil/state",
                    "dr/v1/another-fleet/decoder-1/evil/up",
                    "elsewhere",
                ]
                for topic in foreign:
                    evil.client.publish(topic, b"from evil")
                waiting.ends[0].transport.send(b"for the car alone")
                car.send(b"from the car")
                await until(lambda: len(evil.refused) == len(foreign))
                assert await end.has(1) == [b"for the car alone"]
                assert await waiting.ends[0].has(1) == [b"from the car"]
                evil.client.publish(f"dr/v1/{FLEET}/decoder-1/evil/up", b"its own")
                assert await (await waiting.next(2)).has(1) == [b"its own"]
                assert evil.refused == foreign
                assert set(evil.heard) == {f"dr/v1/{FLEET}/decoder-1/state"}
                evil.client.close()
                assert end.ends == []

    run(test)


def test_a_foreign_subscription_is_refused_where_devices_have_roles(tmp_path: Path) -> None:
    if not PLUGIN.exists():
        pytest.skip(f"{PLUGIN} is not installed")
    with secure_broker(tmp_path, roles=True) as broker:

        async def test() -> None:
            async with listening(decoder(broker)) as waiting:
                found = parse_broker(broker.url, broker.credentials("car"))
                with closing(await connect_mqtt(found, fleet=FLEET, device="car")) as car:
                    await greet(car, waiting)
                    evil = Spy(broker, "evil")
                    await evil.client.connect()
                    for topic in (
                        f"dr/v1/{FLEET}/car/down",
                        f"dr/v1/{FLEET}/+/down",
                        f"dr/v1/{FLEET}/decoder-1/+/up",
                        f"dr/v1/{FLEET}/+/presence",
                        "dr/#",
                        "#",
                    ):
                        with pytest.raises(LinkError, match="was refused: Not authorized"):
                            await evil.client.subscribe([topic])
                    own = [f"dr/v1/{FLEET}/evil/down", f"dr/v1/{FLEET}/+/state"]
                    await evil.client.subscribe(own)
                    evil.client.publish(f"dr/v1/{FLEET}/car/down", b"from evil")
                    await until(lambda: len(evil.refused) == 1)
                    evil.client.close()

        run(test)


def test_a_device_cannot_throw_out_another_by_taking_its_client_id(broker: SecureBroker) -> None:
    async def test() -> None:
        async with listening(decoder(broker)) as waiting:
            found = parse_broker(broker.url, broker.credentials("car"))
            with closing(await connect_mqtt(found, fleet=FLEET, device="car")) as car:
                end = End(car).start()
                await greet(car, waiting)
                for stolen in (f"dr-{FLEET}-car", f"dr-{FLEET}-decoder-1", "car", "decoder-1"):
                    evil = Spy(broker, "evil", client_id=stolen)
                    await evil.client.connect()
                    evil.client.close()
                car.send(b"still here")
                await waiting.ends[0].has(1)
                assert end.ends == []

    run(test)


def test_a_decoder_reaches_only_what_is_a_decoders(broker: SecureBroker) -> None:
    async def test() -> None:
        spy = Spy(broker, "decoder-1")
        await spy.client.connect()
        await spy.client.subscribe(["#"])
        foreign = [f"dr/v1/{FLEET}/decoder-2/state", f"dr/v1/{FLEET}/decoder-2/car/up"]
        for topic in foreign:
            spy.client.publish(topic, b"x")
        car = Spy(broker, "car")
        await car.client.connect()
        car.client.publish(f"dr/v1/{FLEET}/decoder-2/car/up", b"for another decoder")
        car.client.publish(f"dr/v1/{FLEET}/decoder-1/car/up", b"for this one")
        await until(lambda: len(spy.refused) == 2 and bool(spy.heard))
        assert spy.refused == foreign
        assert spy.heard == [f"dr/v1/{FLEET}/decoder-1/car/up"]
        for one in (spy, car):
            one.client.close()

    run(test)


def test_a_device_that_may_not_publish_is_told_so_at_once(broker: SecureBroker) -> None:
    async def test() -> None:
        async with listening(decoder(broker)):
            found = parse_broker(broker.url, broker.credentials("evil"))
            transport = await connect_mqtt(found, fleet=FLEET, device="not-evil")
            end = End(transport).start()
            transport.send(b"x")
            assert "not-evil/up was refused: Not authorized" in str(await end.ended())

    run(test)


# --- settings


def test_tls_is_1_2_or_newer_and_checks_names() -> None:
    context = Credentials().tls_context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_files_that_cannot_be_used_are_named(broker: SecureBroker) -> None:
    folder = broker.folder
    text = folder / "text"
    text.write_text("no certificate")
    ca, car, key = (str(folder / name) for name in ("ca.pem", "car.pem", "car.key"))
    locked = str(folder / "locked.key")
    os.system(f"openssl ec -in {key} -aes256 -passout pass:x -out {locked} 2>/dev/null")
    for credentials, says in (
        (Credentials("/missing"), r"credentials\.ca = /missing: No such file"),
        (Credentials(str(text)), r"credentials\.ca = .*text: not in PEM form"),
        (Credentials(ca, car), r"credentials\.key: a certificate and its key go together"),
        (Credentials(ca, key=key), r"credentials\.certificate: a certificate and its key"),
        (Credentials(ca, car, "/missing"), "key = /missing: No such file"),
        (Credentials(ca, car, str(folder / "evil.key")), "the key is not that of the certificate"),
        (Credentials(ca, car, locked), "an encrypted key"),
        (Credentials(username="u", password_file="/missing"), "password_file = /missing: No such"),
        (Credentials(password_file=str(text)), "needs credentials.username"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_broker("mqtts://broker", credentials)
    with pytest.raises(ConfigError, match="need TLS: write mqtts://"):
        parse_broker("mqtt://u:secret@broker", Credentials(ca)) and None


def test_a_password_comes_from_its_file_before_the_url_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("of the file\nand more\n")
    monkeypatch.setenv(PASSWORD, "of the environment")
    by_file = Credentials(username="me", password_file=str(file))
    for url, credentials, username, password in (
        ("mqtt://b", by_file, "me", "of the file"),
        ("mqtt://you:url@b", by_file, "me", "of the file"),
        ("mqtt://you:url@b", None, "you", "url"),
        ("mqtt://you@b", None, "you", "of the environment"),
        ("mqtt://b", Credentials(username="me"), "me", "of the environment"),
        ("mqtt://b", None, None, None),
    ):
        broker = parse_broker(url, credentials)
        assert (broker.username, broker.password) == (username, password)
        assert password is None or password not in repr(broker)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="its first line is empty"):
        parse_broker("mqtt://b", by_file)


@pytest.mark.parametrize("name", ["WVWZZZ1JZXW000001", "wvwzzz1jzxw000001", "vw-1HGCM82633A004352"])
def test_a_vehicle_identification_number_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="identification number") as error:
        check_name("device", name)
    assert name[-8:] not in str(error.value)


@pytest.mark.parametrize("name", ["car-7", "WVWZZZ1JZXW00000", "WVWZZZ1JZXW0000011", "O" * 17])
def test_other_names_are_names(name: str) -> None:
    assert check_name("device", name) == name
