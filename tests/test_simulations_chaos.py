"""Chaos, short: every fault once, over both links; and what the faults are made of."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from shared.errors import InputError, RemoteProtocolError
from shared.frames import Hello, decode
from shared.transport.mqtt_address import Broker
from shared.transport.mqtt_listener import MqttListener
from shared.transport.shm_listener import ShmListener
from simulations.broker import open_broker
from simulations.simulate.chaos import OWN_MEMORY, simulate_chaos
from simulations.simulate.leaks import POOL, Holdings
from simulations.simulate.limits import (
    OWN_SHARED_MEMORY,
    disk_full,
    may_mount,
    no_descriptors,
    shared_memory_full,
)
from simulations.simulate.mishaps import MISHAPS
from simulations.simulate.place import own_clock
from simulations.simulate.strangers import knock
from tests.conformance.ends import End, run, until
from tests.simulated import SMALL, skip_without_broker, small_model


@pytest.mark.mqtt
def test_after_every_fault_conversations_go_on_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found = asyncio.run(simulate_chaos(small_model(tmp_path), 2, 0.0, 1, SMALL))
    assert found["broken"] == []
    assert found["leaks"] == found["violations"] == 0
    assert found["answered_once"] == found["turns"] >= 4 * len(MISHAPS)
    assert found["faults"] == {name: 1 for name in MISHAPS if name not in found["skipped"]}
    assert set(found["skipped"]) <= {OWN_MEMORY}


def test_one_vehicle_is_too_few_for_two_links() -> None:
    with pytest.raises(InputError, match="1 vehicles: 2 at least"):
        asyncio.run(simulate_chaos("nowhere", 1, 60.0, 1))


# --- what is taken away from a process

ASKED = """
import os, sys, time
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


class Asked:
    """A process that answers what Python expressions are."""

    def __init__(self, *through: str) -> None:
        self._process = subprocess.Popen(
            [*through, sys.executable, "-c", ASKED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def __call__(self, expression: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(expression, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


def test_a_process_whose_disk_is_full_writes_again_when_it_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    writing = f"open({path!r}, 'w').write('words')"
    unbuffered = f"os.write(os.open({path!r}, os.O_WRONLY), b'words')"
    with Asked() as asked:
        assert asked(writing) == "5"
        with disk_full(asked.pid):
            assert asked(unbuffered) == "File too large"
        assert asked(writing) == "5"


def test_a_process_without_descriptors_opens_again_when_it_has_some() -> None:
    with Asked() as asked:
        assert asked("1 + 1") == "2"
        with no_descriptors(asked.pid):
            assert asked("os.dup(0)") == "Too many open files"
        assert int(asked("os.dup(0)")) > 2


@pytest.mark.skipif(may_mount() != "", reason="no process can be given a /dev/shm of its own")
def test_shared_memory_is_full_for_one_process_and_for_nobody_else() -> None:
    allocating = "os.posix_fallocate(os.open('/dev/shm/deltarelay-x', 66), 0, 4096)"
    with Asked(*OWN_SHARED_MEMORY) as asked:
        assert asked("1 + 1") == "2"
        with shared_memory_full(asked.pid):
            assert asked(allocating) == "No space left on device"
            assert not os.path.exists("/dev/shm/filler")
        assert asked(allocating) == "None"
        assert not os.path.exists("/dev/shm/deltarelay-x")


def test_a_wall_clock_is_stepped_and_monotonic_time_is_not(tmp_path: Path) -> None:
    step = tmp_path / "clock"
    step.write_text("0")
    differing = "round(time.time() - os.times().elapsed, 1), round(time.monotonic(), -1)"
    with Asked(*own_clock(step)) as asked:
        before, monotonic = eval(asked(differing))
        for seconds in (3600, -3600):
            step.write_text(str(seconds))
            stepped, still = eval(asked(differing))
            assert stepped - before == pytest.approx(seconds, abs=5)
            assert still - monotonic <= 10
        assert asked("time.time_ns() // 10**9 - int(time.time())") in ("0", "1")


# --- what is left behind


def test_what_a_process_holds_more_than_before_is_named(tmp_path: Path) -> None:
    with Asked() as asked:
        asked("1")
        before = Holdings.of(asked.pid)
        assert Holdings.of(asked.pid).beyond(before) == []
        asked(f"os.open({str(tmp_path)!r}, 0)")
        asked("os.dup(0)")
        found = Holdings.of(asked.pid).beyond(before)
        assert sorted(found) == sorted([f"1 more of {tmp_path}", "1 more of pipe"])


def test_threads_count_beyond_those_of_a_pool() -> None:
    waiting = "__import__('threading').Thread(target=time.sleep, args=(3,), daemon=True).start()"
    with Asked() as asked:
        asked("1")
        before = Holdings.of(asked.pid)
        for _ in range(POOL):
            asked(waiting)
        assert Holdings.of(asked.pid).beyond(before) == []
        asked(waiting)
        assert Holdings.of(asked.pid).beyond(before) == ["1 more of thread"]


@pytest.mark.mqtt
def test_strangers_come_over_both_links_some_greet_and_all_are_gone(tmp_path: Path) -> None:
    ends: list[End] = []

    async def test() -> None:
        with open_broker() as real:
            broker = Broker(real.host, real.port)
            at_broker = MqttListener(broker, fleet="fleet", decoder="d", boot="b")
            at_socket = ShmListener(tmp_path / "d.sock")
            for listener in (at_broker, at_socket):
                await listener.start(lambda transport: ends.append(End(transport).start()))
            place = str(tmp_path / "d.sock"), (real.host, real.port)
            await knock(60, *place, "d", Random(1))
            await until(lambda: all(end.ends for end in ends))
            for listener in (at_broker, at_socket):
                await listener.close()

    skip_without_broker()
    run(test)
    for link in ("shm", "mqtt"):
        frames = [f for end in ends if end.transport.name.startswith(link) for f in end.frames]
        assert {is_hello(frame) for frame in frames} == {True, False}, "whole ones and halves"


def is_hello(frame: bytes) -> bool:
    try:
        return isinstance(decode(frame), Hello)
    except RemoteProtocolError:
        return False
