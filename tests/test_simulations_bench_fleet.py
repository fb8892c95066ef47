"""The fleet bench: the load is the peers', turn for turn; what is noted is what a driver waits."""

import asyncio
import importlib.util
import itertools
import json
import selectors
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cloud.decoder import load_brain
from cloud.server import Decoder
from shared.errors import LinkError
from simulations.bench import fleet
from simulations.bench.command import bench
from simulations.bench.fleet import PATIENCE, Record, Vehicle, drive_fleet, summarize
from simulations.bench.metrics import fetch_counters, parse_counters
from simulations.spoken import SYSTEM, SpokenTurn, spoken_turns
from tests.brains import small_settings, write_model

PEERS_SCRIPT = Path(__file__).parents[2] / "shared/peers/fleet_load.py"
PIECES = (0.25, 0.5, 0.5)
"""Seconds before each piece of a fake reply."""


class SkippingSelector(selectors.DefaultSelector):
    """Never waits: what a loop would wait for has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            self.now += timeout or 0.0
        return ready


def in_virtual_time(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine in a loop whose clock jumps from one timer to the next."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(asyncio.wait_for(work(), 1e6))
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


Ended = tuple[float, tuple[str, ...]]
"""When a turn ended, and what its conversation's driver had said by then."""


class FakeTalk:
    def __init__(self, agent: "FakeAgent") -> None:
        self._agent, self.revised, self._said = agent, [], ()

    async def revise(self, text: str) -> None:
        self.revised.append((now(), text))

    async def finish(self, text: str) -> AsyncIterator[str]:
        self._said += (text,)
        self._agent.ended.append((now(), self._said))
        for wait in self._agent.pieces:
            await asyncio.sleep(wait)
            yield "word "
        if self._agent.failure is not None:
            raise self._agent.failure


class FakeAgent:
    """Replies after fixed waits."""

    def __init__(self, *pieces: float, failure: Exception | None = None) -> None:
        self.pieces, self.failure = pieces, failure
        self.ended: list[Ended] = []
        self.talks: list[FakeTalk] = []
        self.opened: list[dict[str, object]] = []

    @asynccontextmanager
    async def conversation(self, **options: object) -> AsyncIterator[FakeTalk]:
        self.opened.append(options)
        self.talks.append(FakeTalk(self))
        yield self.talks[-1]


def turns(count: int = 7) -> list[SpokenTurn]:
    """Turns of different lengths; those of odd number are recognized later than they end."""
    return [
        SpokenTurn(
            ((0.5, f"turn {n}"), (1.0 + n, f"turn {n}.")), f"Turn {n}.", 3.0 if n == 0 else n
        )
        for n in range(count)
    ]


def drive(agent: FakeAgent, seconds: float, number: int = 3) -> Record:
    record = Record()

    async def work() -> None:
        await Vehicle(number, agent, turns(), record).drive(now() + seconds)  # type: ignore[arg-type]

    in_virtual_time(work)
    return record


@pytest.fixture
def peers_script() -> ModuleType:
    if not PEERS_SCRIPT.exists():
        pytest.skip(f"{PEERS_SCRIPT} is not there")
    spec = importlib.util.spec_from_file_location("fleet_load", PEERS_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vehicles_say_what_those_of_the_peers_script_say_at_the_same_time(
    peers_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = turns()
    theirs: dict[int, list[Ended]] = {}
    rows = [
        {"final": t.final, "seconds": t.seconds, "partials": [list(u) for u in t.updates]}
        for t in said
    ]

    async def reply(options: SimpleNamespace, history: list[dict[str, str]]) -> object:
        assert history[0] == {"role": "system", "content": SYSTEM}
        users = tuple(message["content"] for message in history if message["role"] == "user")
        theirs.setdefault(options.number, []).append((now(), users))
        await asyncio.sleep(sum(PIECES))
        return [(at * 1e3, "word ") for at in itertools.accumulate(PIECES)]

    async def script(number: int) -> list[float]:
        clock = SimpleNamespace(monotonic=now, perf_counter=now)
        monkeypatch.setattr(peers_script, "time", clock)
        monkeypatch.setattr(peers_script, "reply", reply)
        first: list[float] = []
        options = SimpleNamespace(number=number)
        await peers_script.vehicle(number, options, rows, now() + 60, first, [], [])
        return first

    for number in range(4):
        first = in_virtual_time(lambda number=number: script(number))
        agent = FakeAgent(*PIECES)
        record = drive(agent, 60, number)
        assert len(record.first) > 5
        assert [said for _, said in agent.ended] == [said for _, said in theirs[number]]
        assert [at for at, _ in agent.ended] == pytest.approx([at for at, _ in theirs[number]])
        assert [s * 1e3 for s in record.first] == pytest.approx(first)


def test_the_load_of_recorded_turns_is_that_of_the_peers_script(peers_script: ModuleType) -> None:
    rows = [json.loads(line) for line in peers_script.PARTIALS.read_text().splitlines()]
    expected = [
        (max(r["seconds"], r["partials"][-1][0]) + peers_script.SILENCE, r["final"]) for r in rows
    ]
    assert [(turn.ends_at, turn.final) for turn in spoken_turns()] == expected
    assert peers_script.SYSTEM == SYSTEM


def test_words_are_relayed_when_they_were_recognized() -> None:
    agent = FakeAgent(*PIECES)
    drive(agent, 30)
    talk = agent.talks[0]
    (began, _), (grown, text), *_ = talk.revised
    number = int(text.strip("turn ."))
    assert grown - began == pytest.approx(0.5 + number)
    assert agent.ended[0][0] - (began - 0.5) == pytest.approx(turns()[number].ends_at)


def test_a_conversation_has_four_turns_and_the_fleets_system_text() -> None:
    agent = FakeAgent(*PIECES)
    drive(agent, 100)
    assert [len(said) for _, said in agent.ended][:9] == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert all(o == {"system": SYSTEM, "max_tokens": 32} for o in agent.opened)


def test_no_turn_ends_after_the_time_is_up_and_a_reply_under_way_is_heard_out() -> None:
    until = drive_until_a_reply_is_cut()
    agent = FakeAgent(*PIECES)
    record = drive(agent, until)
    assert all(at < until for at, _ in agent.ended)
    assert len(record.first) == len(agent.ended)
    assert agent.ended[-1][0] + sum(PIECES) > until


def drive_until_a_reply_is_cut() -> float:
    """Return a time that lies within a reply."""
    agent = FakeAgent(*PIECES)
    drive(agent, 30)
    return agent.ended[2][0] + PIECES[0]


def test_times_run_from_the_end_of_a_turn_and_between_pieces() -> None:
    record = drive(FakeAgent(0.25, 0.5, 0.75), 30)
    assert record.first == pytest.approx([0.25] * len(record.first))
    assert record.between == pytest.approx([0.5, 0.75] * len(record.first))
    assert record.late == pytest.approx([0.0] * len(record.late))


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (FakeAgent(0.1, failure=LinkError("gone")), "vehicle 3: LinkError: gone"),
        (FakeAgent(), "the reply has no text"),
        (FakeAgent(0.1, PATIENCE), f"more than {PATIENCE:g} s"),
    ],
)
def test_a_turn_that_fails_is_an_error_and_the_vehicle_goes_on(agent: FakeAgent, said: str) -> None:
    record = drive(agent, 200)
    assert len(record.errors) == len(agent.ended) > 1
    assert all(said in error for error in record.errors)
    assert record.first == record.between == []
    assert {len(said) for _, said in agent.ended} == {1}


def test_a_vehicle_without_a_decoder_does_not_spin() -> None:
    class Unreachable(FakeAgent):
        def conversation(self, **_: object) -> Any:
            raise LinkError("no decoder")

    assert len(drive(Unreachable(), 20).errors) <= 20


def test_the_summary_has_the_figures_that_were_promised() -> None:
    record = Record([0.001, 0.4, 0.6], [0.01, 0.03], [0.0, 0.001], ["vehicle 1: E: e"], 0.021)
    found = summarize(16, record, 2 / 3)
    assert list(found)[:7] == [
        *("vehicles", "ttft_ms", "itl_ms", "turns", "within_500ms", "adopted_share", "errors")
    ]
    assert (found["turns"], found["within_500ms"], found["errors"]) == (3, 0.667, 1)
    assert (found["ttft_ms"]["p50"], found["itl_ms"]["p50"]) == (400.0, 20.0)
    assert (found["adopted_share"], found["driver"]["cpu_percent"]) == (0.667, 2.1)


def test_a_small_fleet_is_answered_over_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "START", 0.1)
    monkeypatch.setattr(fleet, "PAUSE", 0.1)
    short = [SpokenTurn(((0.05, "Find"), (0.1, "Find a charger")), "Find a charger", 0.1)]
    monkeypatch.setattr(fleet, "spoken_turns", lambda: short)

    async def test() -> None:
        settings = small_settings(write_model(tmp_path / "model"))
        decoder = Decoder(load_brain(settings), settings)
        with TemporaryDirectory(prefix="deltarelay-test-") as folder:
            address = f"shm://{folder}/decoder.sock"
            await decoder.start([address])
            try:
                record = await drive_fleet(address, 3, 2.0)
            finally:
                await decoder.close()
        assert record.errors == []
        assert len(record.first) >= 3
        assert decoder.voice.ahead_counts.turns == len(record.first)
        assert 0 < record.cpu_share < 2

    asyncio.run(asyncio.wait_for(test(), 60))


@contextmanager
def serving(page: str) -> Iterator[str]:
    """Serve a page at /metrics; give its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


PAGE = """\
# HELP deltarelay_turns_total Turns that ended.
# TYPE deltarelay_turns_total counter
deltarelay_turns_total{device="a",why="x } y"} 3 1700000000000
deltarelay_turns_total{device="b"} 4.0
deltarelay_drafts_adopted_total 5
step_seconds_bucket{le="+Inf"} 1e+03
"""


def test_counters_are_read_and_summed_over_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(PAGE) as url:
        names = ("deltarelay_turns_total", "deltarelay_drafts_adopted_total")
        assert fetch_counters(f"{url}/metrics", *names) == [7.0, 5.0]


def test_counters_that_are_not_there_are_named() -> None:
    with serving(PAGE) as url:
        with pytest.raises(LinkError, match="does not serve reset_total"):
            fetch_counters(f"{url}/metrics", "deltarelay_turns_total", "reset_total")
        with pytest.raises(LinkError, match="404"):
            fetch_counters(f"{url}/other", "deltarelay_turns_total")
    with pytest.raises(LinkError, match="is the decoder alive"):
        fetch_counters(f"{url}/metrics", "deltarelay_turns_total")


def test_a_page_that_is_no_list_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="<html>"):
        parse_counters("<html>\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("fleet", "--vehicles", "0"), "at least 1"),
        (("fleet", "--seconds", "nan"), "finite"),
        (("step", "--vehicles", "3"), "unrecognized"),
        (("dance",), "dance"),
    ],
)
def test_options_that_no_bench_takes_are_refused(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench(options)
    assert said in capsys.readouterr().err


def test_the_options_of_a_bench_reach_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def bench_fleet(**options: object) -> dict[str, object]:
        return options

    monkeypatch.setattr(fleet, "bench_fleet", bench_fleet)
    assert bench(["fleet", "--vehicles", "64", "--link", "mqtt", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown == {
        "model": "smollm2-135m-instruct", "vehicles": 64, "seconds": 60.0, "link": "mqtt",
    }  # fmt: skip
