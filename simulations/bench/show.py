"""Figures for people."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console


def show(result: Mapping[str, Any], indent: int = 0) -> None:
    """Print nested figures, a line each."""
    console = Console()
    for name, value in result.items():
        pad = "  " * indent
        if isinstance(value, Mapping):
            console.print(f"{pad}[bold]{name}[/bold]")
            show(value, indent + 1)
        else:
            console.print(f"{pad}{name}: {value}")


def spread(
    values: Sequence[float],
    scale: float = 1.0,
    method: Literal["inclusive", "exclusive"] = "inclusive",
) -> dict[str, float]:
    """Return median and 99th percentile of `values` times `scale`.

    Args:
        method: the rule of `statistics.quantiles`.
    """
    if len(values) < 2:
        return {"p50": float("nan"), "p99": float("nan")}
    return {
        "p50": round(statistics.median(values) * scale, 3),
        "p99": round(statistics.quantiles(values, n=100, method=method)[98] * scale, 3),
    }
