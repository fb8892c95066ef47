"""Runs a batch through the model: one flat batch of tokens, logits only where a token is drawn."""

import torch

from cloud.engine.batch import Batch
from cloud.engine.cache import KVCache
from cloud.engine.reference.layer import attend, gate, norm, store
from cloud.engine.reference.lora import TorchAdapter, adapted_rows, add_adapters, load_adapter
from cloud.engine.reference.model import Model
from cloud.engine.reference.plan import plan_batch
from shared.adapter import Adapter


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
        adapted = adapted_rows(batch, model.cos.device)
        x = model.embedding[plan.tokens]  # (rows, hidden)
        for number, layer in enumerate(model.layers):
            h = norm(x, layer.attention_norm, eps)
            qkv = add_adapters(layer.qkv(h), h, adapted, number, "qkv")
            q = store(number, qkv, config.heads, config.kv_heads, cache, plan)
            h = attend(number, q, cache, plan)
            x += add_adapters(layer.o(h), h, adapted, number, "o")
            h = norm(x, layer.mlp_norm, eps)
            h = gate(add_adapters(layer.gate_up(h), h, adapted, number, "gate_up"))
            x += add_adapters(layer.down(h), h, adapted, number, "down")
        if not len(plan.sampled):
            return x[:0]
        return model.head(norm(x[plan.sampled], model.norm, eps))

    def load_adapter(self, adapter: Adapter) -> TorchAdapter:
        """Put an adapter that fits the model on the model's device; any thread may do this."""
        return load_adapter(adapter, self._model.config, self._model.cos.device)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of a block."""
        self._cache.copy(source, target)
