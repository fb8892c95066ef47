"""Reads a model: GGUF file or Hugging Face folder → configuration, weights, vocabulary, template.

Weights keep the form they are stored in, so that quantized blocks can be repacked without loss.
Query and key rows come out in Hugging Face's rotary order (halves), whatever the file's order is.
"""

from pathlib import Path

from shared.errors import ModelError
from shared.nn.gguf_model import read_gguf
from shared.nn.hf_folder import read_folder
from shared.nn.llama import LlamaConfig
from shared.nn.weights import Checkpoint, Weight
from shared.tokenizer import load_tokenizer

__all__ = ["Checkpoint", "Weight", "load_checkpoint"]

_MAX_CONTEXT = 2**24


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a GGUF file or a Hugging Face folder of the Llama architecture.

    Raises:
        ModelError: it is missing, truncated, damaged or of another architecture; the message says
            which file, what is wrong and what to do.
    """
    if not path.exists():
        raise ModelError(
            f"{path}: no such model file or folder; `deltarelay models list` shows names"
        )
    try:
        checkpoint = read_folder(path) if path.is_dir() else read_gguf(path)
        _check_config(checkpoint.config, len(checkpoint.weights))
        _check_weights(checkpoint)
        _check_vocabulary(checkpoint)
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from None
    except Exception as error:  # whatever a damaged file makes the libraries stumble over
        raise ModelError(
            f"{path}: truncated or damaged, download it again: {type(error).__name__}: {error}"
        ) from error
    return checkpoint


def _check_config(config: LlamaConfig, num_weights: int) -> None:
    """Check what sizes must be before anything is made of them."""
    sizes = (config.vocabulary, config.hidden, config.heads, config.kv_heads, config.intermediate)
    if min(*sizes, config.layers, config.head_dim) < 1 or config.layers > num_weights:
        raise ModelError(f"sizes do not fit together ({num_weights} weights): {config}")
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{config.heads} heads cannot share {config.kv_heads} key heads, "
            f"or {config.head_dim} values a head do not form pairs"
        )
    if not 1 <= config.context <= _MAX_CONTEXT:
        raise ModelError(f"context of {config.context} tokens; supported are 1 to {_MAX_CONTEXT}")
    if not (0 < config.norm_eps < 1 and 0 < config.rope_theta < 1e12):
        raise ModelError(f"norm_eps {config.norm_eps} or rope_theta {config.rope_theta} is absurd")


def _check_weights(checkpoint: Checkpoint) -> None:
    """Check that every weight is there, nothing else is, and each has the shape it must have."""
    expected = checkpoint.config.shapes()
    for name in expected:
        if name not in checkpoint.weights:
            raise ModelError(f"weight {name!r} is missing; is the download complete?")
    expected["head"] = expected["embedding"]
    linear = [name for name in expected if name.startswith("layers.") and "_norm" not in name]
    expected |= {f"{name}.bias": expected[name][:1] for name in linear}
    for name, weight in checkpoint.weights.items():
        shape = expected.get(name)
        if shape is None:
            raise ModelError(f"weight {name!r} is none of a Llama of {checkpoint.config}")
        if weight.shape != shape:
            raise ModelError(
                f"weight {name!r} has shape {weight.shape}, its configuration asks for {shape}; "
                "file and configuration are of different models"
            )


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    """Check that the vocabulary loads and its ids are rows of the embedding."""
    header, rows = load_tokenizer(checkpoint.tokenizer).header, checkpoint.config.vocabulary
    if header.vocabulary > rows:
        raise ModelError(
            f"the vocabulary has {header.vocabulary} tokens, the embedding {rows} rows; "
            "they are of different models"
        )
    if not all(0 <= token < rows for token in checkpoint.stop_ids):
        raise ModelError(f"stop ids {sorted(checkpoint.stop_ids)} lie outside of {rows} tokens")
