"""A model read from GGUF and from a Hugging Face folder is the same model, and the right one."""

import json
import mmap
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from shared.digest import sha256_file
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from shared.nn.llama import forward
from shared.tokenizer import Tokenizer, decode, load_tokenizer
from tests.small_llama import LLAMA3, random_llama, write_folder, write_gguf
from tests.vocabularies import data, smollm2

TOKENS = torch.arange(5, 65)


def dense(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: weight.dense() for name, weight in checkpoint.weights.items()}


def logits(checkpoint: Checkpoint, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        return forward(checkpoint.config, dense(checkpoint), tokens)


def check_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.weights.keys() == b.weights.keys()
    assert (a.tokenizer, a.template, a.stop_ids) == (b.tokenizer, b.template, b.stop_ids)
    torch.testing.assert_close(logits(a), logits(b), rtol=1e-5, atol=1e-5)


LINEAR = {"rope_type": "linear", "factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "with bias": {"bias": True},
    "linear scaling": {"rope": LINEAR},
    "llama3 scaling": {"rope": LLAMA3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_and_a_gguf_of_one_model_give_the_same_logits(
    variant: str, tmp_path: Path
) -> None:
    model = random_llama(**VARIANTS[variant])
    folder = load_checkpoint(write_folder(tmp_path / "hf", model))
    check_same(folder, load_checkpoint(write_gguf(tmp_path / "m.gguf", model)))
    assert ("head" in folder.weights) == (variant == "untied")


def test_no_variant_gives_the_logits_of_another(tmp_path: Path) -> None:
    seen = [
        logits(load_checkpoint(write_gguf(tmp_path / f"{i}.gguf", random_llama(**VARIANTS[name]))))
        for i, name in enumerate(VARIANTS)
    ]
    for i, a in enumerate(seen):
        assert all((a - b).abs().max() > 1e-3 for b in seen[i + 1 :])


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_0, Kind.Q8_0, Kind.F16, Kind.BF16])
def test_a_quantized_gguf_is_the_model_its_blocks_stand_for(kind: Kind, tmp_path: Path) -> None:
    model = random_llama(tied=False, bias=True)
    folder = load_checkpoint(write_folder(tmp_path / "hf", model.quantized(kind)))
    quantized = load_checkpoint(write_gguf(tmp_path / "m.gguf", model, kind=kind))
    check_same(folder, quantized)
    assert quantized.weights["layers.0.q"].kind == kind.name
    assert quantized.weights["layers.0.q.bias"].kind == "F32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_of_sixteen_bit_values_keeps_them_as_they_are(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = random_llama(bias=True)
    folder = load_checkpoint(write_folder(tmp_path / "hf", model, dtype=dtype))
    for name in ("layers.1.down", "layers.1.q.bias", "norm"):
        part, _, bias = name.removeprefix("layers.1.").partition(".")
        theirs = {"down": "layers.1.mlp.down_proj", "q": "layers.1.self_attn.q_proj"}.get(
            part, part
        )
        expected = torch.from_numpy(model.weights[f"model.{theirs}.{bias or 'weight'}"]).to(dtype)
        weight = folder.weights[name]
        assert weight.data.nbytes == 2 * expected.numel()
        assert torch.equal(weight.dense(), expected.float())


def test_weights_stay_in_the_mapped_file_until_someone_needs_them(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", random_llama(), kind=Kind.Q4_1))
    for name in ("embedding", "layers.0.v", "layers.1.down", "norm"):
        owner: Any = checkpoint.weights[name].data
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner.obj if isinstance(owner, memoryview) else owner, mmap.mmap)
    values = checkpoint.weights["norm"].dense()
    values += 1
    assert not torch.equal(values, checkpoint.weights["norm"].dense())


def test_a_checkpoint_is_named_by_the_content_of_its_files(tmp_path: Path) -> None:
    model = random_llama()
    path = write_gguf(tmp_path / "m.gguf", model)
    assert load_checkpoint(path).digest == sha256_file(path)
    folder = load_checkpoint(write_folder(tmp_path / "hf", model)).digest
    assert (
        load_checkpoint(write_folder(tmp_path / "hf", model.quantized(Kind.Q8_0))).digest != folder
    )


def test_a_folder_says_more_stops_and_its_template_in_several_places(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", random_llama(), eos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_checkpoint(folder).stop_ids == {0, 2}
    assert load_checkpoint(folder).template == "d"
    (folder / "chat_template.jinja").write_text("own file")
    assert load_checkpoint(folder).template == "own file"


# --- real models


def greedy(checkpoint: Checkpoint, ids: Sequence[int], until: str) -> str:
    weights, tokenizer = dense(checkpoint), load_tokenizer(checkpoint.tokenizer)
    tokens, text = list(ids), ""
    while len(text) < len(until):
        with torch.inference_mode():
            last = forward(checkpoint.config, weights, torch.tensor(tokens))[-1]
        tokens.append(int(last.argmax()))
        text = decode(tokenizer, tokens[1:])  # without BOS
    return text


def test_stories260k_tells_its_story() -> None:
    found = re.search(r'after "(.+?)": "(.+?)"', data("README.md").read_text())
    assert found is not None
    checkpoint = load_checkpoint(data("stories260K", "stories260K.gguf"))
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    ids = [tokenizer.header.bos, *tokenizer.encode(found[1])]
    assert tokenizer.header.add_bos
    assert greedy(checkpoint, ids, found[1] + found[2]) == found[1] + found[2]


@cache
def oracle() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        data("smollm2-reference", "kvret_dev_40.json").read_text()
    )
    return rows


@pytest.fixture(scope="module")
def model() -> tuple[Checkpoint, Tokenizer, Mapping[str, torch.Tensor]]:
    oracle()
    checkpoint = load_checkpoint(smollm2())
    return checkpoint, load_tokenizer(checkpoint.tokenizer), dense(checkpoint)


Model = tuple[Checkpoint, Tokenizer, Mapping[str, torch.Tensor]]


def test_smollm2_has_the_ids_of_all_forty_prompts(model: Model) -> None:
    _, tokenizer, _ = model
    controls = tokenizer.controls()
    strings = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
    for row in oracle():
        ids: list[int] = []
        for part in strings.split(row["prompt"]):
            ids += [controls[part]] if part in controls else tokenizer.encode(part)
        assert ids == row["prompt_ids"]


def check_first_token(model: Model, row: Mapping[str, Any]) -> None:
    checkpoint, _, weights = model
    with torch.inference_mode():
        last = forward(checkpoint.config, weights, torch.tensor(row["prompt_ids"]))[-1]
    ours = last.log_softmax(-1)
    for token, expected in row["top5"]:
        assert abs(float(ours[token]) - expected) < 0.01, (row["user"], token)
    assert ours.topk(5).indices.tolist() == [token for token, _ in row["top5"]]


@pytest.mark.parametrize("index", [0, 13, 39])
def test_smollm2_gives_the_oracles_first_token_probabilities(model: Model, index: int) -> None:
    check_first_token(model, oracle()[index])


@pytest.mark.slow
def test_smollm2_gives_the_oracles_first_token_probabilities_for_all_prompts(model: Model) -> None:
    assert len(oracle()) == 40
    for row in oracle():
        check_first_token(model, row)
