"""A model file that is damaged, hostile or of another kind is one error, with its path, at once."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from shared.errors import ModelError
from shared.nn.checkpoint import Checkpoint, load_checkpoint
from shared.nn.gguf_file import read_gguf_file
from tests.small_llama import LLAMA3, SmallLlama, random_llama, write_gguf
from tests.vocabularies import data, smollm2

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, random_llama(), kind=Kind.Q4_1).read_bytes()


def header_length(content: bytes) -> int:
    """The first tensor's bytes begin right behind the header."""
    first = random_llama().weights["model.embed_tokens.weight"]
    return content.index(gguf.quantize(first, Kind.Q4_1).tobytes()[:64])


def check_refused(path: Path, message: str = ".") -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


def load_or_refuse(path: Path) -> Checkpoint | None:
    try:
        return load_checkpoint(path)
    except ModelError as error:
        if str(path) not in str(error):
            raise AssertionError(f"no path in {error}") from error
        return None


# --- our reader is gguf's


@pytest.mark.parametrize(
    "kind", ["small", "stories260k", pytest.param("smollm2", marks=pytest.mark.slow)]
)
def test_the_reader_finds_what_ggufs_own_reader_finds(kind: str, tmp_path: Path) -> None:
    if kind == "small":
        path = write_gguf(tmp_path / "m.gguf", random_llama(bias=True), kind=Kind.Q8_0)
    else:
        path = smollm2() if kind == "smollm2" else data("stories260K", "stories260K.gguf")
    ours, theirs = read_gguf_file(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if name[:5] != "GGUF."}
    assert ours.metadata == {name: field.contents() for name, field in fields.items()}
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (tensor.tensor_type.name, tuple(tensor.shape[::-1]))
        assert mine.data.dtype == tensor.data.dtype
        assert np.array_equal(mine.data, tensor.data)


# --- damaged GGUF files


def test_a_file_that_ends_early_is_refused_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    path, start = tmp_path / "m.gguf", header_length(whole)
    ends = {*range(64), *range(64, start, 97), start, *range(start, len(whole) - 64, 3001)}
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        check_refused(path, "download it again|not a GGUF file")


def test_flipped_bits_in_the_header_are_refused_or_harmless(whole: bytes, tmp_path: Path) -> None:
    path, start, rng = tmp_path / "m.gguf", header_length(whole), Random(5)
    refused = 0
    tracemalloc.start()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 4))):
            damaged[rng.randrange(start)] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        tracemalloc.reset_peak()
        refused += load_or_refuse(path) is None
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    assert refused > 50


def test_flipped_bits_near_counts_and_sizes_are_refused_or_harmless(
    whole: bytes, tmp_path: Path
) -> None:
    """All of the first bytes, one by one, and all around the sizes of the model."""
    path = tmp_path / "m.gguf"
    near = [whole.index(name) + len(name) for name in (b"block_count", b"head_count", b"length")]
    places = {
        *range(24),
        *(at + i for at in near for i in range(8)),
        whole.index(b"token_embd") - 8,
    }
    for place in sorted(places):
        for bit in (1, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            load_or_refuse(path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def file_of(*keys: bytes, num_keys: int | None = None, num_tensors: int = 0) -> bytes:
    count = len(keys) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(keys)


def key(kind: int, value: bytes) -> bytes:
    return text(b"a.key") + struct.pack("<I", kind) + value


def entry(
    dimensions: int, *shape: int, kind: int = 0, offset: int = 0, name: bytes = b"token_embd.weight"
) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", dimensions, *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 2**62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "zeros": (bytes(4096), "not a GGUF file"),
    "other bytes": (b"PK\x03\x04" + bytes(99), "not a GGUF file"),
    "only the magic": (b"GGUF", "ends at byte 4"),
    "an old version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; supported"),
    "many keys": (file_of(num_keys=2**64 - 1), "more bytes from 24 on"),
    "many tensors": (file_of(num_tensors=HUGE), "more bytes from 16 on"),
    "a long string": (file_of(key(STRING, struct.pack("<Q", HUGE))), "more bytes"),
    "a long list": (file_of(key(ARRAY, struct.pack("<IQ", UINT8, HUGE))), "more bytes"),
    "a long list of texts": (file_of(key(ARRAY, struct.pack("<IQ", STRING, HUGE))), "more bytes"),
    "more items than any vocabulary": (
        file_of(key(ARRAY, struct.pack("<IQ", UINT8, 2**21) + bytes(2**21))),
        "has 2097152 items, over 1048576",
    ),
    "lists in lists": (file_of(key(ARRAY, struct.pack("<IQ", ARRAY, 1))), "unknown type 9"),
    "an unknown type": (file_of(key(77, bytes(8))), "unknown type 77"),
    "a key twice": (file_of(key(UINT8, b"1"), key(UINT8, b"1")), "'a.key' is there twice"),
    "no text": (file_of(key(STRING, text(b"\xff\xfe"))), "UnicodeDecodeError"),
    "zero dimensions": (file_of(entry(0), num_keys=0, num_tensors=1), "has 0 dimensions"),
    "many dimensions": (file_of(entry(2**31), num_keys=0, num_tensors=1), "dimensions"),
    "an unknown tensor type": (
        file_of(entry(1, 4, kind=999), num_keys=0, num_tensors=1),
        "999 is not a valid",
    ),
    "rows that take no bytes": (
        file_of(entry(2, 0, 2**30), num_keys=0, num_tensors=1),
        "it is empty",
    ),
    "sizes that overflow": (
        file_of(entry(2, 2**63, 2**63), num_keys=0, num_tensors=1),
        "but tensor 'token_embd.weight' takes bytes",
    ),
    "an offset past the end": (
        file_of(entry(1, 4, offset=2**60), num_keys=0, num_tensors=1),
        "but tensor 'token_embd.weight' takes bytes",
    ),
    "an odd offset": (file_of(entry(1, 4, offset=3), num_keys=0, num_tensors=1), "off its grid"),
    "rows of half a block": (
        file_of(entry(2, 33, 2, kind=3), num_keys=0, num_tensors=1),
        "no whole blocks",
    ),
    "a crooked alignment": (
        file_of(text(b"general.alignment") + struct.pack("<II", UINT32, 0)),
        "not a power of two",
    ),
    "a tensor twice": (
        file_of(entry(1, 4), entry(1, 4), num_keys=0, num_tensors=2) + bytes(999),
        "is there twice",
    ),
    "two tensors in one place": (
        file_of(entry(1, 4), entry(1, 4, name=b"b"), num_keys=0, num_tensors=2) + bytes(999),
        "lies over another",
    ),
    "no architecture": (file_of(), "architecture None; only 'llama'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_without_believing_its_counts(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    check_refused(path, message)
    assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    tracemalloc.stop()


def without(model: SmallLlama, name: str) -> SmallLlama:
    return SmallLlama({n: w for n, w in model.weights.items() if n != name})


def with_weight(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> SmallLlama:
    return SmallLlama(random_llama().weights | {name: np.ones(shape, dtype)}, tied=False)


def layer_as(change: str) -> str:
    return f"model.layers.{change}.weight"


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another architecture": (
        lambda p: write_gguf(p, random_llama(), architecture="qwen2"),
        "architecture 'qwen2'; only 'llama'",
    ),
    "another byte order": (
        lambda p: write_gguf(p, random_llama(), endianess=gguf.GGUFEndian.BIG),
        "GGUF version .*convert the model again",
    ),
    "no vocabulary": (lambda p: write_gguf(p, random_llama(), vocabulary=False), "no vocabulary"),
    "no embedding": (
        lambda p: write_gguf(p, without(random_llama(), "model.embed_tokens.weight")),
        "'token_embd.weight' is missing; is the download complete",
    ),
    "a missing weight": (
        lambda p: write_gguf(p, without(random_llama(), layer_as("1.mlp.up_proj"))),
        "'layers.1.up' is missing",
    ),
    "a wrong shape": (
        lambda p: write_gguf(p, with_weight(layer_as("0.mlp.up_proj"), (96, 32))),
        r"'layers.0.up' has shape \(96, 32\), its configuration asks for \(96, 64\)",
    ),
    "a wrong head": (
        lambda p: write_gguf(p, with_weight("lm_head.weight", (9, 64))),
        r"'head' has shape \(9, 64\)",
    ),
    "a layer too many": (
        lambda p: write_gguf(p, with_weight(layer_as("7.mlp.up_proj"), (96, 64))),
        "'layers.7.up' is none of a Llama",
    ),
    "a bias of a norm": (
        lambda p: write_gguf(p, with_weight("model.layers.0.input_layernorm.bias", (64,))),
        "'layers.0.attention_norm.bias' is none of a Llama",
    ),
    "partial rotation": (
        lambda p: write_gguf(p, random_llama(), sizes={"rope.dimension_count": 8}),
        "rotary angles over 8 of 16 values",
    ),
    "a missing size": (
        lambda p: write_gguf(p, random_llama(), sizes={"block_count": None}),
        "metadata llama.block_count is missing",
    ),
    "unknown scaling": (
        lambda p: write_gguf(p, random_llama(rope={"rope_type": "yarn", "factor": 2.0})),
        "rope scaling 'yarn' is unknown; supported are linear and llama3",
    ),
    "absurd scaling": (
        lambda p: write_gguf(p, random_llama(rope=LLAMA3 | {"factor": -8.0})),
        "rope_freqs.weight .* is not 8 positive float32 divisors",
    ),
    "a type that is no number": (
        lambda p: write_gguf(p, with_weight(layer_as("0.mlp.up_proj"), (96, 64), np.int8)),
        "weights of type I8 are not supported",
    ),
    "no heads": (
        lambda p: write_gguf(p, random_llama(), sizes={"attention.head_count": 0}),
        "Zero",
    ),
    "many layers": (
        lambda p: write_gguf(p, random_llama(), sizes={"block_count": 2**31}),
        "do not fit",
    ),
    "an absurd context": (
        lambda p: write_gguf(p, random_llama(), sizes={"context_length": 2**31}),
        "context of 2147483648 tokens; supported",
    ),
    "heads that cannot share": (
        lambda p: write_gguf(p, random_llama(), sizes={"attention.head_count_kv": 3}),
        ".",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_gguf_that_is_no_complete_llama_is_refused(case: str, tmp_path: Path) -> None:
    write, message = MODELS[case]
    check_refused(write(tmp_path / "m.gguf"), message)


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_refused(tmp_path / "pipe", "neither a file nor a folder")
