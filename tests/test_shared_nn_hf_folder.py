"""A Hugging Face folder that is damaged, incomplete or of another kind is one error with a path."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelError
from shared.nn.checkpoint import load_checkpoint
from tests.small_llama import SmallLlama, random_llama, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", random_llama(tied=False))


def check_refused(folder: Path, message: str = ".") -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)


def change_tensors(folder: Path, *drop: str, **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if name not in drop}
    save_file(tensors | add, path)


def test_a_model_that_is_not_there_says_how_to_find_names(tmp_path: Path) -> None:
    check_refused(tmp_path / "none", "no such model file or folder; `deltarelay models list`")


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "mamba"}, r"config\.json: model_type 'mamba'; supported are"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
    "a sliding window": ({"use_sliding_window": True}, "use_sliding_window"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "unknown scaling": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rope scaling 'yarn' is unknown; supported are linear and llama3",
    ),
    "an old name of scaling": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope scaling 'dynamic' is unknown",
    ),
    "half a scaling": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq"),
    "no sizes": ({"hidden_size": None}, "damaged"),
    "other sizes": ({"hidden_size": 128}, "has shape"),
    "another vocabulary": ({"vocab_size": 9}, "has shape"),
    "many layers": ({"num_hidden_layers": 10**12}, "do not fit together"),
    "negative sizes": ({"num_hidden_layers": -1}, "do not fit together"),
    "odd heads": ({"num_key_value_heads": 3}, "cannot share 3 key heads"),
    "stops of another model": ({"eos_token_id": [2, 70_000]}, r"stop ids \[2, 70000\] lie outside"),
    "no epsilon": ({"rms_norm_eps": 0}, "norm_eps 0.0"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_configuration_that_is_not_supported_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = SETTINGS[case]
    check_refused(write_folder(tmp_path / "model", random_llama(), **changes), message)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 5000, "\x00", '{"model_type": 7}', "null"]
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_json_file_is_refused(file: str, content: str, folder: Path) -> None:
    (folder / file).write_text(content)
    if (file, content) != ("tokenizer_config.json", '{"model_type": 7}'):
        check_refused(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "expected a Hugging Face model folder"),
        ("model.safetensors", r"no \*\.safetensors file is there"),
        ("tokenizer.json", r"neither tokenizer\.json nor tokenizer\.model"),
    ],
)
def test_a_missing_file_is_named(file: str, message: str, folder: Path) -> None:
    (folder / file).unlink()
    check_refused(folder, message)


def test_an_untied_model_without_its_head_is_refused(folder: Path) -> None:
    change_tensors(folder, "lm_head.weight")
    check_refused(folder, r"lm_head\.weight is missing and config\.json does not tie it")


def test_an_embedding_with_fewer_rows_than_tokens_is_refused(tmp_path: Path) -> None:
    model = random_llama()
    name = "model.embed_tokens.weight"
    fewer = SmallLlama(model.weights | {name: model.weights[name][:100]})
    folder = write_folder(tmp_path / "model", fewer, vocab_size=100)
    check_refused(folder, r"the vocabulary has \d+ tokens, the embedding 100 rows")


def test_a_missing_weight_is_named(folder: Path) -> None:
    change_tensors(folder, "model.layers.1.mlp.up_proj.weight")
    check_refused(folder, r"'layers\.1\.up' is missing; is the download complete")


def test_a_tensor_of_another_architecture_or_type_is_named(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.0.router.weight": torch.ones(2)})
    check_refused(folder, r"'model\.layers\.0\.router\.weight' does not belong")
    change_tensors(folder, "model.layers.0.router.weight")
    change_tensors(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    check_refused(folder, r"'model\.norm\.weight' is torch\.int8; supported are float32")


def test_what_old_files_store_of_rotary_angles_is_left_out(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert "layers.0.q" in load_checkpoint(folder).weights


def test_truncated_or_damaged_weights_are_refused_or_harmless(folder: Path) -> None:
    path, rng = folder / "model.safetensors", Random(9)
    whole = path.read_bytes()
    for end in [*range(0, 64, 7), *range(64, len(whole), len(whole) // 40)]:
        path.write_bytes(whole[:end])
        check_refused(folder, "damaged")
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            load_checkpoint(folder)
        except ModelError as error:
            assert str(folder) in str(error)  # noqa: PT017 - a harmless flip raises nothing
