"""The tunnel, short: a few real vehicles, one restart and one kill of each kind."""

import asyncio
from pathlib import Path

import pytest

from simulations.simulate.tunnel import simulate_tunnel
from simulations.traveller import TALKS, scripted_turn
from tests.simulated import SMALL, small_model


@pytest.mark.mqtt
def test_through_a_tunnel_every_turn_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    found = asyncio.run(simulate_tunnel(small_model(tmp_path), 3, 20.0, 2, SMALL))
    assert found["turns"] >= 3 * len(TALKS)
    assert found["answered_once"] == found["turns"]
    assert found["differing_logs"] == found["contradictions"] == found["leaks"] == 0
    assert found["drain_s"] is not None, "how fast is for the long run to say"
    assert 0 < found["max_burst"] <= 8
    assert 0 < found["reconnects"] < found["connects"]
    kinds = [fault.split(": ")[1].split(",")[0].split()[0] for fault in found["faults"]]
    assert sorted(kinds) == ["broker", "decoder", "vehicle"]
    assert "generated" in found["link"]
    assert all(broken.startswith("drain_s") for broken in found["broken"])


def test_no_two_turns_of_a_conversation_say_the_same() -> None:
    said = [scripted_turn(1, "car", "driver", turn) for turn in range(200)]
    assert len(set(said)) == 200
    assert said == [scripted_turn(1, "car", "driver", turn) for turn in range(200)]
    assert said != [scripted_turn(2, "car", "driver", turn) for turn in range(200)]
