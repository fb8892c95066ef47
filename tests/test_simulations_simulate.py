"""What the simulations of faults are made of: plans, records, comparisons."""

import asyncio
import os
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cloud.snapshot.format import SavedConversation, encode_log
from cloud.snapshot.reader import LOG, folder_of_conversation
from shared.errors import LinkError
from shared.frames import OpenBody, Reason
from shared.session.conversation_log import Turn
from shared.session.saved_stream import SavedStream
from shared.tokenlog import history_crc
from simulations.simulate.children import ReportingProcess
from simulations.simulate.command import simulate
from simulations.simulate.compare import differences
from simulations.simulate.drive import choose_drive
from simulations.simulate.faults import LONG, most_within, plan_faults
from simulations.simulate.leaks import Resources
from simulations.simulate.ledger import Ledger, LoggedTalk, TurnKey
from simulations.simulate.mqtt_watch import MqttWatch
from tests.conformance.ends import run
from tests.vocabularies import data

# --- the link and the faults


def test_without_the_recording_a_tunnel_of_the_same_share_is_generated(tmp_path: Path) -> None:
    drive = choose_drive(180.0, tmp_path / "car.up")
    begin, end = drive.tunnel
    assert 46 <= begin <= 48
    assert 77 <= end - begin <= 80
    assert "generated, because car.up is not there" in drive.source
    assert drive.trace.seconds > 180 + 300


def test_the_recorded_tunnel_is_taken_where_it_fits() -> None:
    path = data("mahimahi", "ATT-LTE-driving.up")
    drive = choose_drive(180.0, path)
    assert drive.tunnel == pytest.approx((47.595, 125.914))
    assert drive.offset == 740.0
    assert "does not fit into 30 s" in choose_drive(30.0, path).source


@pytest.mark.parametrize("seconds", [20.0, 180.0])
def test_nothing_breaks_when_the_tunnel_ends_nor_at_the_end(seconds: float) -> None:
    outage = 0.26 * seconds, 0.7 * seconds
    for seed in range(50):
        faults = plan_faults(seconds, 8, outage, Random(seed))
        assert [f.at for f in faults] == sorted(f.at for f in faults)
        for fault in faults:
            quiet = 0.1 * seconds
            assert not outage[1] - quiet < fault.at + fault.away < outage[1] + quiet
            assert 0 < fault.at < seconds - quiet


def test_a_long_run_breaks_each_thing_twice_and_a_short_one_once() -> None:
    for seconds, times in ((LONG, 2), (20.0, 1)):
        faults = plan_faults(seconds, 5, (0.3 * seconds, 0.7 * seconds), Random(3))
        kinds = [fault.kind for fault in faults]
        assert kinds.count("broker") == kinds.count("decoder") == times
        assert kinds.count("vehicle") == (5 if times == 2 else 1)
        assert {f.vehicle for f in faults if f.kind == "vehicle"} <= set(range(5))


def test_a_seed_plans_the_same_faults_again() -> None:
    plans = [plan_faults(180.0, 8, (50.0, 120.0), Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@given(st.lists(st.integers(0, 80), max_size=30))
def test_the_most_within_a_second_is_that_of_counting_from_each(quarters: list[int]) -> None:
    times = [quarter / 4 for quarter in quarters]
    naive = max((sum(a <= b <= a + 1.0 for b in times) for a in times), default=0)
    assert most_within(times, 1.0) == naive


# --- the window of a client, from its bytes


def packet(kind: int, flags: int, body: bytes) -> bytes:
    length = bytearray()
    rest = len(body)
    while True:
        rest, low = divmod(rest, 128)
        length.append(low | (0x80 if rest else 0))
        if not rest:
            return bytes([kind << 4 | flags, *length]) + body


def publish(number: int, *, qos: int = 1, size: int = 10) -> bytes:
    ident = number.to_bytes(2, "big") if qos else b""
    return packet(3, qos << 1, b"\0\3a/b" + ident + b"\0" + bytes(size))


def puback(number: int) -> bytes:
    return packet(4, 0, number.to_bytes(2, "big"))


@given(st.integers(1, 40), st.integers(1, 300))
def test_the_window_is_read_from_bytes_however_they_are_cut(piece: int, size: int) -> None:
    watch = MqttWatch()
    up = packet(1, 0, b"\0\4MQTT\5\2\0\x0a\0\0\3car")
    up += b"".join(publish(n, size=size) for n in range(1, 6)) + publish(0, qos=0)
    for at in range(0, len(up), piece):
        watch.see("up", up[at : at + piece])
    assert not watch.was_accepted
    assert watch.max_unacknowledged == 5
    down = packet(2, 0, b"\0\0\0") + puback(1) + puback(2)
    for at in range(0, len(down), piece):
        watch.see("down", down[at : at + piece])
    assert watch.was_accepted
    watch.see("up", publish(6) + publish(7) + publish(7))
    assert watch.max_unacknowledged == 5, "two were acknowledged, two came, one of them twice"
    watch.see("up", publish(8))
    assert watch.max_unacknowledged == 6


def test_a_client_that_is_refused_was_not_accepted() -> None:
    watch = MqttWatch()
    watch.see("down", packet(2, 0, b"\0\x87\0"))
    assert not watch.was_accepted


# --- what drivers were shown


def said(event: str, turn: int = 0, **values: object) -> dict[str, Any]:
    return {"event": event, "talk": "driver", "turn": turn, **values}


def script(_device: str, _talk: str, turn: int) -> str:
    return f"turn {turn}"


def log(*turns: tuple[list[int], str], texts: list[str] | None = None) -> dict[str, Any]:
    said = texts if texts is not None else [f"turn {n}" for n in range(len(turns))]
    logged = [([n], reply, reason) for n, (reply, reason) in enumerate(turns)]
    return {"event": "log", "talk": "driver", "conversation": "c", "turns": logged, "texts": said}


def ledger(*events: Mapping[str, Any]) -> Ledger:
    made = Ledger()
    for at, event in enumerate(events):
        made.take("car", event, float(at))
    return made


WHOLE = (said("ended"), said("shown", index=0, ids=[5, 6]), said("done"))


def test_a_turn_that_was_shown_as_it_is_logged_is_answered_once() -> None:
    assert ledger(*WHOLE, log(([5, 6], "stop"))).unanswered(script) == []


def test_what_was_shown_in_two_lives_counts_once_if_it_is_the_same() -> None:
    made = ledger(
        said("ended"),
        said("shown", index=0, ids=[5]),
        said("shown", index=0, ids=[5, 6]),
        said("done"),
        log(([5, 6], "length")),
    )
    assert made.contradictions == []
    assert made.unanswered(script) == []


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([*WHOLE], id="it is not in the log"),
        pytest.param([*WHOLE, log(([5, 7], "stop"))], id="the log has another reply"),
        pytest.param([*WHOLE, log(([5, 6, 7], "stop"))], id="not all was shown"),
        pytest.param([*WHOLE, log(([5, 6], "deadline"))], id="nobody replied in time"),
        pytest.param(
            [*WHOLE, log(([5, 6], "stop"), ([5], "stop"), texts=["turn 0", "turn 0"])],
            id="it is logged twice",
        ),
        pytest.param([*WHOLE, log(([5, 6], "stop"), texts=["turn 1"])], id="it says other words"),
    ],
)
def test_a_turn_is_not_answered_once_if(events: list[dict[str, Any]]) -> None:
    made = ledger(*events)
    assert len(made.ended) == 1
    assert made.unanswered(script) == [("car", "driver", 0)]


@pytest.mark.parametrize(("index", "ids"), [(1, [9]), (0, [9]), (3, [7])])
def test_a_driver_who_is_shown_another_reply_is_a_contradiction(index: int, ids: list[int]) -> None:
    made = ledger(*WHOLE[:2], said("shown", index=index, ids=ids))
    assert len(made.contradictions) == 1


def test_what_a_life_shows_again_is_repeated_and_what_the_next_one_shows_is_not() -> None:
    made = ledger(said("ready"), *WHOLE, said("ready"), *WHOLE[1:])
    assert (made.num_repeated, made.answered_again) == (0, set())
    made.take("car", said("shown", index=1, ids=[6, 7]), 9.0)
    made.take("car", said("done"), 9.0)
    assert made.num_repeated == 1
    assert made.answered_twice(script) == {TurnKey("car", "driver", 0)}


def test_a_turn_that_is_logged_twice_was_answered_twice() -> None:
    made = ledger(*WHOLE, log(([5, 6], "stop"), ([5], "stop"), texts=["turn 0", "turn 0"]))
    assert made.answered_twice(script) == {TurnKey("car", "driver", 0)}
    assert ledger(*WHOLE, log(([5, 6], "stop"))).answered_twice(script) == set()


def test_a_vehicle_says_who_serves_it() -> None:
    made = ledger(said("ready", decoder="north"), said("ended", decoder="south"))
    assert made.decoders == {"car": "south"}


def test_the_backlog_is_drained_when_the_last_turn_that_waited_is_answered() -> None:
    made = ledger(said("ended", 0), said("done", 0), said("ended", 1), said("ended", 2))
    assert made.drained_after(1.5) == 0.0
    assert made.drained_after(2.5) == inf
    made.take("car", said("done", 1), 7.0)
    assert made.drained_after(2.5) == 4.5


def test_a_report_nobody_knows_is_said() -> None:
    with pytest.raises(LinkError, match="car reports 'dance'"):
        ledger({"event": "dance"})


# --- what a decoder holds

TURNS = (
    Turn((1, 2), (3, 4), "stop"),
    Turn((5,), (6, 7), "length"),
    Turn((8,), (), "error"),
    Turn((9,), (10, 11), "stop"),
)
HELD = [((1, 2), (3, 4)), ((5,), (6, 7)), None, ((9,), (10, 11))]


def crc_of_turns(turns: tuple[Turn, ...]) -> int:
    total = 0
    for turn in turns:
        total = history_crc(*turn.kept, total)
    return total


def saved(**changes: Any) -> SavedConversation:
    """Return what a decoder wrote that holds just `TURNS`."""
    body = OpenBody("c", max_tokens=5)
    stream = SavedStream(body, len(TURNS), crc_of_turns(TURNS), (), 0)
    fields = {"stream": stream, "turns": HELD} | changes
    return SavedConversation(tokenizer="t", device="car", epoch=3, adapter="", **fields)


def unconfirmed(conversation: SavedConversation) -> SavedConversation:
    """Return it as it is before the vehicle has confirmed the last reply."""
    stream, last = conversation.stream, TURNS[-1]
    stream = replace(
        stream,
        turn=stream.turn - 1,
        history=crc_of_turns(TURNS[:-1]),
        committed=last.user_ids,
        reply=last.reply_ids,
        reason=Reason.STOP,
    )
    return replace(conversation, stream=stream)


def differing(folder: Path, *held: SavedConversation) -> list[str]:
    """Return what differs between these and a vehicle that has `TURNS`."""
    folder.mkdir(exist_ok=True)
    for one in held:
        place = folder_of_conversation(folder, one.device, one.name)
        place.mkdir(parents=True)
        (place / LOG).write_bytes(encode_log(one))
    return differences(folder, {("car", "driver"): LoggedTalk("c", "d", TURNS, ())})


@pytest.mark.parametrize(
    "conversation",
    [
        pytest.param(saved(), id="as it is"),
        pytest.param(unconfirmed(saved()), id="before the last reply is confirmed"),
        pytest.param(saved(turns=[None, None, *HELD[2:]]), id="without turns that do not fit"),
    ],
)
def test_a_decoder_that_holds_the_same_ids_does_not_differ(
    tmp_path: Path, conversation: SavedConversation
) -> None:
    assert differing(tmp_path / "snapshots", conversation) == []


def test_a_conversation_that_a_decoder_does_not_hold_differs(tmp_path: Path) -> None:
    other = replace(saved(), device="bus")
    assert differing(tmp_path / "snapshots", other) == [
        "car, driver: the decoder does not hold it; the vehicle has 4 turns"
    ]


@pytest.mark.parametrize(
    ("conversation", "why"),
    [
        (saved(turns=HELD[:3], stream=replace(saved().stream, turn=3)), "3 turns, the vehicle 4"),
        (saved(turns=[((1, 9), (3, 4)), *HELD[1:]]), "turn 0 is"),
        (saved(turns=[((1, 2), (3, 5)), *HELD[1:]]), "turn 0 is"),
        (saved(turns=[*HELD[:3], ((9,), (10, 12))]), "turn 3 is"),
        (saved(turns=[*HELD[:3], ((9,), (10,))]), "turn 3 is"),
        (saved(turns=[*HELD[:2], ((8,), ()), HELD[3]]), "turn 2 is"),
        (saved(stream=replace(saved().stream, history=1)), "another CRC"),
        (saved(stream=replace(saved().stream, committed=(3,))), "an open turn of 1 ids"),
    ],
)
def test_one_other_id_or_turn_differs(
    tmp_path: Path, conversation: SavedConversation, why: str
) -> None:
    (found,) = differing(tmp_path / "snapshots", conversation)
    assert why in found


# --- processes

REPORTER = """
import json, sys
print(json.dumps({"life": sys.argv[2]}), flush=True)
print("to the log", file=sys.stderr)
for line in sys.stdin:
    print(json.dumps({"heard": line.strip()}), flush=True)
    if line == "half\\n":
        print('{"half": ', end="", flush=True)
    if line.startswith("end "):
        sys.exit(int(line[4:]))
"""


def test_a_process_reports_is_killed_and_lives_again(tmp_path: Path) -> None:
    async def test() -> None:
        reports: list[Mapping[str, Any]] = []
        program = [sys.executable, "-c", REPORTER]
        child = ReportingProcess("car", program, tmp_path / "log", reports.append)
        await child.start()
        await child.tell("half")
        while {"heard": "half"} not in reports:
            await asyncio.sleep(0.01)
        await child.crash(0.0)
        await child.tell("end 0")
        await child.ended(20.0)
        assert reports == [{"life": "0"}, {"heard": "half"}, {"life": "1"}, {"heard": "end 0"}]
        await child.close()

    run(test)


def test_a_process_that_fails_or_lingers_is_reported_with_its_log(tmp_path: Path) -> None:
    async def test() -> None:
        program = [sys.executable, "-c", REPORTER]
        child = ReportingProcess("car", program, tmp_path / "log", lambda _: None)
        await child.start()
        with pytest.raises(LinkError, match=r"car has not ended within 0\.5 s"):
            await child.ended(0.5)
        await child.tell("end 3")
        with pytest.raises(LinkError, match="car ended with status 3; it said: to the log"):
            await child.ended(20.0)
        await child.close()

    run(test)


def test_a_frozen_process_says_nothing_and_then_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        reports: list[Mapping[str, Any]] = []
        program = [sys.executable, "-c", REPORTER]
        child = ReportingProcess("car", program, tmp_path / "log", reports.append)
        await child.start()
        while not reports:
            await asyncio.sleep(0.01)
        thawing = asyncio.create_task(child.freeze(0.5))
        await asyncio.sleep(0.1)
        assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        await child.tell("hello")
        await thawing
        while len(reports) < 2:
            await asyncio.sleep(0.01)
        assert reports[1] == {"heard": "hello"}
        await child.close()

    run(test)


def test_only_a_process_that_has_ended_is_revived(tmp_path: Path) -> None:
    async def test() -> None:
        program = [sys.executable, "-c", REPORTER]
        child = ReportingProcess("car", program, tmp_path / "log", lambda _: None)
        await child.start()
        assert not await child.revive()
        await child.tell("end 3")
        with pytest.raises(LinkError, match="status 3"):
            await child.ended(20.0)
        assert await child.revive()
        assert (child.is_alive, child.num_lives) == (True, 2)
        await child.close()

    run(test)


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        before = Resources.now()
        assert before.left_behind(before) == []
        child = ReportingProcess(
            "car", [sys.executable, "-c", REPORTER], tmp_path / "log", lambda _: None
        )
        await child.start()
        descriptor = os.open(tmp_path / "log", os.O_RDONLY)
        left = Resources.now().left_behind(before)
        os.close(descriptor)
        assert any(item.startswith("process ") and "--life 0" in item for item in left)
        assert f"descriptor {descriptor} {tmp_path / 'log'}" in left
        await child.close()

    run(test)


# --- the command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tunnel", "--seconds", "5"], "15..3600"),
        (["tunnel", "--vehicles", "0"], "1..64"),
        (["chaos", "--minutes", "61"], "15..3600"),
        (["failover", "--seconds", "60", "--minutes", "1"], "not allowed with"),
        (["maze"], "invalid choice: 'maze'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
