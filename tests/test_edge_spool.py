"""Conversations on disk: whatever was done to one, a new process reads the same."""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from edge.spool import Kept, Moment, Recorder, Spool
from shared.errors import LinkError
from shared.frames import OpenBody, Reason, WelcomeBody
from shared.outbox import Bounds, Change, Item, Kind, Put
from shared.session import ConversationLog

BODY = OpenBody("c0ffee", "You are a car.", max_tokens=7)


def flush(spool: Spool) -> None:
    done = threading.Event()
    spool.outbox.write(then=done.set)
    assert done.wait(10)


def state(log: ConversationLog) -> tuple[object, ...]:
    return log.turns, list(log.log.committed), log.ended, log.attempt, log.reply.ids


def read_back(folder: Path, name: str = "trip") -> tuple[ConversationLog, Kept]:
    spool = Spool(folder)
    try:
        kept = spool.kept[name]
    finally:
        spool.close()
    log = ConversationLog()
    kept.restore(log)
    return log, kept


def do_something(log: ConversationLog, rng: Random) -> None:
    """Do one thing that this state allows."""
    if log.ended:
        match rng.randrange(6):
            case 0:
                log.cancel(rng.randint(0, len(log.reply.ids)))
            case 1:
                log.reopen()
            case 2:
                log.finish(Reason.STOP)
            case _:
                log.reply.ids += [rng.randrange(1000) for _ in range(rng.randint(1, 3))]
    elif rng.random() < 0.2:
        log.end()
    else:
        keep = rng.choice([len(log.log)] * 3 + [rng.randint(0, len(log.log))])
        fresh = [rng.randrange(1000) for _ in range(rng.randrange(4))]
        log.revise(keep, fresh, [rng.randrange(1000)] * rng.randrange(3))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_disk_has_what_the_log_has(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    log = ConversationLog()
    for part in range(6):  # processes, one after the other
        spool = Spool(tmp_path)
        recorder = Recorder(spool.outbox, "trip", log, spool.kept.get("trip", Kept(BODY)))
        if part == 0 or rng.random() < 0.5:
            recorder.claim()
        for _ in range(rng.randrange(30)):
            do_something(log, rng)
            if rng.random() < 0.7:
                recorder.record(sync=rng.random() < 0.2)
        recorder.record()
        spool.close()
        found, kept = read_back(tmp_path)
        assert state(found) == state(log)
        assert kept.body == BODY
        log = found


def test_the_end_of_a_turn_keeps_its_time_until_it_is_taken_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    log = ConversationLog()
    recorder = Recorder(spool.outbox, "trip", log, Kept(BODY))
    recorder.claim()
    log.revise(0, [1, 2], [])
    log.end()
    recorder.record()
    first = recorder.ended
    assert first is not None
    log.reply.ids += [5]
    recorder.record()
    recorder.begin()
    assert recorder.ended == first
    spool.close()
    _, kept = read_back(tmp_path)
    assert kept.ended == first
    log.reopen()
    assert recorder.ended is None
    log.end()
    assert recorder.ended != first


def test_a_moment_is_as_old_as_its_boot_says_whatever_the_wall_clock_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = Moment.now()
    monkeypatch.setattr("time.time", lambda: moment.wall - 3600)
    assert 0 <= moment.age() < 5
    elsewhere = msgspec.structs.replace(moment, boot="another", wall=moment.wall - 3700)
    assert elsewhere.age() == pytest.approx(100)
    later = msgspec.structs.replace(moment, boot="another", wall=moment.wall + 3600)
    assert later.age() == 0, "a clock that was set back makes nothing older"


def test_several_conversations_are_kept_apart_and_a_dropped_one_is_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    logs = {name: ConversationLog() for name in ("trip", "trip/2", "Fahrt ☕")}
    recorders: dict[str, Recorder] = {}
    for number, (name, log) in enumerate(logs.items()):
        recorders[name] = Recorder(spool.outbox, name, log, Kept(BODY))
        recorders[name].claim()
        log.revise(0, [number], [])
        recorders[name].record()
    recorders["trip/2"].drop()
    spool.close()
    spool = Spool(tmp_path)
    assert {name: kept.ids for name, kept in spool.kept.items()} == {"trip": [0], "Fahrt ☕": [2]}
    spool.close()


def test_a_conversation_is_rewritten_as_one_change_so_that_no_crash_leaves_half_of_it(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path)
    log = ConversationLog()
    log.revise(0, [1, 2], [])
    log.end()
    log.reply.ids += [3]
    log.finish(Reason.STOP)
    log.revise(0, [4], [])
    recorder = Recorder(spool.outbox, "trip", log, Kept(BODY))
    written: list[int] = []
    write = spool.outbox.write

    def count(*changes: Change, **more: Any) -> None:
        written.append(len(changes))
        write(*changes, **more)

    spool.outbox.write = count  # type: ignore[method-assign]
    recorder.claim()
    assert len(written) == 1
    spool.close()
    assert state(read_back(tmp_path)[0]) == state(log)


def test_the_last_decoder_is_remembered(tmp_path: Path) -> None:
    welcome = WelcomeBody("d1", "boot", 7, "t" * 64, "g", "m", "d", vocabulary=99, context=512)
    spool = Spool(tmp_path)
    assert spool.welcome is None
    spool.remember(welcome)
    spool.close()
    spool = Spool(tmp_path)
    assert spool.welcome == welcome
    spool.close()


def test_one_agent_at_a_time_uses_a_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(LinkError, match="another agent uses it"):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LinkError, match="file/spool"):
        Spool(tmp_path / "file" / "spool")


def test_telemetry_gives_way_to_words_and_other_items_are_left_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path, Bounds(num_bytes=5000))
    spool.outbox.write(Put(Item(Kind.TELEMETRY, "speed", 0, bytes(4000))))
    spool.outbox.write(Put(Item(Kind.SUMMARY, "round", 0, bytes(100))))
    log = ConversationLog()
    recorder = Recorder(spool.outbox, "trip", log, Kept(BODY))
    recorder.claim()
    log.revise(0, list(range(700)), [])
    recorder.record()
    flush(spool)
    flush(spool)
    assert spool.outbox.counts.dropped == {Kind.TELEMETRY: 1}
    spool.close()
    spool = Spool(tmp_path)
    assert list(spool.kept) == ["trip"]
    assert [i.stream for i in spool.outbox.items() if i.kind is Kind.SUMMARY] == ["round"]
    spool.close()


def damage(path: Path, how: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    how(content)
    path.write_bytes(content)


def test_after_damage_the_agent_begins_anew_and_keeps_the_damaged_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    log = ConversationLog()
    Recorder(spool.outbox, "trip", log, Kept(BODY)).claim()
    spool.close()

    def scribble(content: bytearray) -> None:
        content[-1000:] = b"\xff" * 1000

    damage(tmp_path / "spool.sqlite", scribble)
    spool = Spool(tmp_path)
    assert spool.outbox.counts.bad_files == 1
    assert spool.kept == {}
    assert (tmp_path / "spool.sqlite.bad").exists()
    spool.close()
