"""A sequence: token ids, how much of them is cached, and what is wanted of it. No torch, no I/O."""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from cloud.engine.account import Account
from cloud.engine.scores import PromptScores, TokenScore
from shared.frames import Sampling
from shared.tokenlog import common_prefix

if TYPE_CHECKING:
    import torch


class Lane(IntEnum):
    """Who goes first among sequences with tokens to prefill."""

    ENDED = 0  # turns that have ended: somebody waits for the first token
    LIVE = 1  # words that are being spoken
    BULK = 2  # history, re-prefilling, one-shot prompts
    AHEAD = 3  # a reply to words that may still change


class Constraint(Protocol):
    """Restricts what a reply may be, token by token."""

    def mask(self, logits: "torch.Tensor") -> None:
        """Forbid, in place, every token that cannot come next: logits (vocabulary,)."""
        ...

    def advance(self, tokens: Iterable[int]) -> None:
        """Take tokens that were drawn."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """A reply under way."""

    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    deliver: Callable[[int, str], None]
    """Takes every token drawn and, with the last, why the reply ends. Not for the engine to call.
    """
    constraint: Constraint | None = None
    produced: int = 0
    """Ids of this reply so far, counting those it began with."""
    min_tokens: int = 0
    """Ids of this reply before which no stop id is drawn."""
    top_scores: int | None = None
    """Alternatives to score beside every token drawn; None: no scores."""
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    """Of the tokens drawn, if they are wanted; written before a token is delivered."""
    pause_at: int | None = None
    """Ids of this reply at which it waits: until the turn ends, it may be for nothing."""

    @property
    def is_paused(self) -> bool:
        """It goes on when `pause_at` is lifted."""
        return self.pause_at is not None and self.produced >= self.pause_at


class LoadedAdapter(Protocol):
    """An adapter as the runner that loaded it wants it; it lives as long as somebody holds it."""

    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


def namespace_of(tenant: Hashable, adapter: LoadedAdapter | None) -> Hashable:
    """Return the namespace of a tenant's sequences with an adapter, or with none."""
    return tenant, "" if adapter is None else adapter.digest


@dataclass(slots=True, eq=False)
class Sequence:
    """One conversation's tokens in the engine."""

    number: int
    ids: list[int] = field(default_factory=list[int])
    cached: int = 0
    """Leading ids whose keys and values are in `blocks`."""
    blocks: list[int] = field(default_factory=list[int])
    namespace: Hashable = ""
    """Blocks are shared within one only."""
    adapter: LoadedAdapter | None = None
    settled: int = 0
    """Leading ids that are no tail: their full blocks may be shared."""
    published: int = 0
    """Leading blocks that others may find."""
    adopted: int = 0
    """Ids whose keys and values others had run, so far."""
    scores: PromptScores | None = None
    """Where scores of its own ids are wanted; it adopts no blocks until they are complete."""
    generation: Generation | None = None
    account: Account = field(default_factory=Account)
    """Whose share of a step it runs on; its own alone, unless told."""
    lane: Lane = Lane.LIVE
    deadline: float = float("inf")
    """When its next result is wanted, in the engine's clock."""
    touched: float = 0.0
    """When it was last changed or run: the coldest idle sequence is evicted first."""
    run_number: int = 0
    """Place of its last run among the runs of all sequences."""
    evictions: int = 0
    parked: bool = False
    """It was evicted with nothing to do, and stays so until something is wanted of it again."""

    @property
    def remaining(self) -> int:
        """Ids to run before nothing is left to do; at least one while a reply is generated."""
        if self.parked or (self.generation is not None and self.generation.is_paused):
            return 0
        left = len(self.ids) - self.cached
        return max(left, 1) if self.generation is not None else left

    @property
    def is_scored(self) -> bool:
        """Logits behind all ids of its next chunk are wanted."""
        return self.scores is not None and not self.scores.is_complete

    @property
    def decoding(self) -> bool:
        """Only its last id is left to run, and a token comes out of it."""
        return self.generation is not None and self.cached >= len(self.ids) - 1

    @property
    def is_ahead(self) -> bool:
        """Its reply is drawn before its turn has ended."""
        return self.generation is not None and self.generation.pause_at is not None

    def splice(self, keep: int, ids: Ids[int], settled: int | None = None) -> int:
        """Keep the first `keep` ids and append `ids`; return how many ids really changed place.

        What is equal at the joint stays cached: a splice that changes no id changes nothing.

        Args:
            settled: leading ids that are no tail; all of them by default.
        """
        self.settled = keep + len(ids) if settled is None else settled
        old = self.ids[keep:]
        same = common_prefix(old, ids)
        if same == len(old) == len(ids):
            return 0
        self.parked = False
        del self.ids[keep + same :]
        self.ids.extend(ids[same:])
        self.cached = min(self.cached, keep + same)
        return len(old) - same + len(ids) - same
