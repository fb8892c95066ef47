"""Replies that follow a JSON schema: token masks by llguidance, compiled once per conversation."""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from shared.errors import ConfigError
from shared.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_COMPACT: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to space a text: a model cannot lose itself, or its budget, in white space."""


MAX_SCHEMA = 64 * 1024
"""Characters of a schema: compiling a longer one would keep everybody waiting."""


class JsonConstraint:
    """One reply's way through a grammar. Used by the engine's thread alone once the reply began."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = allocate_token_bitmask(1, vocabulary)

    def mask(self, logits: torch.Tensor) -> None:
        """Forbid, in place, every token that cannot come next: logits (vocabulary,)."""
        fill_next_token_bitmask(self._matcher, self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def advance(self, tokens: Iterable[int]) -> None:
        """Take tokens that were drawn."""
        self._matcher.consume_tokens(list(tokens))


class Grammar:
    """Compiles JSON schemas for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, stop_id: int) -> None:
        self._tokenizer, self._stop_id = tokenizer, stop_id
        self.eos_token_id, self.bos_token_id = stop_id, None
        self.special_token_ids = tokenizer.header.control

    @cached_property
    def tokens(self) -> list[bytes]:
        """Bytes of every token, as llguidance asks for them; control tokens have a name instead."""
        names = {token: name for name, token in self._tokenizer.controls().items()}
        ids = range(self._tokenizer.header.vocabulary)
        return [names[i].encode() if i in names else self._tokenizer.piece(i) for i in ids]

    def __call__(self, text: str) -> list[int]:
        """Encode a text, for llguidance."""
        return self._tokenizer.encode(text)

    def compile(self, schema: str) -> LLMatcher:
        """Return a matcher at the start of what `schema` (JSON text) allows.

        Raises:
            ConfigError: it is no JSON schema, too long, or asks for what is not supported.
        """
        if len(schema) > MAX_SCHEMA:
            raise ConfigError(
                f"schema: {len(schema)} characters; at most {MAX_SCHEMA} are taken: make it shorter"
            )
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
        except ValueError as error:
            raise ConfigError(f"schema: not valid JSON: {error}") from None
        matcher = LLMatcher(self._library, grammar)
        if matcher.is_error():
            raise ConfigError(f"schema: {matcher.get_error()}")
        return matcher

    def constraint(self, matcher: LLMatcher, begun: Iterable[int]) -> JsonConstraint:
        """Return the constraint of a new reply that begins with the ids `begun`."""
        constraint = JsonConstraint(matcher.deep_copy(), self._tokenizer.header.vocabulary)
        constraint.advance(begun)
        return constraint

    @cached_property
    def _library(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self))
