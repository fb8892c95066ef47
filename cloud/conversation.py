"""A conversation in the cloud: a relay stream on one side, an engine sequence on the other.

Whatever changes, the whole prompt is known by construction (`history`), and the sequence is spliced
at the longest common prefix (`handle`): a frame that changes no id changes nothing.
"""

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids

from cloud.access.allowance import Allowance
from cloud.ahead import Ahead, Draft
from cloud.engine.sequence import Generation, Lane
from cloud.handle import SequenceHandle
from cloud.history import History
from cloud.metrics import ReplyTimes
from cloud.stop import StopFilter
from cloud.template import ChatTurn
from cloud.voice import Voice
from shared.frames import Reason
from shared.session import (
    Cancelled,
    CloudStream,
    Ended,
    Event,
    HistorySet,
    Opened,
    Reopened,
    Revised,
)


class Conversation:
    """One conversation. Lives in the event loop; talks to the engine by commands.

    Args:
        on_change: called after something was given to the stream, to put it on the wire.
        notice: tells the device something (topic, text).
        turns: finished ones to go on from, of an earlier process; None: it begins anew.

    Raises:
        ContextLengthError: the system text leaves no room.
        ConfigError: the JSON schema cannot be followed.
        ModelError: its adapter is not loaded, or the model takes no system text.
    """

    def __init__(
        self,
        stream: CloudStream,
        voice: Voice,
        allowance: Allowance,
        *,
        on_change: Callable[[], None],
        notice: Callable[[str, str], None],
        turns: Iterable[ChatTurn | None] | None = None,
    ) -> None:
        self.stream = stream
        self._voice, self._allowance = voice, allowance
        self.tenant = allowance.tenant
        self._on_change, self._notice = on_change, notice
        self._history = History(voice.template, voice.context)
        self._handle = SequenceHandle(
            voice.worker, voice.adapters, notice, allowance.tenant, allowance.account
        )
        self._generation: Generation | None = None
        self._times: ReplyTimes | None = None
        self._stop: StopFilter | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._ahead = Ahead(voice.ahead, voice.ahead_counts, self._draw_ahead, self._handle.cancel)
        self._adopted_at: float | None = None
        """When the turn of an adopted draft ended, until its first tokens go out."""
        self._expires = float("inf")
        """When the reply under way must be complete."""
        self.touched = voice.clock()
        self._begin(turns)

    @property
    def handle(self) -> SequenceHandle:
        """Its hold on the engine."""
        return self._handle

    @property
    def turns(self) -> list[ChatTurn | None]:
        """The turns that are finished; None: refused or dropped, no part of the prompt."""
        return list(self._history.turns)

    @property
    def is_between_turns(self) -> bool:
        """There are no words of an open turn, and no reply is under way."""
        stream = self.stream
        return bool(stream.reason) or not (stream.ended or stream.log.ids)

    @property
    def prompt(self) -> list[int]:
        """The ids that only REWIND, REOPEN and CANCEL take back."""
        open_turn = () if self.stream.reason else self.stream.log.committed
        return [*self._history.prompt(), *open_turn]

    def prefill(self) -> None:
        """Have what there is prefilled behind whatever is live."""
        self._tell(self.prompt, lane=Lane.BULK)

    def on_event(self, event: Event) -> None:
        """Follow what the stream reports."""
        self.touched = self._voice.clock()
        match event:
            case Revised():
                self._revised()
            case Ended():
                self._ended()
            case Reopened(turn=turn):
                self._silence()
                del self._history.turns[turn:]
                self._revised()
            case Cancelled():
                self._cancelled(event)
            case HistorySet():
                self._history_set(event)
            case Opened():
                self._silence()
                self._begin()
            case _:
                raise AssertionError(f"{event} is not about a conversation")

    def close(self) -> None:
        """Free everything."""
        self._silence()
        self._handle.close()

    # --- what the stream reports

    def _begin(self, turns: Iterable[ChatTurn | None] | None = None) -> None:
        self._history.begin(self.stream.body.system)
        schema = self.stream.body.schema
        self._matcher = self._voice.grammar.compile(schema) if schema else None
        self._handle.open(self.stream.body.adapter)
        if turns is not None:  # they were charged when they came
            self._history.turns += turns
            return
        self._allowance.charge(len(self._history.prompt()))
        self._tell(self._history.prompt())

    def _revised(self) -> None:
        user = self.stream.log.ids
        self._allowance.count(self.stream.turn, user)
        if self._ahead.stands(user):
            return  # a tail was committed as it stood
        self._ahead.drop()
        if user and not self._handle.begin_turn():
            return  # it is refused when it ends, unless the adapter comes back before
        if self._make_room(len(user)):
            prompt = [*self._history.prompt(), *user]
            self._tell(prompt, tail=len(self.stream.log.tail))
            self._ahead.wait()

    def _ended(self) -> None:
        began = self._voice.clock()
        user, body, reply = self.stream.log.committed, self.stream.body, self.stream.reply
        self._allowance.count(self.stream.turn, user)
        if reply:  # begun elsewhere
            self._ahead.drop()
        draft = self._ahead.take(user)
        if not self._handle.begin_turn():
            self._refuse(
                f"adapter {body.adapter!r} was unloaded; loaded are: "
                f"{', '.join(self._voice.adapters.names()) or 'none'}. Open another conversation"
            )
            return
        if not self._make_room(len(user)):
            most = self._voice.longest_turn
            self._refuse(
                f"the turn has {len(user)} tokens, this decoder takes about {most}: split it"
            )
            return
        prompt, most = self._asked(user)
        if len(reply) >= most:
            self._finish(Reason.LENGTH)
            return
        self._times = self._voice.metrics.reply(len(prompt))
        self._stop = StopFilter(self._voice.tokenizer, body.stop) if body.stop else None
        self._expires = float("inf")
        if body.deadline > 0:
            self._expires = began + body.deadline
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(body.deadline, self._expire)
        self._answer(draft, began)

    def _answer(self, draft: Draft | None = None, ended_at: float | None = None) -> None:
        """Have the turn that ended answered, as soon as the device is within its limit."""
        reply = self.stream.reply
        prompt, most = self._asked(self.stream.log.committed)
        if not self._allowance.ask(len(reply), most, self._notice, self._answer):
            if draft is not None:
                self._handle.cancel(draft.generation)
        elif draft is None:
            self._generation = self._reply(most, reply)
            self._handle.tell([*prompt, *reply], reply=self._generation, deadline=self._expires)
        else:
            self._adopted_at = ended_at if draft.drawn else None
            self._adopt(draft)

    def _cancelled(self, event: Cancelled) -> None:
        self._silence()
        turns = self._history.turns
        if event.user_ids is not None:
            turns.append(ChatTurn(event.user_ids, list(self.stream.reply)))
        elif turns and (last := turns[-1]) is not None:
            turns[-1] = ChatTurn(last.user, last.reply[: event.heard])
        self._handle.end_turn()
        self._revised()

    def _history_set(self, event: HistorySet) -> None:
        self._silence()
        self._allowance.count(event.turn, event.user_ids)
        self._allowance.charge(len(event.reply_ids))
        del self._history.turns[event.turn :]
        self._handle.end_turn()
        if event.done:
            empty = not event.user_ids and not event.reply_ids
            turn = None if empty else ChatTurn(event.user_ids, event.reply_ids)
            self._history.turns.append(turn)
            self._make_room(0)
            self._tell(self._history.prompt(), lane=Lane.BULK)

    # --- what the engine reports

    def _drawn(self, generation: Generation, token: int, why: str) -> None:
        draft = self._ahead.owns(generation)
        if draft is not None:
            draft.drawn.append((token, why))
        elif generation is self._generation and self.stream.ended:
            self._take([(token, why)])
        # else it is of a reply that was cancelled

    def _take(self, drawn: Iterable[tuple[int, str]]) -> None:
        """Give tokens to the stream, up to a stop string or the reply's end."""
        self.touched = self._voice.clock()
        fresh: list[int] = []
        asked_at, self._adopted_at = self._adopted_at, None
        reason = ""
        for token, why in drawn:
            if self._times is not None and why != Reason.STOP:
                self._times.token()
            if self._stop is None:
                fresh += [] if why == Reason.STOP else [token]
                reason = why
                continue
            if why != Reason.STOP:
                released, stopped = self._stop.feed(token)
                fresh += released
                if stopped:
                    reason = Reason.STOP
                    break
            if why:
                fresh += self._stop.flush()
                reason = why
        if fresh:
            self.stream.extend_reply(fresh)
        if reason:
            self._finish(reason)
        else:
            self._on_change()
        if asked_at is not None:
            self._voice.ahead_counts.seconds.append(self._voice.clock() - asked_at)

    def _expire(self) -> None:
        if self.stream.ended:
            self._notice("deadline", f"no complete reply within {self.stream.body.deadline:g} s")
            self._finish(Reason.DEADLINE)

    # --- inside

    def _make_room(self, user: int) -> bool:
        """Drop whole oldest turns once the context is full; False: still full."""
        last = self._history.make_room(user)
        if last is not None:
            self._notice(
                "turns-dropped",
                f"turns up to {last} no longer fit the context of {self._voice.context} tokens; "
                "forgotten",
            )
        return self._history.has_room(user)

    def _refuse(self, why: str) -> None:
        """The turn that has ended gets no reply, and is no part of the history."""
        self._notice("turn-refused", why)
        self._finish(Reason.ERROR)

    def _tell(self, prompt: list[int], *, lane: Lane | None = None, tail: int = 0) -> None:
        """Tell the engine what the sequence is now, unless the device is over its limit."""
        if not self._allowance.is_over(self._catch_up):
            self._handle.tell(prompt, lane=lane, tail=tail)

    def _catch_up(self) -> None:
        """Tell the engine what it was not told while the device was over its limit."""
        if not self.stream.ended:
            user = self.stream.log.ids
            self._tell([*self._history.prompt(), *user], tail=len(self.stream.log.tail))

    def _asked(self, user: Ids[int]) -> tuple[list[int], int]:
        """Return the prompt for a reply to `user`, and how many tokens the reply may have."""
        prompt, room = self._history.asked(user)
        return prompt, min(self.stream.body.max_tokens, self._voice.max_tokens, room)

    def _reply(self, most: int, already: Ids[int], pause_at: int | None = None) -> Generation:
        """Return a reply that goes on after the ids there are of it already."""
        constraint = None
        if self._matcher is not None:
            constraint = self._voice.grammar.constraint(self._matcher, already)
        generation = Generation(
            self.stream.body.sampling,
            most,
            self._voice.stop_ids,
            lambda token, why: self._drawn(generation, token, why),
            constraint,
            produced=len(already),
            pause_at=pause_at,
        )
        return generation

    def _draw_ahead(self) -> Draft | None:
        """The turn may have ended: begin the reply to it as it stands."""
        user, tail = self.stream.log.ids, len(self.stream.log.tail)
        prompt, most = self._asked(user)
        if self.stream.ended or not user or most < 1 or self._allowance.is_over():
            return None
        draft = Draft(user, self._reply(most, (), pause_at=self._voice.ahead.tokens))
        opening = len(self._voice.template.reply_opening)
        self._handle.tell(prompt, reply=draft.generation, tail=tail + opening)
        return draft

    def _adopt(self, draft: Draft) -> None:
        """The turn has ended as the draft assumed: its tokens go out, and it goes on."""
        self._generation = draft.generation
        self._handle.release(draft.generation, self._expires)
        if draft.drawn:
            self._take(draft.drawn)

    def _silence(self) -> None:
        """Stop the reply under way, if any, and what was drawn ahead."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._ahead.drop()
        self._adopted_at = None
        self._end_times("abort")
        generation, self._generation = self._generation, None
        self._allowance.settle(generation.produced if generation is not None else 0)
        if generation is not None:
            self._handle.cancel(generation)

    def _end_times(self, reason: str) -> None:
        times, self._times = self._times, None
        if times is not None:
            times.end(reason)

    def _finish(self, reason: str) -> None:
        """The reply is complete: it becomes history, and the next turn's opening is prefilled."""
        self._end_times(reason)
        self._silence()
        turn = ChatTurn(list(self.stream.log.committed), list(self.stream.reply))
        self._history.turns.append(None if reason == Reason.ERROR else turn)
        self.stream.finish(reason)
        self._handle.end_turn()
        self._make_room(0)
        self._tell(self._history.prompt())
        self._on_change()
