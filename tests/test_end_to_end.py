"""Real processes: a decoder, agents and a broker, killed and restarted."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from edge.agent import Agent, connect
from edge.spool import Spool
from edge.talk import Talk
from shared.child import ChildDecoder, open_decoder
from shared.errors import AccessError, ConfigError, LinkError, ModelError, SupersededError
from shared.transport.credentials import Credentials
from simulations.broker import open_broker
from tests.brains import write_model

STATE = mkdtemp(prefix="deltarelay-test-")
SMALL = ["context=512", "cache_mb=8", "threads=1", 'precision="exact"', f"state={STATE}"]


@cache
def model_folder() -> str:
    return str(write_model(Path(mkdtemp(prefix="deltarelay-test-")) / "model"))


async def answer(talk: Talk, text: str) -> list[int]:
    async with asyncio.timeout(30):
        async for _ in talk.finish(text):
            pass
    return list(talk.stream.turns[-1].reply_ids)


async def reference(agent: Agent, texts: list[str], tokens: int) -> list[list[int]]:
    async with agent.conversation(max_tokens=tokens) as talk:
        return [await answer(talk, text) for text in texts]


def deltarelay(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from shared.commands import main; raise SystemExit(main())"]
    return subprocess.run(
        [*program, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "deltarelay" in name}


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(main())


def test_a_conversation_over_shared_memory_and_nothing_is_left_behind() -> None:
    async def test() -> None:
        before = segments()
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            async with connect(decoder.address, device="car") as agent:
                texts = ["Find a charger", "And home"]
                expected = await reference(agent, texts, 12)
                async with agent.conversation(max_tokens=12) as talk:
                    for text in ("F", "Find", "Find the", "Find a ch"):
                        await talk.revise(text)
                        await asyncio.sleep(0.03)
                    assert [await answer(talk, text) for text in texts] == expected
            assert segments() == before
        assert segments() == before
        assert not Path(decoder.address.removeprefix("shm://")).exists()

    run(test)


def test_an_agent_killed_in_the_middle_of_a_turn_leaves_nothing_and_others_go_on() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            code = (
                "import asyncio, edge, sys\n"
                "async def main():\n"
                "    async with edge.connect(sys.argv[1], device='victim') as agent:\n"
                "        async with agent.conversation() as talk:\n"
                "            await talk.revise('Find a charger near')\n"
                "            print('typed', flush=True)\n"
                "            await asyncio.sleep(60)\n"
                "asyncio.run(main())\n"
            )
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, decoder.address, stdout=asyncio.subprocess.PIPE
            )
            assert child.stdout is not None
            assert await child.stdout.readline() == b"typed\n"
            child.kill()
            await child.wait()
            descriptors = f"/proc/{decoder.process.pid}/fd"
            async with connect(decoder.address, device="other") as agent:
                assert await reference(agent, ["hello"], 4)
            await asyncio.sleep(0.3)
            few = len(os.listdir(descriptors))
            for _ in range(3):
                async with connect(decoder.address, device="other") as agent:
                    await reference(agent, ["hello"], 2)
            await asyncio.sleep(0.3)
            assert len(os.listdir(descriptors)) <= few
            assert segments() == set()

    run(test)


async def restarted(decoder: ChildDecoder) -> subprocess.Popen[bytes]:
    """Kill a decoder and start another at its socket, whose stale file is in the way."""
    decoder.process.kill()
    decoder.process.wait()
    socket = Path(decoder.address.removeprefix("shm://"))
    assert socket.exists()
    program = [sys.executable, "-m", "cloud", "--model", model_folder(), "--with-parent"]
    program += ["--listen", decoder.address]
    for change in SMALL:
        program += ["--set", change]
    child = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    while "serves" not in (line := await asyncio.to_thread(child.stderr.readline)):
        assert line, "the second decoder did not start"
    return child


def test_a_decoder_killed_in_the_middle_of_a_turn_is_replaced_and_the_turn_completes() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            async with connect(decoder.address, device="car") as agent:
                expected = await reference(agent, ["Find a charger", "And home"], 12)
                async with agent.conversation(max_tokens=12) as talk:
                    got = [await answer(talk, "Find a charger")]
                    await talk.revise("And ho")
                    second = await restarted(decoder)
                    try:
                        got.append(await answer(talk, "And home"))
                    finally:
                        second.terminate()
                        second.communicate(timeout=10)
                    assert got == expected
                    assert agent.num_reconnects >= 1
        assert segments() == set()

    run(test)


@pytest.mark.mqtt
@pytest.mark.parametrize("kind", ["mosquitto", "embedded"])
def test_a_broker_restarted_in_the_middle_of_a_turn_and_of_a_reply_loses_nothing(kind: str) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            try:
                broker = stack.enter_context(open_broker(prefer=kind))  # type: ignore[arg-type]
            except LinkError as error:
                pytest.skip(str(error))
            url = f"mqtt://{broker.host}:{broker.port}"
            await stack.enter_async_context(
                open_decoder(model_folder(), listen=[url], changes=SMALL)
            )
            agent = await stack.enter_async_context(connect(url, device="car"))
            texts = ["Find a charger", "And home", "Thank you"]
            expected = await reference(agent, texts, 40)
            talk = await stack.enter_async_context(agent.conversation(max_tokens=40))
            got = [await answer(talk, texts[0])]
            await talk.revise("And")
            await asyncio.to_thread(broker.stop)
            await talk.revise("And ho")
            await asyncio.to_thread(broker.start)
            got.append(await answer(talk, texts[1]))
            pieces = talk.finish(texts[2])
            await anext(pieces)
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
            async for _ in pieces:
                pass
            got.append(list(talk.stream.turns[-1].reply_ids))
            assert got == expected

    run(test)


@pytest.mark.mqtt
def test_two_vehicles_over_mqtt_and_two_over_shared_memory_share_a_decoder() -> None:
    async def test() -> None:
        with open_broker() as broker:
            url = f"mqtt://{broker.host}:{broker.port}"
            async with open_decoder(model_folder(), listen=[url], changes=SMALL) as decoder:

                async def one(address: str, device: str) -> list[list[int]]:
                    async with connect(address, device=device) as agent:
                        return await reference(agent, ["Find a charger", "And home"], 8)

                ways = [(url, "a"), (url, "b"), (decoder.address, "c"), (decoder.address, "d")]
                found = await asyncio.gather(*(one(*way) for way in ways))
                assert found == [found[0]] * 4

    run(test)


def test_where_nobody_listens_the_error_says_what_to_do() -> None:
    async def attempt(url: str) -> None:
        async with connect(url):
            pass

    for url in ("shm:///nowhere/deltarelay.sock", "mqtt://127.0.0.1:9"):
        with pytest.raises(LinkError, match="deltarelay"):
            asyncio.run(attempt(url))
    for url in ("http://me:secret@example.org", "shm://relative", "mqtt://"):
        with pytest.raises(ConfigError, match="expected") as error:
            asyncio.run(attempt(url))
        assert "secret" not in str(error.value)


def test_a_device_is_refused_its_name_and_its_credentials_before_anything_is_opened() -> None:
    async def attempt(device: str, credentials: Credentials) -> None:
        async with connect("mqtts://127.0.0.1:9", device=device, credentials=credentials):
            pass

    for device, credentials, says in (
        ("1HGCM82633A004352", Credentials(), "vehicle identification number"),
        ("car/7", Credentials(), "device 'car/7'"),
        ("car", Credentials(ca="/missing.pem"), r"credentials\.ca = /missing\.pem"),
    ):
        with pytest.raises(ConfigError, match=says):
            asyncio.run(attempt(device, credentials))


@pytest.mark.mqtt
def test_revoked_vehicles_over_both_links_are_cut_off_within_a_second(tmp_path: Path) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            broker = stack.enter_context(open_broker())
            url = f"mqtt://{broker.host}:{broker.port}"
            state = f"state={tmp_path}"
            decoder = await stack.enter_async_context(
                open_decoder(model_folder(), listen=[url], changes=[*SMALL, state])
            )
            for address, device in ((url, "taxi-1"), (decoder.address, "taxi-2")):
                agent = await stack.enter_async_context(connect(address, device=device))
                talk = await stack.enter_async_context(agent.conversation(max_tokens=3))
                await answer(talk, "hello")
                done = await asyncio.to_thread(
                    deltarelay, "cloud", "devices", "revoke", device, "--set", state
                )
                assert done.returncode == 0, done.stderr
                since = time.monotonic()
                with pytest.raises(AccessError, match=f"device {device} was revoked"):
                    while time.monotonic() < since + 1.0:
                        await talk.revise(f"are you there {time.monotonic()}")
                        await asyncio.sleep(0.02)
                with pytest.raises(AccessError, match="was revoked"):
                    async with connect(address, device=device):
                        pass

    run(test)


def test_the_agent_reads_lines_and_reports_json() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            done = await asyncio.to_thread(
                deltarelay,
                *("edge", "--to", decoder.address, "--json", "--set", "max_tokens=4"),
                stdin="Find\nFind a charger\n\nAnd home\n",
            )
            assert done.returncode == 0, done.stderr
            turns = json.loads(done.stdout.splitlines()[-1])["turns"]
            assert [turn["text"] for turn in turns] == ["Find a charger", "And home"]
            assert all(turn["first_token_ms"] > 0 for turn in turns)

    run(test)


def test_a_chat_relays_every_key_and_replies_on_enter() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            shown = await asyncio.to_thread(_chat, decoder.address)
            assert "Enter sends" in shown
            assert "> Find a charger" in shown
            assert "[first token after" in shown

    run(test)


def _chat(address: str) -> str:
    """Type into `deltarelay chat` on a terminal of its own; return what it showed."""
    master, slave = pty.openpty()
    code = "from shared.commands import main; raise SystemExit(main())"
    arguments = ["chat", "--to", address, "--set", "max_tokens=4"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = ""
    try:
        for keys, until in (("", "> "), ("Find a chargen\x7fr\r", "first token"), ("\x04", "")):
            os.write(master, keys.encode())
            while until not in shown or (until == "" and child.poll() is None):
                try:
                    shown += os.read(master, 4096).decode(errors="replace")
                except OSError:  # the terminal is closed
                    break
        assert child.wait(10) == 0
    finally:
        child.kill()
        os.close(master)
    return shown


def test_a_misspelt_setting_is_named_with_its_path() -> None:
    done = deltarelay("cloud", "--set", "cache_mbb=5")
    assert done.returncode == 78
    assert "unknown key cache_mbb; did you mean cache_mb?" in done.stderr


def test_a_second_decoder_on_the_same_socket_is_refused_and_the_first_goes_on() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            done = await asyncio.to_thread(
                deltarelay,
                "cloud",
                "--model",
                model_folder(),
                "--listen",
                decoder.address,
                *("--set", "context=512"),
            )
            assert done.returncode == 69
            assert "another decoder listens here" in done.stderr
            async with connect(decoder.address) as agent:
                assert await reference(agent, ["hello"], 2)

    run(test)


def test_a_model_that_is_not_there_is_said_in_one_line() -> None:
    async def test() -> None:
        with pytest.raises(LinkError, match="neither a file, nor a folder, nor a known model"):
            async with open_decoder("/nowhere/model.gguf"):
                pass

    run(test)


def test_a_model_named_by_the_agent_must_be_the_one_served() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            with pytest.raises(ModelError, match="gpt-9"):
                async with connect(decoder.address, model="gpt-9"):
                    pass

    run(test)


def test_a_decoder_ends_with_its_parent_and_on_sigterm() -> None:
    code = (
        "import asyncio, sys\n"
        "from shared.child import open_decoder\n"
        "async def main():\n"
        "    async with open_decoder(sys.argv[1], changes=sys.argv[2:]) as decoder:\n"
        "        print(decoder.process.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, model_folder(), *SMALL], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_decoder_that_had_to_compile_starts_over_with_what_it_kept(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "cloud", "--model", str(model), "--check"]
    heard = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert "starting with what was compiled" in heard[0]
    assert heard[0].count("loading") == 2
    assert "starting with" not in heard[1]
    assert heard[1].count("loading") == 1


def test_an_agent_killed_while_its_reply_comes_is_started_again_and_shows_all_of_it(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            program = [sys.executable, "-m", "edge", "--to", decoder.address]
            for change in ("device=car", f"spool={tmp_path}", "max_tokens=400", "system="):
                program += ["--set", change]
            async with connect(decoder.address, device="other") as agent:
                async with agent.conversation(max_tokens=400, deadline=30.0) as talk:
                    await answer(talk, "tell me a long story")
                    expected = talk.exchanges[0][1]
            for _ in range(10):  # until it is killed before its reply is complete
                first = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert first.stdin is not None
                assert first.stdout is not None
                first.stdin.write(b"tell me a long story\n\n")
                first.stdin.flush()
                heard = await asyncio.to_thread(first.stdout.read, 5)
                first.kill()
                first.communicate()
                spool = Spool(tmp_path)
                kept = spool.kept["drive"]
                spool.close()
                if kept.ended is not None:
                    break
                shutil.rmtree(tmp_path)
            assert len(kept.reply) > 0
            again = await asyncio.to_thread(deltarelay, *program[2:])
            assert again.returncode == 0, again.stderr
            assert again.stdout.startswith(expected + "\n[")
            assert expected.encode().startswith(heard)

    run(test)


@pytest.mark.parametrize("how", ["told to end", "superseded"])
def test_an_agent_that_waits_for_words_ends_when_it_must(how: str) -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            program = [sys.executable, "-m", "edge", "--to", decoder.address]
            agent = await asyncio.create_subprocess_exec(
                *program, "--set", "device=car", stdin=PIPE, stderr=PIPE
            )
            assert agent.stderr is not None
            assert b"connected" in await agent.stderr.readline()
            if how == "superseded":
                async with connect(decoder.address, device="car"):
                    assert await asyncio.wait_for(agent.wait(), 10) == SupersededError.exit_status
            else:
                agent.terminate()
                assert await asyncio.wait_for(agent.wait(), 10) == 143

    run(test)


@pytest.mark.mqtt
def test_a_decoder_that_is_to_leave_ends_its_reply_and_another_goes_on() -> None:
    async def test() -> None:
        with open_broker() as broker:
            url = f"mqtt://127.0.0.1:{broker.port}"
            names = ("first", "second")
            async with AsyncExitStack() as stack:
                decoders = {
                    name: await stack.enter_async_context(
                        open_decoder(model_folder(), listen=[url], changes=[*SMALL, f"name={name}"])
                    )
                    for name in names
                }
                agent = await stack.enter_async_context(connect(url, device="car"))
                here = agent.welcome.decoder
                expected = await reference(agent, ["tell me a story", "and now"], 400)
                async with agent.conversation(max_tokens=400) as talk:
                    pieces = talk.finish("tell me a story")
                    await anext(pieces)
                    decoders[here].process.terminate()
                    async for _ in pieces:
                        pass
                    assert agent.num_reconnects == 0, "the reply was given by who began it"
                    async with asyncio.timeout(20):
                        while agent.welcome.decoder == here:
                            await asyncio.sleep(0.02)
                    got = [list(talk.stream.turns[0].reply_ids), await answer(talk, "and now")]
                    assert got == expected
                assert decoders[here].process.wait(10) == 0

    run(test)


def test_a_decoder_that_is_to_leave_does_so_at_once_when_nobody_waits_for_it() -> None:
    async def test() -> None:
        async with open_decoder(model_folder(), changes=SMALL) as decoder:
            async with connect(decoder.address, device="car") as agent:
                async with agent.conversation(max_tokens=4) as talk:
                    await answer(talk, "hello")
                    began = time.monotonic()
                    decoder.process.terminate()
                    assert await asyncio.to_thread(decoder.process.wait, 10) == 0
                    assert time.monotonic() - began < 5

    run(test)


@pytest.mark.mqtt
def test_a_frozen_decoder_is_left_for_another_and_what_it_says_when_it_thaws_is_not_heard() -> None:
    async def test() -> None:
        with open_broker() as broker:
            url = f"mqtt://127.0.0.1:{broker.port}"
            async with AsyncExitStack() as stack:
                decoders = {
                    name: await stack.enter_async_context(
                        open_decoder(model_folder(), listen=[url], changes=[*SMALL, f"name={name}"])
                    )
                    for name in ("first", "second")
                }
                agent = await stack.enter_async_context(connect(url, device="car"))
                here = agent.welcome.decoder
                frozen = decoders[here].process
                expected = await reference(agent, ["tell me a story", "and now"], 400)
                async with agent.conversation(max_tokens=400) as talk:
                    pieces = talk.finish("tell me a story")
                    await anext(pieces)
                    frozen.send_signal(signal.SIGSTOP)
                    try:
                        held = len(talk.stream.reply.ids)
                        async for _ in pieces:
                            pass
                        assert 0 < held < 400
                        assert agent.welcome.decoder != here
                    finally:
                        frozen.send_signal(signal.SIGCONT)
                    got = [list(talk.stream.turns[0].reply_ids), await answer(talk, "and now")]
                    await asyncio.sleep(0.5)  # what the thawed one still has to say
                    assert got == expected
                    assert [list(t.reply_ids) for t in talk.stream.turns] == expected
                    assert agent.num_reconnects == 1

    run(test)
