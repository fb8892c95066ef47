"""What all conversations of one decoder share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.adapters import Adapters
from cloud.ahead import AheadCounts, AheadSettings
from cloud.grammar import Grammar
from cloud.template import ChatTemplate
from cloud.worker import Worker
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
    ahead: AheadSettings = field(default_factory=AheadSettings)
    ahead_counts: AheadCounts = field(default_factory=AheadCounts)

    @property
    def longest_turn(self) -> int:
        """Most tokens of a turn in a conversation without a system text."""
        template = self.template
        overhead = len(template.opening("")) + len(template.reply_opening) + MIN_REPLY
        return self.context - overhead
