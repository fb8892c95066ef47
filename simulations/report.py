"""The demo's report: one HTML file with its pictures inside."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RELAYED, WHOLE, GREY = "#0f766e", "#c2410c", "#94a3b8"
MQTT_OVERHEAD = 7
"""Bytes that MQTT 5 adds to a QoS 1 PUBLISH besides its topic: header 2-3, topic length 2, id 2,
properties 1.
"""
TOPIC = len("dr/v1/fleet/decoder/vehicle-1/up")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>deltarelay demo</title><style>
body {{ font: 16px/1.55 system-ui, sans-serif; color: #0f172a; max-width: 62rem;
  margin: 2.5rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.7rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.4rem; }}
p.lead {{ color: #475569; margin-top: 0; }} img {{ max-width: 100%; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.4rem 0; }}
.card {{ flex: 1 1 11rem; border: 1px solid #e2e8f0; border-radius: .6rem; padding: .8rem 1rem; }}
.card b {{ display: block; font-size: 1.6rem; color: {accent}; }} .card span {{ color: #475569; }}
table {{ border-collapse: collapse; width: 100%; font-size: .86rem; }}
th, td {{ text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #e2e8f0;
  vertical-align: top; }}
td:first-child, td.n, th.n {{ white-space: nowrap; }} td.n, th.n {{ text-align: right; }}
td.reply {{ color: {accent}; }}
</style></head><body>
<h1>Only deltas cross the link</h1>
<p class="lead">{vehicles} vehicles, one decoder, {turns} turns in {seconds} s on this machine.
Every turn was relayed while it grew and, right after its reply, once more sent whole.</p>
<div class="cards">{cards}</div>
<h2>From the end of a turn to the first token</h2>
<p>What the relay leaves to do at the end of a turn does not grow with the turn.</p>{ttft}
<h2>Bytes on the link</h2>
<p>Per turn, up, as MQTT messages: token deltas against the text as JSON, sent again on every change
(what it takes to let a server follow along) and sent once at the end (no head start).</p>{bytes}
<h2>One turn</h2><p>{caption}</p>{timeline}
<h2>All turns</h2>{table}
</body></html>
"""


def write_report(path: Path, summary: dict[str, Any], turns: Sequence[dict[str, Any]]) -> None:
    """Write the report of a run.

    Args:
        turns: what the vehicles reported of every turn.
    """
    shown = max(turns, key=lambda t: (t["taken_back"] > 0, t["tokens"]))
    page = _PAGE.format(
        accent=RELAYED,
        vehicles=summary["vehicles"],
        turns=summary["turns"],
        seconds=summary["seconds"],
        cards=_cards(summary),
        ttft=_picture(_draw_ttft, turns),
        bytes=_picture(_draw_bytes, turns),
        caption=html.escape(
            f"{shown['device']} over {shown['link']}: {shown['tokens']} tokens, "
            f"{shown['taken_back']} taken back while typing. "
            f"First token {shown['relayed_ms']:.0f} ms after the end."
        ),
        timeline=_picture(_draw_timeline, [shown]),
        table=_table(turns),
    )
    path.write_text(page, encoding="utf-8")


def _cards(summary: dict[str, Any]) -> str:
    long = summary["long_turns"]
    cards = (
        (f"{summary['relayed']['ttft_ms']['p50']:.0f} ms", "to the first token, relayed (median)"),
        (f"{summary['whole']['ttft_ms']['p50']:.0f} ms", "sent whole (median)"),
        (
            f"{long['whole_p50'] / long['relayed_p50']:.1f} ×",
            f"faster on long turns ({long['relayed_p50']:.0f} against {long['whole_p50']:.0f} ms)",
        ),
        (str(summary["taken_back_tokens"]), "tokens taken back"),
    )
    return "".join(f'<div class="card"><b>{a}</b><span>{b}</span></div>' for a, b in cards)


def _picture(draw: Any, turns: Sequence[dict[str, Any]]) -> str:
    figure = Figure(figsize=(9.2, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, turns)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'


def _draw_ttft(axes: Axes, turns: Sequence[dict[str, Any]]) -> None:
    tokens = [turn["tokens"] for turn in turns]
    for key, colour, label in (
        ("whole_ms", WHOLE, "sent whole"),
        ("relayed_ms", RELAYED, "relayed"),
    ):
        axes.scatter(tokens, [t[key] for t in turns], s=26, color=colour, alpha=0.8, label=label)
    axes.set(xlabel="tokens of the turn", ylabel="ms to the first token", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def mqtt_bytes(payload: int, messages: int) -> int:
    """Return the bytes of `messages` QoS 1 publishes that carry `payload` bytes in all."""
    return payload + messages * (MQTT_OVERHEAD + TOPIC)


def _draw_bytes(axes: Axes, turns: Sequence[dict[str, Any]]) -> None:
    kinds = (
        ("JSON text, on every change", WHOLE, "json_resent_bytes", "json_updates"),
        ("token deltas", RELAYED, "relay_bytes", "relay_frames"),
        ("JSON text, once at the end", GREY, "json_once_bytes", None),
    )
    for row, (_, colour, size, count) in enumerate(kinds):
        values = [mqtt_bytes(t[size], t[count] if count else 1) for t in turns]
        mean = sum(values) / len(values)
        axes.barh(row, mean, color=colour, height=0.6)
        axes.text(mean, row, f"  {mean:,.0f}", va="center")
    axes.set_yticks(range(len(kinds)), [kind[0] for kind in kinds])
    axes.invert_yaxis()
    axes.set(xlabel="bytes per turn (mean)")
    axes.margins(x=0.12)


def _draw_timeline(axes: Axes, turns: Sequence[dict[str, Any]]) -> None:
    (turn,) = turns
    texts = [
        (at, *map(int, what.split("+"))) for at, kind, what in turn["timeline"] if kind == "text"
    ]
    at = [row[0] for row in texts] + [turn["ended"]]
    committed = [row[1] for row in texts] + [turn["tokens"]]
    all_ids = [row[1] + row[2] for row in texts] + [turn["tokens"]]
    axes.step(at, all_ids, where="post", color=GREY, label="tokens heard so far (tail included)")
    axes.step(at, committed, where="post", color=RELAYED, label="committed", linewidth=2)
    axes.axvline(turn["ended"], color=WHOLE, linestyle="--", linewidth=1.2, label="end of turn")
    replies = [row[0] for row in turn["timeline"] if row[1] == "reply"]
    axes.plot(replies, [turn["tokens"]] * len(replies), "|", color="#1d4ed8", ms=12, label="reply")
    axes.set(xlabel="seconds since the first key", ylabel="tokens", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)


def _table(turns: Sequence[dict[str, Any]]) -> str:
    head = "".join(
        f"<th{' class=n' if number else ''}>{name}</th>"
        for name, number in (
            ("vehicle", 0),
            ("the driver", 0),
            ("the reply", 0),
            ("tokens", 1),
            ("back", 1),
            ("relayed", 1),
            ("whole", 1),
        )
    )
    rows = "".join(
        f"<tr><td>{html.escape(t['device'])}<br>{t['link']}{', spoken' if t['spoken'] else ''}</td>"
        f"<td>{html.escape(t['text'])}</td><td class=reply>{html.escape(t['reply'])}"
        f"{' […]' if t['reason'] in ('cancelled', 'length') else ''}</td>"
        f"<td class=n>{t['tokens']}</td><td class=n>{t['taken_back']}</td>"
        f"<td class=n>{t['relayed_ms']:.1f} ms</td><td class=n>{t['whole_ms']:.1f} ms</td></tr>"
        for t in turns
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
