"""Runs a batch through the model: one flat batch of tokens, logits only where a token is drawn."""

import torch

from cloud.engine.cache import KVCache
from cloud.engine.kernels import Kernels
from cloud.engine.model import Model
from cloud.engine.plan import plan_batch
from cloud.engine.scheduler import Batch


class Runner:
    """The model, its cache and the kernels."""

    def __init__(self, model: Model, cache: KVCache, kernels: Kernels) -> None:
        self._model, self._cache, self.kernels = model, cache, kernels

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits behind every chunk that samples: (sampled chunks, vocabulary)."""
        model, cache, kernels = self._model, self._cache, self.kernels
        heads, eps = model.config.heads, model.config.norm_eps
        plan = plan_batch(batch, model.cos, model.sin)
        x = model.embedding[plan.tokens]  # (rows, hidden)
        for number, layer in enumerate(model.layers):
            qkv = layer.qkv(kernels.norm(x, layer.attention_norm, eps))
            q = kernels.store(number, qkv, heads, cache, plan)
            x += layer.o(kernels.attend(number, q, cache, plan))
            x += layer.down(kernels.gate(layer.gate_up(kernels.norm(x, layer.mlp_norm, eps))))
        if not len(plan.sampled):
            return x[:0]
        return model.head(kernels.norm(x[plan.sampled], model.norm, eps))
