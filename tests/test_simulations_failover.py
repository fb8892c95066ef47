"""A decoder that fails or leaves is left for another, and nobody hears anything twice."""

import asyncio
from pathlib import Path

import pytest

from simulations.simulate.failover import simulate_failover
from simulations.simulate.ledger import Ledger, TurnKey
from simulations.simulate.waits import longest_waits
from simulations.traveller import TALKS
from tests.simulated import SMALL, small_model


@pytest.mark.mqtt
def test_vehicles_go_on_at_the_other_decoder_when_theirs_is_killed_frozen_or_restarted(
    tmp_path: Path,
) -> None:
    found = asyncio.run(simulate_failover(small_model(tmp_path), 2, 0.0, 1, SMALL))
    assert found["turns"] >= 3 * len(TALKS)
    assert found["answered_once"] == found["turns"]
    assert found["repeated_tokens"] == found["double_answers"] == found["differing_logs"] == 0
    assert found["contradictions"] == found["failed_stops"] == found["leaks"] == 0
    assert found["faults"] == 3
    assert found["moves"] >= 3, "each fault met a decoder with a vehicle"
    assert sorted(found["gap_s"]) == ["drain", "freeze", "kill"]
    assert found["gap_s"]["freeze"]["max"] > 1.0, "a frozen decoder was waited for"
    assert all(broken.startswith("gap_s") for broken in found["broken"])


def turn(ledger: Ledger, key: TurnKey, ended: float, shown: list[float], done: float) -> None:
    for at, event in ((ended, "ended"), *((at, "shown") for at in shown), (done, "done")):
        place = {"talk": key.talk, "turn": key.turn}
        ledger.take(key.device, {"event": event, "index": 0, "ids": [], **place}, at)


def test_a_driver_waits_from_the_fault_to_the_next_word_and_from_word_to_word() -> None:
    ledger = Ledger()
    turn(ledger, TurnKey("car", "driver", 0), 1.0, [2.0], 3.0)
    turn(ledger, TurnKey("car", "driver", 1), 9.0, [9.5, 10.1, 14.0, 14.5], 15.0)
    turn(ledger, TurnKey("car", "driver", 2), 20.0, [30.0], 31.0)
    turn(ledger, TurnKey("car", "passenger", 0), 12.0, [12.5], 15.5)
    turn(ledger, TurnKey("bus", "driver", 0), 9.0, [90.0], 91.0)
    assert longest_waits(ledger, ["car"], 10.0) == [pytest.approx(3.9), 3.0]
    assert longest_waits(ledger, ["car"], 16.0) == [10.0]
    assert longest_waits(ledger, ["car"], 99.0) == []
