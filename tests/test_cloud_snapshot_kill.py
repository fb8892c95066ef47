"""A decoder process that is killed with SIGKILL, started again, and judged by its counters."""

import asyncio
import json
from pathlib import Path

import pytest

from simulations.bench.recover import measure_recovery
from tests.brains import write_model


@pytest.mark.parametrize("sessions", [8])
def test_after_sigkill_all_sessions_answer_and_95_percent_of_tokens_are_not_run_again(
    tmp_path: Path, sessions: int
) -> None:
    model = write_model(tmp_path / "model")
    result = asyncio.run(
        measure_recovery(str(model), sessions, 400, ["context=512", "threads=1", "cache_mb=8"])
    )
    assert result["sessions"] == sessions
    assert result["restored_share"] >= 0.95
    assert result["bytes_ratio"] <= 1.3
    assert json.dumps(result)
