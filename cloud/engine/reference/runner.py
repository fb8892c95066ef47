"""Runs a batch through the model: one flat batch of tokens, logits only where a token is drawn."""

import torch

from cloud.engine.batch import Batch
from cloud.engine.cache import KVCache
from cloud.engine.reference.layer import attend, gate, norm, store
from cloud.engine.reference.model import Model
from cloud.engine.reference.plan import plan_batch


class ReferenceRunner:
    """The model and its cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits of all chunks' last `num_logits` rows: (rows, vocabulary)."""
        model, cache, config = self._model, self._cache, self._model.config
        eps = config.norm_eps
        plan = plan_batch(batch, model.cos, model.sin)
        x = model.embedding[plan.tokens]  # (rows, hidden)
        for number, layer in enumerate(model.layers):
            qkv = layer.qkv(norm(x, layer.attention_norm, eps))
            q = store(number, qkv, config.heads, config.kv_heads, cache, plan)
            x += layer.o(attend(number, q, cache, plan))
            x += layer.down(gate(layer.gate_up(norm(x, layer.mlp_norm, eps))))
        if not len(plan.sampled):
            return x[:0]
        return model.head(norm(x[plan.sampled], model.norm, eps))

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._cache.copy(source, target)
