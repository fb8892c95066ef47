"""The `exact` runner: append, decode, eviction and re-prefill give bit-identical logits.

float32, one sequence a call. Rows run in windows aligned to absolute position, 16 at a time, also
when only one of them is new; keys are padded to whole blocks. So a row is always computed at the
same place of a matrix product of the same shape, and depends neither on its neighbours nor on when
they were computed.
"""

import torch
import torch.nn.functional as nnf

from cloud.engine.cache import BLOCK, KVCache
from cloud.engine.model import Model
from cloud.engine.scheduler import Batch, Chunk
from shared.nn.llama import rotate


class ExactRunner:
    """Runs chunks one by one, window by window."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits behind every chunk that samples: (sampled chunks, vocabulary)."""
        rows = [row for chunk in batch.chunks if (row := self._run_chunk(chunk)) is not None]
        return torch.stack(rows) if rows else torch.empty(0, self._model.config.vocabulary)

    def _run_chunk(self, chunk: Chunk) -> torch.Tensor | None:
        end = chunk.start + chunk.count
        hidden = None
        for window in range(chunk.start // BLOCK, -(-end // BLOCK)):
            first = max(chunk.start, window * BLOCK)
            hidden = self._run_window(chunk, window, first, min(end, (window + 1) * BLOCK))
        if not chunk.sample or hidden is None:
            return None
        return self._model.head(hidden)[(end - 1) % BLOCK]

    def _run_window(self, chunk: Chunk, window: int, first: int, end: int) -> torch.Tensor:
        """Run ids `first..end` in the window's 16 rows; return the normed hidden rows."""
        model, config = self._model, self._model.config
        base = window * BLOCK
        new = slice(first - base, end - base)
        tokens = torch.zeros(BLOCK, dtype=torch.int64, device=model.device)
        tokens[new] = torch.tensor(chunk.sequence.ids[first:end], device=model.device)
        positions = torch.arange(base, base + BLOCK, device=model.device).clamp_max(
            len(model.cos) - 1
        )
        cos, sin = model.cos[positions], model.sin[positions]
        blocks = torch.tensor(chunk.sequence.blocks[: window + 1], device=model.device)
        seen = torch.arange((window + 1) * BLOCK, device=model.device) <= positions.unsqueeze(1)
        x = model.embedding[tokens]
        for number, layer in enumerate(model.layers):
            h = _norm(x, layer.attention_norm, config.norm_eps)
            heads = layer.qkv(h).view(BLOCK, -1, config.head_dim)
            q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            slots = blocks[-1] * BLOCK + torch.arange(new.start, new.stop, device=model.device)
            self._cache.write(number, slots, rotate(k, cos, sin)[new], v[new])
            attended = self._attend(number, rotate(q, cos, sin), blocks, seen)
            x = x + layer.o(attended)
            gate, up = layer.gate_up(_norm(x, layer.mlp_norm, config.norm_eps)).chunk(2, dim=-1)
            x = x + layer.down(nnf.silu(gate) * up)
        return _norm(x, model.norm, config.norm_eps)

    def _attend(
        self, layer: int, q: torch.Tensor, blocks: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        config = self._model.config
        group = config.heads // config.kv_heads
        keys = self._cache.keys[layer][blocks].flatten(0, 1)  # (keys, kv_heads, head_dim)
        values = self._cache.values[layer][blocks].flatten(0, 1)
        q = q.reshape(BLOCK, config.kv_heads, group, -1).permute(
            1, 2, 0, 3
        )  # (kv, group, rows, dim)
        scores = q @ keys.permute(1, 2, 0).unsqueeze(1) * config.head_dim**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended: torch.Tensor = weights @ values.transpose(0, 1).unsqueeze(1)
        return attended.permute(2, 0, 1, 3).flatten(1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return nnf.rms_norm(x, weight.shape, weight, eps)
