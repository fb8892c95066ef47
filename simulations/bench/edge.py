"""What an agent costs a vehicle: time to connected, memory, processor while somebody types."""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared.child import open_decoder
from shared.commands import progress
from shared.errors import LinkError
from simulations.bench.tiny import write_tiny_llama

SENTENCEPIECE = Path(__file__).parents[3] / "shared/data/llama2-spm-vectors/tokenizer.model"
"""A real SentencePiece model of 32,000 pieces, beside the checkout if it is there at all."""
TYPING_SECONDS = 15.0


async def bench_edge(model: str, runs: int) -> dict[str, Any]:
    """Return the figures of an agent process; a vocabulary that is not there gives None."""
    progress("an agent with the model's own vocabulary")
    async with open_decoder(model) as decoder:
        await _probe(decoder.address, 0.0)  # fetches the tokenizer once
        starts = [
            (await _probe(decoder.address, 0.0))["start_ms"] for _ in range(max(3, runs // 3))
        ]
        progress(f"typing for {TYPING_SECONDS:g} s")
        typing = await _probe(decoder.address, TYPING_SECONDS)
    result: dict[str, Any] = {
        "start_ms": round(statistics.median(starts), 1),
        "rss_mb": {"bpe_49k": typing["rss_mb"], "spm_32k": None},
        "cpu_percent": typing["cpu_percent"],
        "imports_torch": typing["heavy"],
    }
    if SENTENCEPIECE.exists():
        progress("an agent with a SentencePiece vocabulary of 32,000")
        with tempfile.TemporaryDirectory(prefix="deltarelay-") as folder:
            write_tiny_llama(Path(folder), SENTENCEPIECE)
            async with open_decoder(folder, changes=["context=512"]) as decoder:
                await _probe(decoder.address, 0.0)
                probe = await _probe(decoder.address, 3.0)
                result["rss_mb"]["spm_32k"] = probe["rss_mb"]
    return result


async def _probe(address: str, seconds: float) -> dict[str, Any]:
    """Run an agent process that types for `seconds`; return what it says of itself."""
    program = [sys.executable, "-m", "simulations.bench.probe", address, str(seconds)]
    pipe = asyncio.subprocess.PIPE
    started = time.monotonic()
    child = await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=pipe)
    output, errors = await child.communicate()
    if child.returncode:
        raise LinkError(f"the agent process failed: {errors.decode(errors='replace')[-500:]}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    found["start_ms"] = (found["connected_at"] - started) * 1e3
    return found
