"""`deltarelay demo`: a decoder and four vehicles as processes of their own, live in one table."""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.child import open_decoder
from shared.commands import parser, print_json, start_logging
from shared.errors import LinkError
from simulations.broker import open_broker
from simulations.dialogues import load_dialogues
from simulations.report import write_report
from simulations.vehicle import LONG_TURN

MODEL = "smollm2-135m-instruct"
RUNS = Path("runs/demo")
NUM_DIALOGUES = 8
"""How many of our dialogues are held: they fill most of a minute."""


@dataclass(slots=True)
class Row:
    """What the table shows of one vehicle, and its finished turns."""

    device: str
    link: str
    num_turns: int = 0
    dialogues: list[str] = field(default_factory=list[str])
    text: str = ""
    reply: str = ""
    committed: int = 0
    tail: int = 0
    state: str = "starting"
    turns: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def take(self, event: dict[str, Any]) -> None:
        """Follow what the vehicle reports."""
        match event["event"]:
            case "ready":
                self.state = "ready"
            case "text":
                self.state, self.text, self.reply = "listening", event["text"], ""
                self.committed, self.tail = event["committed"], event["tail"]
            case "piece":
                self.state = "replying"
                self.reply += event["piece"]
            case "turn":
                self.turns.append(event)
                self.text, self.reply = event["text"], event["reply"]
                self.committed, self.tail = event["tokens"], 0
            case "done":
                self.state = "done"
            case other:
                raise LinkError(f"vehicle {self.device} reports {other!r}")

    @property
    def taken_back(self) -> int:
        """Tokens taken back in all finished turns."""
        return sum(turn["taken_back"] for turn in self.turns)


def demo(arguments: Sequence[str]) -> int:
    """Run the demo."""
    ask = parser("demo", "A decoder and four vehicles on this machine.", reports=True)
    ask.add_argument("--pace", type=float, default=6.0, help="typing speed, times a person's")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    console = Console(stderr=options.json)
    summary = asyncio.run(_demo(console, options.pace))
    _print_summary(console, summary)
    if options.json:
        print_json(summary)
    return 0


async def _demo(console: Console, pace: float) -> dict[str, Any]:
    started = time.monotonic()
    with open_broker() as broker:
        mqtt = f"mqtt://{broker.host}:{broker.port}"
        console.print(f"broker: {broker.name} at {mqtt}; decoder: loading {MODEL} ...")
        async with open_decoder(MODEL, listen=[mqtt]) as decoder:
            rows = _fleet()
            links = {"shm": decoder.address, "mqtt": mqtt}
            await _run_fleet(console, rows, links, pace)
    summary = summarize(rows, time.monotonic() - started)
    _write(summary, rows)
    return summary


def _write(summary: dict[str, Any], rows: Sequence[Row]) -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    turns = [{"link": row.link, "device": row.device, **turn} for row in rows for turn in row.turns]
    write_report(RUNS / "report.html", summary, turns)


def _fleet() -> list[Row]:
    """Share the dialogues out over four vehicles, longest first to the least loaded."""
    rows = [Row(f"vehicle-{n}", "shm" if n < 3 else "mqtt") for n in range(1, 5)]
    load = dict.fromkeys(range(4), 0)
    load[1] = 250  # it speaks first
    share: dict[int, list[str]] = {n: [] for n in range(4)}
    dialogues = load_dialogues()[:NUM_DIALOGUES]
    sizes = {
        d.id: sum(len(t.text) * (3 if d.language == "ja" else 1) for t in d.turns)
        for d in dialogues
    }
    for dialogue in sorted(dialogues, key=lambda d: -sizes[d.id]):
        n = min(load, key=load.__getitem__)
        load[n] += sizes[dialogue.id]
        share[n].append(dialogue.id)
        rows[n].num_turns += len(dialogue.turns)
    rows[1].num_turns += 1
    for n, row in enumerate(rows):
        row.dialogues = share[n]
    return rows


async def _run_fleet(console: Console, rows: list[Row], links: dict[str, str], pace: float) -> None:
    vehicles = [
        await _start(row, links[row.link], pace, speak=n == 1) for n, row in enumerate(rows)
    ]
    ready = asyncio.Barrier(len(vehicles))
    with Live(_table(rows), console=console, refresh_per_second=6) as live:
        watcher = asyncio.create_task(_redraw(live, rows), name="table")
        try:
            following = (_follow(row, v, ready) for row, v in zip(rows, vehicles, strict=True))
            await asyncio.gather(*following)
        finally:
            watcher.cancel()
            for vehicle in vehicles:
                if vehicle.returncode is None:
                    vehicle.kill()
        live.update(_table(rows))


async def _start(row: Row, to: str, pace: float, *, speak: bool) -> asyncio.subprocess.Process:
    program = [sys.executable, "-m", "simulations.vehicle", "--to", to, "--device", row.device]
    program += ["--pace", str(pace)]
    for name in row.dialogues:
        program += ["--dialogue", name]
    if speak:
        program.append("--speak")
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *program, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 22
    )


async def _follow(row: Row, vehicle: asyncio.subprocess.Process, ready: asyncio.Barrier) -> None:
    assert vehicle.stdout is not None
    assert vehicle.stderr is not None
    assert vehicle.stdin is not None
    complaints = asyncio.create_task(vehicle.stderr.read(), name=f"{row.device}-stderr")
    async for line in vehicle.stdout:
        row.take(json.loads(line))
        if row.state == "ready":
            await ready.wait()
            vehicle.stdin.write(b"go\n")
            row.state = "listening"
    status = await vehicle.wait()
    if status or row.state != "done":
        text = (await complaints).decode(errors="replace")[-800:]
        raise LinkError(f"{row.device} ended with status {status}: {text}")
    await complaints


async def _redraw(live: Live, rows: list[Row]) -> None:
    while True:
        live.update(_table(rows))
        await asyncio.sleep(0.15)


def _table(rows: list[Row]) -> Table:
    title = "deltarelay: words are relayed while they grow"
    table = Table(title=title, expand=True, title_style="bold", show_lines=True)
    table.add_column("vehicle", width=10, no_wrap=True)
    table.add_column("the driver says, the decoder replies", ratio=1)
    table.add_column("tokens", width=9, justify="right", no_wrap=True)
    table.add_column("first token", width=11, justify="right", no_wrap=True)
    for row in rows:
        last = row.turns[-1] if row.turns else None
        words = Text(_end(row.text, 90), style="default")
        words.append(f"\n{_end(row.reply, 90) or ' '}", style="cyan")
        times = f"{last['relayed_ms']:.0f} ms\nwhole {last['whole_ms']:.0f}" if last else ""
        table.add_row(
            f"{row.device}\n{row.link} {len(row.turns)}/{row.num_turns}",
            words,
            f"{row.committed}+{row.tail}\n{row.taken_back} back",
            times,
        )
    return table


def _end(text: str, size: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= size else "…" + text[-size:]


def summarize(rows: list[Row], seconds: float) -> dict[str, Any]:
    """Return the demo's figures."""
    turns = [turn for row in rows for turn in row.turns]
    long = [turn for turn in turns if turn["tokens"] >= LONG_TURN]
    return {
        "vehicles": len(rows),
        "turns": len(turns),
        "answered": sum(bool(turn["reply"]) for turn in turns),
        "by_link": {
            link: sum(len(row.turns) for row in rows if row.link == link)
            for link in ("shm", "mqtt")
        },
        "spoken_turns": sum(turn["spoken"] for turn in turns),
        "taken_back_tokens": sum(row.taken_back for row in rows),
        "relayed": {"ttft_ms": spread([turn["relayed_ms"] for turn in turns])},
        "whole": {"ttft_ms": spread([turn["whole_ms"] for turn in turns])},
        "long_turns": {
            "relayed_p50": round(statistics.median(turn["relayed_ms"] for turn in long), 2),
            "whole_p50": round(statistics.median(turn["whole_ms"] for turn in long), 2),
        },
        "seconds": round(seconds, 1),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    return {
        "p50": round(statistics.median(values), 2),
        "p99": round(statistics.quantiles(values, n=100, method="inclusive")[98], 2),
    }


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
    long = summary["long_turns"]
    table = Table(
        title="From the end of a turn to the first token of its reply", title_style="bold"
    )
    for name in ("", "relayed while it grew", "sent whole at its end"):
        table.add_column(name, justify="right" if name else "left")
    for name, key in (("all turns, median", "p50"), ("all turns, 99th percentile", "p99")):
        relayed, whole = summary["relayed"]["ttft_ms"][key], summary["whole"]["ttft_ms"][key]
        table.add_row(name, f"{relayed:.1f} ms", f"{whole:.1f} ms")
    table.add_row(
        f"turns of {LONG_TURN} tokens and more, median",
        f"{long['relayed_p50']:.1f} ms",
        f"{long['whole_p50']:.1f} ms",
    )
    console.print(table)
    console.print(
        f"{summary['answered']} of {summary['turns']} turns answered "
        f"({summary['by_link']['shm']} over shared memory, {summary['by_link']['mqtt']} over MQTT, "
        f"{summary['spoken_turns']} spoken); {summary['taken_back_tokens']} tokens were taken "
        f"back; {summary['seconds']} s. Pictures: {RUNS / 'report.html'}"
    )
