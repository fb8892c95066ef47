"""What all conversations of one decoder share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.adapters import Adapters
from cloud.ahead import AheadCounts, AheadSettings
from cloud.grammar import Grammar
from cloud.metrics import Metrics
from cloud.template import ChatTemplate
from cloud.worker import Worker
from shared.errors import ContextLengthError, InputError
from shared.tokenizer import Tokenizer

MIN_REPLY = 16
"""Tokens that must be left for a reply behind a turn."""


@dataclass(frozen=True, slots=True)
class Voice:
    """Template, vocabulary and bounds of a decoder, and the worker that runs its engine."""

    template: ChatTemplate
    tokenizer: Tokenizer
    grammar: Grammar
    stop_ids: frozenset[int]
    context: int
    max_tokens: int
    """Most tokens of one reply, whatever a device asks for."""
    worker: Worker
    adapters: Adapters
    clock: Callable[[], float]
    metrics: Metrics
    ahead: AheadSettings = field(default_factory=AheadSettings)
    ahead_counts: AheadCounts = field(default_factory=AheadCounts)

    @property
    def longest_turn(self) -> int:
        """Most tokens of a turn in a conversation without a system text."""
        template = self.template
        overhead = len(template.opening("")) + len(template.reply_opening) + MIN_REPLY
        return self.context - overhead

    def room_for(self, prompt: int, wanted: int | None) -> int:
        """Return the tokens of a reply behind a prompt of so many: those wanted, or all there are.

        Raises:
            ContextLengthError: the context does not hold both.
            InputError: more are wanted than a reply may have.
        """
        room = self.context - prompt
        if room < (1 if wanted is None else wanted) or room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {wanted or 1} are wanted behind it; the "
                f"context of this decoder is {self.context} tokens: shorten it, or ask for fewer"
            )
        if wanted is not None and wanted > self.max_tokens:
            raise InputError(
                f"{wanted} tokens are wanted; a reply here has at most {self.max_tokens}"
            )
        return min(room, self.max_tokens) if wanted is None else wanted
