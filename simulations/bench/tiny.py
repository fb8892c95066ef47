"""A tiny random Llama with a given vocabulary, for what only needs the vocabulary."""

import json
import shutil
from pathlib import Path


def write_tiny_llama(folder: Path, tokenizer: Path) -> None:
    """Write a Hugging Face folder: 2 layers of 32, random, the vocabulary of `tokenizer`."""
    import torch
    from safetensors.torch import save_file
    from sentencepiece import SentencePieceProcessor

    vocabulary = SentencePieceProcessor(model_file=str(tokenizer)).vocab_size()
    hidden, inner, layers = 32, 64, 2
    torch.manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for n in range(layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{n}.{name}.weight"] = torch.randn(shape) * 0.1
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(tokenizer, folder / "tokenizer.model")
