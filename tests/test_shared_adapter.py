"""PEFT folders: what is read is what PEFT means by them; whatever else is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shared.adapter import Adapter, LoraPair
from shared.errors import ModelError
from shared.nn.llama import LlamaConfig
from shared.peft_folder import CONFIG, TENSORS, read_adapter, write_adapter
from tests.small_adapters import SHAPES, adapter_folder, edit_config, random_adapter
from tests.small_llama import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def small_config(layers: int = 2, hidden: int = HIDDEN) -> LlamaConfig:
    return LlamaConfig(500, hidden, layers, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, 128, 1e-5, 1e4)


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def same(one: Adapter, other: Adapter) -> bool:
    return one.pairs.keys() == other.pairs.keys() and all(
        np.array_equal(pair.a, other.pairs[name].a)
        and np.array_equal(pair.b, other.pairs[name].b)
        and pair.scale == other.pairs[name].scale
        for name, pair in one.pairs.items()
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_an_adapter_that_is_written_reads_the_same(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = data.draw(st.lists(st.sampled_from(list(SHAPES)), min_size=1, unique=True))
    ranks = st.sampled_from((1, 3, 8, 20))
    pairs: dict[str, LoraPair] = {}
    for layer in data.draw(st.lists(st.integers(0, 1), min_size=1, unique=True)):
        scale = float(np.float32(data.draw(st.sampled_from((2.0, 0.5, 16 / 3, -0.7)))))
        made = random_adapter(seed, rank=data.draw(ranks), parts=parts, layers=[layer], scale=scale)
        pairs |= made.pairs
    adapter, folder = Adapter(pairs), tmp_path_factory.mktemp("adapter")
    write_adapter(folder, adapter, "a model")
    again = read_adapter(folder)
    assert same(adapter, again)
    assert adapter.digest == again.digest
    again.check_fits(small_config().shapes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_stored_in_sixteen_bits_are_widened_as_they_are(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    adapter_folder(tmp_path, 1)
    stored = {key: value.to(dtype) for key, value in load_file(tmp_path / TENSORS).items()}
    save_file(stored, tmp_path / TENSORS)
    pair = read_adapter(tmp_path).pairs["layers.0.q"]
    np.testing.assert_array_equal(pair.a, stored[f"{PREFIX}.lora_A.weight"].float().numpy())
    np.testing.assert_array_equal(pair.b, stored[f"{PREFIX}.lora_B.weight"].float().numpy())


@pytest.mark.parametrize(
    ("changes", "q", "down"),
    [
        ({"lora_alpha": 8}, 2.0, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0, 4.0),
        ({"alpha_pattern": {"q_proj": 6}, "lora_alpha": 8}, 1.5, 2.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 6}, "lora_alpha": 8}, 1.5, 2.0),
        ({"alpha_pattern": {r"layers\.\d+\.mlp\..*": 6}, "lora_alpha": 8}, 2.0, 1.5),
        ({"alpha_pattern": {"proj": 6}, "lora_alpha": 8}, 2.0, 2.0),  # not a whole name
        ({"rank_pattern": {"q_proj": 4}, "r": 4, "lora_alpha": -4}, -1.0, -1.0),
    ],
)
def test_the_scale_is_alpha_by_rank_as_peft_has_it(
    tmp_path: Path, changes: dict[str, Any], q: float, down: float
) -> None:
    adapter_folder(tmp_path, 1, rank=4)
    edit_config(tmp_path, **changes)
    pairs = read_adapter(tmp_path).pairs
    assert (pairs["layers.0.q"].scale, pairs["layers.0.down"].scale) == (q, down)


@pytest.mark.parametrize(
    "targets", ["all-linear", ".*proj", None, ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]]
)
def test_target_modules_may_be_written_in_each_of_pefts_ways(
    tmp_path: Path, targets: object
) -> None:
    def only_two(tensors: Tensors) -> None:
        for key in list(tensors):
            if "q_proj" not in key and "layers.1.mlp.up_proj" not in key:
                del tensors[key]

    adapter_folder(tmp_path, 1)
    edit_tensors(tmp_path, only_two)
    edit_config(tmp_path, target_modules=targets)
    names = sorted(read_adapter(tmp_path).pairs)
    assert names == ["layers.0.q", "layers.1.q", "layers.1.up"]


def test_tensors_of_a_model_without_a_head_are_found(tmp_path: Path) -> None:
    adapter_folder(tmp_path, 1)
    before = read_adapter(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    short = {key.replace("model.model.model", "model.model"): v for key, v in tensors.items()}
    save_file(short, tmp_path / TENSORS)
    edit_config(tmp_path, task_type="FEATURE_EXTRACTION")
    assert read_adapter(tmp_path).digest == before.digest
    save_file(short | {k: v.clone() for k, v in tensors.items()}, tmp_path / TENSORS)
    with pytest.raises(ModelError, match="twice"):
        read_adapter(tmp_path)


def test_digests_are_of_what_changes_a_result_and_of_nothing_else(tmp_path: Path) -> None:
    digest = read_adapter(adapter_folder(tmp_path, 1)).digest
    edit_config(tmp_path, base_model_name_or_path="renamed", inference_mode=False, lora_dropout=0.1)
    assert read_adapter(tmp_path).digest == digest
    edit_config(tmp_path, lora_alpha=3)
    scaled = read_adapter(tmp_path).digest
    other = read_adapter(adapter_folder(tmp_path, 2)).digest
    edit_tensors(adapter_folder(tmp_path, 1), lambda t: t[f"{PREFIX}.lora_B.weight"][3, 1].add_(1))
    touched = read_adapter(tmp_path).digest
    fewer = random_adapter(1, layers=[0]).digest
    assert len({digest, scaled, other, touched, fewer}) == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3'; supported is 'LORA'"),
        ({"bias": "lora_only"}, r"bias = 'lora_only'; supported is 'none'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"lora_alpha": 0}, "alpha is 0"),
        ({"lora_alpha": 1e300}, "alpha is 1e"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha is 0"),
        ({"rank_pattern": {"q_proj": 0}}, "rank is 0"),
        ({"rank_pattern": {"q_proj": 7}}, r"q_proj.lora_A.weight has shape \(4, 64\).*rank 7"),
        ({"rank_pattern": {"(": 7}}, r"pattern '\('"),
        ({"rank_pattern": {r"(\w+\.?)+Z": 7}}, "for each module instead of groups"),
        ({"rank_pattern": {"q|v": 7}}, "for each module instead of groups"),
        ({"alpha_pattern": {".*.*.*Z": 7}}, "at most 2 of"),
        ({"alpha_pattern": {"a{99999999999}": 7}}, "for each module instead of groups"),
        ({"alpha_pattern": {"(?i)x": 7}}, "for each module instead of groups"),
        ({"alpha_pattern": {"[[a]": 7}}, "for each module instead of groups"),
        ({"alpha_pattern": {"[z-a]": 7}}, "bad character range"),
        ({"alpha_pattern": {"x" * 257: 7}}, "up to 256 characters"),
        ({"alpha_pattern": {f"a*{n}": 7 for n in range(17)}}, "17 patterns have"),
        ({"r": 8}, r"has shape \(4, [0-9]+\); adapter_config.json says rank 8"),
        ({"target_modules": ["q_proj"]}, "none of the target_modules"),
        ({"target_modules": [*(f"{p}_proj" for p in SHAPES), "lm_head"]}, "'lm_head'"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    adapter_folder(tmp_path, 1)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=said) as caught:
        read_adapter(tmp_path)
    assert str(tmp_path) in str(caught.value)


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda t: t.__setitem__(f"{PREFIX}.{new}", t.pop(f"{PREFIX}.{old}"))


def put(value: torch.Tensor, side: str = "A") -> Callable[[Tensors], object]:
    return lambda t: t.__setitem__(f"{PREFIX}.lora_{side}.weight", value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rename("lora_A.weight", "lora_magnitude_vector"), "lora_magnitude_vector'; expected"),
        (lambda t: t.pop(f"{PREFIX}.lora_B.weight"), r"q_proj.lora_B.weight is missing"),
        (lambda t: t.pop(f"{PREFIX}.lora_A.weight"), r"q_proj.lora_A.weight is missing"),
        (put(torch.zeros(4)), r"has shape \(4,\)"),
        (put(torch.zeros(64, 5), "B"), r"has shape \(64, 5\).*expected \(out, 4\)"),
        (put(torch.full((4, 64), float("nan"))), "not finite"),
        (put(torch.full((64, 4), float("inf")), "B"), "not finite"),
        (put(torch.zeros(4, 64, dtype=torch.float64)), "is F64; supported are F32, F16, BF16"),
        (lambda t: t.clear(), "no tensor"),
        (
            lambda t: t.__setitem__("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)),
            "lm_head.lora_A.weight'; expected",
        ),
    ],
)
def test_tensors_that_are_not_plain_lora_are_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], object], said: str
) -> None:
    edit_tensors(adapter_folder(tmp_path, 1), change)
    with pytest.raises(ModelError, match=said) as caught:
        read_adapter(tmp_path)
    assert str(tmp_path / TENSORS) in str(caught.value)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=CONFIG):
        read_adapter(tmp_path / "nowhere")
    adapter_folder(tmp_path, 1)
    whole = (tmp_path / TENSORS).read_bytes()
    for size in (0, 4, 200, len(whole) - 1):
        (tmp_path / TENSORS).write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged or truncated"):
            read_adapter(tmp_path)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(ModelError, match="safe_serialization"):
        read_adapter(tmp_path)
    deep = b'{"x":' + b"[" * 99_999
    for text in (b"[]", b"{", b"\xff", deep, json.dumps({"peft_type": "LORA"}).encode()):
        (tmp_path / CONFIG).write_bytes(text)
        with pytest.raises(ModelError, match=CONFIG):
            read_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused_by_layer_or_shape() -> None:
    adapter = random_adapter(1)
    adapter.check_fits(small_config().shapes())
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj .*layers 0\.\.0"):
        adapter.check_fits(small_config(layers=1).shapes())
    with pytest.raises(ModelError, match=r"\(64, 64\); the model's weight is \(64, 96\)"):
        adapter.check_fits(small_config(hidden=96).shapes())
