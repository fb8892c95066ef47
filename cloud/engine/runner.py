"""Runs a batch through the model: one flat batch of tokens, logits only where a token is drawn."""

import torch
import torch.nn.functional as nnf

from cloud.engine.cache import KVCache
from cloud.engine.kernels import Attention
from cloud.engine.model import Layer, Model
from cloud.engine.plan import Plan, plan_batch
from cloud.engine.scheduler import Batch
from shared.nn.llama import rotate


class Runner:
    """The model, its cache and the attention kernel."""

    def __init__(self, model: Model, cache: KVCache, attention: Attention) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        config = model.config
        self._heads = (config.heads, config.kv_heads, config.kv_heads)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits behind every chunk that samples, in order: (sampled chunks, vocabulary)."""
        model = self._model
        plan = plan_batch(batch, model.device)
        cos, sin = model.cos[plan.positions], model.sin[plan.positions]
        x = model.embedding[plan.tokens]  # (rows, hidden)
        for number, layer in enumerate(model.layers):
            x = x + self._attend(number, layer, self._norm(x, layer.attention_norm), plan, cos, sin)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(nnf.silu(gate) * up)
        if not len(plan.sampled):
            return x[:0]
        return model.head(self._norm(x[plan.sampled], model.norm))

    def _attend(
        self,
        number: int,
        layer: Layer,
        h: torch.Tensor,
        plan: Plan,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        heads = layer.qkv(h).unflatten(-1, (-1, self._model.config.head_dim))
        q, k, v = heads.split(self._heads, dim=1)  # (rows, heads, head_dim)
        self._cache.write(number, plan.slots, rotate(k, cos, sin), v)
        attended = self._attention(number, rotate(q, cos, sin), self._cache, plan)
        return layer.o(attended)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nnf.rms_norm(x, weight.shape, weight, self._model.config.norm_eps)
