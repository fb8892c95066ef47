"""Small decoders for tests: a random Llama with a ChatML template, loaded as a service does."""

import json
from pathlib import Path
from typing import Any

from cloud.decoder import Brain, load_brain
from cloud.settings import DecoderSettings
from tests.small_llama import SmallLlama, random_llama, write_folder

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 512


def write_model(
    folder: Path, *, template: str = CHATML, model: SmallLlama | None = None, **changes: Any
) -> Path:
    """Write a small model with a chat template; `changes` go into its config.json."""
    write_folder(folder, model or random_llama(), max_position_embeddings=CONTEXT, **changes)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def small_settings(folder: Path, **changes: Any) -> DecoderSettings:
    """Return settings that serve the small model."""
    defaults: dict[str, Any] = {"context": CONTEXT, "cache_mb": 8, "threads": 1}
    return DecoderSettings(model=str(folder), **(defaults | changes))


def small_brain(folder: Path, **changes: Any) -> Brain:
    """Return the small model, loaded."""
    return load_brain(small_settings(folder, **changes))
