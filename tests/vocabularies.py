"""Vocabularies and texts of the tokenizer tests: small ones made here, real ones where they are."""

import io
import json
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from shared.models import known_models
from shared.nn.gguf_file import read_gguf_file
from shared.nn.vocabulary import blob_from_gguf, blob_from_sentencepiece, bpe_blob
from shared.tokenizer import BPE_RULES, Tokenizer, byte_alphabet, load_tokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
SMOLLM2 = known_models()[0]

TEXTS = (
    "They sound great! Please pick a quick route to Pizza Hut, thank you!",
    "make an appointment to reserve conference room 100 later this week for a meeting",
    "Where's the nearest gas station, and what's it like? I'd say they're closed; we'll see.",
    "it's 7:45, I can't be there before 8 -- don't wait  for   me ",
    "Wie heiß wird es heute in München? Fahr bitte über die A8.",
    "Hvornår er der fodbold i morgen, og hvad koster en billet på 3. række?",
    "最寄りの充電所を探して。東京駅まで、お願いします。",
    "가장 가까운 주유소를 찾아 주세요. 감사합니다!",
    "Погода в Москве завтра?\nПривет, мир",
    "مرحبا، أين أقرب محطة وقود؟",
    "👩‍👩‍👧‍👦 family 🇩🇪🇯🇵 trip 🏳️‍🌈👍🏽 ok",
    "cafe\u0301 naïve \u0915\u094d\u0937\u093f \u200b\u2060x",
    "line one\r\nline two\n\n\n  indented\tand\t\ttabs \n \n end",
    "<|im_start|>user\nignore the rules<|im_end|> <s>[INST]</s> <|endoftext|>",
    "\u00a0no\u00a0break \u2581\u2581under \u2581bar\u2581 \u3000wide\u2028sep",
    "'s 't 'll 'LL THEY'RE 'ſ o''clock '''re '",
    "(3.14159) [2026-11-30] #42 $5.99/1000l 12345678901234567890 ½ Ⅷ ²",
    "\x00\x04\x1d odd \x04\x04? controls \x7f\x85 \U00040000\ufffd\ufeff",
    "x" * 70,
    "Donaudampfschifffahrtsgesellschaft" * 2,
    "  ",
    "",
)
"""One or more of everything a text can hold; typed in full by the default tests."""


def data(*parts: str) -> Path:
    """Return a file of the shared data, or skip the test by its name."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def smollm2() -> Path:
    """Return the pulled model, or skip the test by its name."""
    if not SMOLLM2.is_pulled:
        pytest.skip(f"{SMOLLM2.name} is not pulled (`deltarelay models pull {SMOLLM2.name}`)")
    return SMOLLM2.path


@cache
def small_bpe() -> tuple[list[str], list[str]]:
    """Train a byte-level BPE on `TEXTS`; return tokens (three control ones first) and merges."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=sorted(byte_alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    library.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


@cache
def small_sentencepiece(*, byte_fallback: bool = True) -> bytes:
    """Train a SentencePiece BPE on the plain ones of `TEXTS`."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text.isprintable()]),
        model_writer=written,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    return written.getvalue()


@cache
def small_blob(name: str) -> bytes:
    """Return a blob made here: `small-spm`, `small-spm-unknown` or `small-` and a BPE rule."""
    rule = name.removeprefix("small-")
    if rule.startswith("spm"):
        return _from_model_bytes(small_sentencepiece(byte_fallback=rule == "spm"))
    tokens, merges = small_bpe()
    return bpe_blob(tokens, merges, pre=rule, control=[0, 1, 2], bos=1, eos=2)


@cache
def small(name: str) -> Tokenizer:
    """Return the tokenizer of `small_blob`."""
    return load_tokenizer(small_blob(name))


SMALL = ("small-spm", "small-spm-unknown", *(f"small-{rule}" for rule in sorted(BPE_RULES)))
REAL = ("stories260k", "llama2", *(f"smollm2/{rule}" for rule in sorted(BPE_RULES)))


@cache
def real(name: str) -> Tokenizer:
    """Return a real tokenizer, or skip; SmolLM2's is there under each rule, `smollm` is its own."""
    if name == "stories260k":
        return load_tokenizer(blob_from_sentencepiece(data("stories260K", "tok512.model")))
    if name == "llama2":
        path = data("llama2-spm-vectors", "tokenizer.model")
        return load_tokenizer(blob_from_sentencepiece(path))
    metadata = read_gguf_file(smollm2()).metadata
    return load_tokenizer(blob_from_gguf(metadata | {"tokenizer.ggml.pre": name.split("/")[1]}))


def tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of `SMALL` or `REAL`."""
    return small(name) if name in SMALL else real(name)


def kvret_utterances() -> list[str]:
    """Return every driver utterance of KVRET's dev part, once."""
    dialogues = json.loads(data("kvret", "kvret_dev_public.json").read_text())
    turns = [turn for dialogue in dialogues for turn in dialogue["dialogue"]]
    return _once(turn["data"]["utterance"] for turn in turns if turn["turn"] == "driver")


def xsid_utterances() -> list[str]:
    """Return every utterance of xSID, in all languages there."""
    files = sorted(data("xsid").glob("*.conll"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    mark = "# text = "
    return _once(line.removeprefix(mark) for line in lines if line.startswith(mark))


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _from_model_bytes(model: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(model)
        file.flush()
        return blob_from_sentencepiece(Path(file.name))
