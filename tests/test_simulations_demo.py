"""What the demo shows and writes, from what vehicles report."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.errors import LinkError
from shared.tokenizer import load_tokenizer
from simulations.bench.link import bytes_per_turn
from simulations.demo import Row, _fleet, _table, summarize
from simulations.doctor import doctor
from simulations.report import write_report
from tests.vocabularies import small_blob


def turn(tokens: int, relayed: float, whole: float) -> dict[str, Any]:
    return {
        "event": "turn",
        "text": "Find <b>a</b> charger",
        "reply": "Yes",
        "reason": "length",
        "spoken": tokens == 50,
        "tokens": tokens,
        "taken_back": 2,
        "relayed_ms": relayed,
        "whole_ms": whole,
        "relay_bytes": 100,
        "relay_frames": 4,
        "json_resent_bytes": 900,
        "json_updates": 20,
        "json_once_bytes": 40,
        "ended": 1.0,
        "timeline": [[0.1, "text", "0+2"], [0.9, "text", "3+1"], [1.2, "reply", "Yes"]],
    }


def rows() -> list[Row]:
    made = [Row("vehicle-1", "shm", 1), Row("vehicle-2", "mqtt", 1)]
    for row, values in zip(made, [(10, 20.0, 60.0), (50, 22.0, 120.0)], strict=True):
        row.take({"event": "ready"})
        row.take({"event": "text", "text": "Find", "committed": 1, "tail": 1})
        row.take({"event": "piece", "piece": "Ye"})
        row.take(turn(*values))
        row.take({"event": "done"})
    return made


def test_the_summary_counts_what_the_vehicles_report() -> None:
    summary = summarize(rows(), 12.34)
    assert summary["turns"] == summary["answered"] == 2
    assert summary["by_link"] == {"shm": 1, "mqtt": 1}
    assert (summary["spoken_turns"], summary["taken_back_tokens"]) == (1, 4)
    assert summary["long_turns"] == {"relayed_p50": 22.0, "whole_p50": 120.0}
    json.dumps(summary)


def test_the_table_shows_words_and_times_also_on_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(_table(rows()))
    console.file.close()
    shown = console.export_text()
    assert "Find <b>a</b> charger" in shown
    assert "22 ms" in shown


def test_the_report_holds_its_pictures_and_escapes_what_people_say(tmp_path: Path) -> None:
    made = rows()
    turns = [{"link": r.link, "device": r.device, **t} for r in made for t in r.turns]
    write_report(tmp_path / "report.html", summarize(made, 1.0), turns)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "Find &lt;b&gt;a&lt;/b&gt; charger" in page
    assert "<b>a</b>" not in page


def test_an_event_nobody_knows_is_said() -> None:
    with pytest.raises(LinkError, match="vehicle-9 reports 'dance'"):
        Row("vehicle-9", "shm").take({"event": "dance"})


def test_the_fleet_has_two_links_and_all_kinds_of_turns() -> None:
    fleet = _fleet()
    assert [row.link for row in fleet] == ["shm", "shm", "mqtt", "mqtt"]
    assert sum(row.num_turns for row in fleet) >= 24
    assert all(row.num_turns for row in fleet)


def test_deltas_take_fewer_bytes_than_text_sent_again_on_every_change() -> None:
    sizes = bytes_per_turn(load_tokenizer(small_blob("small-gpt-2")))
    assert sizes["json_once"] < sizes["relay"] < sizes["json_resent"]


def test_the_doctor_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor(["--json", "--broker", "127.0.0.1:9"])
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    by_name = {finding["what"]: finding for finding in findings}
    assert by_name["shared memory"]["state"] == "ok"
    assert by_name["broker"]["state"] == "warning"
    assert by_name["broker"]["advice"]
    assert status == int(any(finding["state"] == "problem" for finding in findings))
