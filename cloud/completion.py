"""Prompts that are answered once, outside of any conversation: what the HTTP API asks for.

All replies of one request share a queue, so that one reader follows them without tasks of its own.
Further replies to the same prompt begin when the first has drawn a token: then its keys and values
can be shared.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace as replace_struct

from cloud.engine.account import Account
from cloud.engine.engine import Engine
from cloud.engine.scores import PromptScores, TokenScore
from cloud.engine.sequence import Constraint, Generation, Lane, LoadedAdapter
from cloud.engine.sequence import Sequence as EngineSequence
from cloud.metrics import ReplyTimes
from cloud.stop import StopFilter
from cloud.voice import Voice
from shared.errors import AccessError
from shared.frames import Reason, Sampling
from shared.tokenizer import TextDecoder

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted behind one prompt."""

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    """None: as many as the decoder gives and the context has room for. 0: scores only."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    matcher: "LLMatcher | None" = None
    """At the start of a grammar that the replies follow (`Grammar.compile`)."""
    top_scores: int | None = None
    """Alternatives to score beside every reply token; None: no scores."""
    prompt_scores: int | None = None
    """The same for the prompt's own tokens."""
    num_replies: int = 1
    adapter: LoadedAdapter | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str = ""
    """Prefixes are shared within one tenant only."""
    account: Account | None = None
    """Whose share of the steps the replies run on; None: one that all share who have none."""
    settle: Callable[[int], None] = lambda _tokens: None
    """Called once, when the request is over, with the reply tokens granted and not drawn."""


class Piece(NamedTuple):
    """Some more of a reply. An end of text that is not a whole character yet is held back."""

    text: str
    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    """One for each of `tokens`, if they were asked for."""
    reason: str
    """Why the reply ends here; empty: it goes on."""


class Completion:
    """One reply under way. Lives in the event loop.

    Args:
        inbox: takes what is drawn.
        index: of the reply in its request.
        prompt: which of the request's prompts it replies to.
    """

    def __init__(
        self,
        voice: Voice,
        ask: Ask,
        caller: Caller,
        inbox: "asyncio.Queue[_Drawn | AccessError]",
        *,
        index: int,
        prompt: int,
    ) -> None:
        self._voice, self._ask, self._caller = voice, ask, caller
        self.index, self.prompt = index, prompt
        self.num_tokens = 0
        """Reply tokens given out, and those that a stop string ended."""
        self.scores = (
            PromptScores(len(ask.prompt), ask.prompt_scores)
            if ask.prompt_scores is not None
            else None
        )
        self._text = TextDecoder(voice.tokenizer)
        self._stop = StopFilter(voice.tokenizer, ask.stop)
        self._held: list[int] = []
        """Tokens released of which no text has come yet."""
        self._given = 0
        """Reply tokens that were part of a piece."""
        self._sequence: EngineSequence | None = None
        self.num_adopted: int | None = None
        """Ids of the prompt that did not have to be run; None: it is not known yet."""
        self.has_ended = False
        """Its last piece was given out; what the engine drew meanwhile does not count."""
        self._generation = Generation(
            ask.sampling,
            max(1, voice.room_for(len(ask.prompt), ask.max_tokens)),
            ask.stop_ids if ask.ignore_eos else ask.stop_ids | voice.stop_ids,
            lambda token, why: inbox.put_nowait(_Drawn(self, token, why)),
            self._constraint(),
            min_tokens=ask.min_tokens,
            top_scores=ask.top_scores,
        )
        self._times: ReplyTimes | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens of the reply."""
        return self._generation.max_tokens

    def begin(self) -> None:
        """Hand the prompt to the engine."""
        caller = self._caller
        self._times = self._voice.metrics.reply(len(self._ask.prompt))

        def begin(engine: Engine) -> None:
            sequence = engine.add(caller.tenant, caller.account, self._ask.adapter)
            self._sequence = sequence
            sequence.scores = self.scores
            engine.splice(sequence, 0, self._ask.prompt)
            engine.generate(sequence, self._generation, float("inf"))
            sequence.lane = Lane.BULK

        self._voice.worker.submit(begin)

    def close(self) -> None:
        """Free everything, whatever the state."""
        if self._times is not None:
            self._times.end("abort")

        def remove(engine: Engine) -> None:
            sequence, self._sequence = self._sequence, None
            if sequence is not None:
                engine.remove(sequence)

        self._voice.worker.submit(remove)

    def take(self, token: int, why: str) -> Piece:
        """Return what a drawn token adds to the reply."""
        if self.num_adopted is None and (sequence := self._sequence) is not None:
            self.num_adopted = min(sequence.adopted, len(self._ask.prompt))
        drawn_before = self.num_tokens
        piece = self._take(token, why)
        self.has_ended = bool(piece.reason)
        if self._times is not None:
            if self.num_tokens > drawn_before:
                self._times.token()
            if piece.reason:
                self._times.end(piece.reason)
        return piece

    def _take(self, token: int, why: str) -> Piece:
        if self._ask.max_tokens == 0:
            return Piece("", (), (), Reason.LENGTH)
        released: list[int] = []
        stopped = False
        if why != Reason.STOP:
            self.num_tokens += 1
            released, stopped = self._stop.feed(token)
        if why and not stopped:
            released += self._stop.flush()
        reason = Reason.STOP if stopped else why
        text = self._text.feed(released)
        if reason:
            text += self._stop.remainder if stopped else self._text.flush()
        self._held += released
        if not text and not reason:
            return Piece("", (), (), "")
        tokens, self._held = tuple(self._held), []
        first, self._given = self._given, self._given + len(tokens)
        return Piece(text, tokens, tuple(self._generation.scores[first : self._given]), reason)

    def _constraint(self) -> Constraint | None:
        matcher = self._ask.matcher
        return None if matcher is None else self._voice.grammar.constraint(matcher, ())


class _Drawn(NamedTuple):
    completion: Completion
    token: int
    why: str


def _again(ask: Ask, number: int) -> Ask:
    """Return what the `number`-th reply to a prompt asks for: a seed of its own."""
    if number == 0:
        return ask
    seed = ask.sampling.seed
    sampling = replace_struct(ask.sampling, seed=None if seed is None else seed + number)
    return replace(ask, sampling=sampling, prompt_scores=None)


class Request:
    """Some prompts, each with one reply or several. Leaving it frees what is still under way.

    Raises:
        ContextLengthError, InputError: something cannot be answered as asked.
    """

    def __init__(self, voice: Voice, asks: Sequence[Ask], caller: Caller | None = None) -> None:
        caller = caller or Caller()
        self._caller: Caller | None = caller
        self._inbox: asyncio.Queue[_Drawn | AccessError] = asyncio.Queue()
        self._waiting: dict[int, list[Completion]] = {}
        """Further replies to the prompt of the reply with this index."""
        self.completions: list[Completion] = []
        self.num_prompt_tokens = sum(len(ask.prompt) for ask in asks)
        for prompt, ask in enumerate(asks):
            first = len(self.completions)
            for number in range(ask.num_replies):
                again = _again(ask, number)
                made = Completion(
                    voice,
                    again,
                    caller,
                    self._inbox,
                    index=first + number,
                    prompt=prompt,
                )
                self.completions.append(made)
            self._waiting[first] = self.completions[first + 1 :]
        self._firsts = [self.completions[first] for first in self._waiting]

    def __enter__(self) -> "Request":
        for completion in self._firsts:
            completion.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what is still under way; also a request that was never begun is to be closed."""
        for completion in self.completions:
            completion.close()
        caller, self._caller = self._caller, None
        if caller is not None:
            drawn = sum(completion.num_tokens for completion in self.completions)
            caller.settle(self.num_granted - drawn)

    def cut_off(self, error: AccessError) -> None:
        """The caller may not go on: whoever follows the pieces gets `error`."""
        self._inbox.put_nowait(error)

    @property
    def num_granted(self) -> int:
        """Most tokens of all replies together."""
        return sum(completion.max_tokens for completion in self.completions)

    @property
    def num_adopted(self) -> int:
        """Prompt tokens that did not have to be run."""
        return sum(completion.num_adopted or 0 for completion in self._firsts)

    async def pieces(self) -> AsyncIterator[tuple[Completion, Piece]]:
        """Yield what comes of all replies, until each has ended.

        Raises:
            AccessError: the caller was cut off.
        """
        left = len(self.completions)
        while left:
            drawn = await self._inbox.get()
            if isinstance(drawn, AccessError):
                raise drawn
            completion, token, why = drawn
            if completion.has_ended:
                continue
            for other in self._waiting.pop(completion.index, ()):
                other.scores = completion.scores  # of the same prompt, and complete
                other.begin()
            piece = completion.take(token, why)
            if piece.reason:
                completion.close()
                left -= 1
            if piece.text or piece.reason:
                yield completion, piece
