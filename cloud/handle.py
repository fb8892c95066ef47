"""A conversation's hold on the engine: its sequence, and the adapter that the sequence runs with.

Lives in the event loop and talks to the engine by commands. A sequence runs with one adapter for
as long as it lives. When the conversation's adapter was swapped or unloaded, an open turn ends with
what it began with; between turns the sequence is let go of, and the first words of the next turn
begin another one, whose history is prefilled behind what is live.
"""

from collections.abc import Callable, Hashable

from cloud.adapters import Adapters
from cloud.engine.account import Account
from cloud.engine.engine import Engine
from cloud.engine.sequence import Generation, Lane, LoadedAdapter, Sequence, namespace_of
from cloud.worker import Worker
from shared.tokenlog import common_prefix


class SequenceHandle:
    """One sequence after another, for one conversation.

    Args:
        notice: tells the device something (topic, text).
        tenant: its sequences share prefixes with those of this tenant only.
        account: whose share of the steps they run on.
    """

    def __init__(
        self,
        worker: Worker,
        adapters: Adapters,
        notice: Callable[[str, str], None],
        tenant: str,
        account: Account,
    ) -> None:
        self._worker, self._adapters, self._notice = worker, adapters, notice
        self._tenant, self._account = tenant, account
        self._name = ""
        self._adapter: LoadedAdapter | None = None
        self.known = ""
        """Digest of the adapter that the device knows of."""
        self._settled = False
        """The open turn has begun: it ends with this adapter."""
        self._lane = Lane.LIVE
        self._told: list[int] | None = None
        """What the engine was told the sequence is, it may have drawn more behind it; None: there
        is no sequence."""
        self._sequence: Sequence | None = None

    def look(self) -> Sequence | None:
        """Return the sequence there is now, if any. Only the engine's thread may."""
        return self._sequence

    @property
    def namespace(self) -> Hashable:
        """What the blocks of its sequence are shared within."""
        return namespace_of(self._tenant, self._adapter)

    def open(self, name: str) -> None:
        """Begin the conversation anew, with the adapter of this name; empty: with none.

        Raises:
            ModelError: no adapter of this name is loaded.
        """
        adapter = self._adapters.get(name) if name else None
        self._name, self.known = name, "" if adapter is None else adapter.digest
        self._settled, self._lane = False, Lane.LIVE
        self._begin(adapter)
        self._adapters.watch(self._changed)

    def close(self) -> None:
        """Free everything."""
        self._adapters.unwatch(self._changed)
        self._let_go()

    def begin_turn(self) -> bool:
        """There are words: the open turn ends with the adapter that the name stands for now.

        Returns:
            False: the name stands for nothing any more; nobody can reply.
        """
        if self._settled or not self._name:
            return True
        adapter = self._adapters.find(self._name)
        if adapter is None:
            return False
        if adapter.digest != self.known:
            self._notice(
                "adapter",
                f"adapter {self._name!r} was swapped: {adapter.digest} replies from this turn on, "
                f"{self.known} did before",
            )
            self.known = adapter.digest
        if adapter is not self._adapter:
            self._begin(adapter)
            self._lane = Lane.BULK
        self._settled = True
        return True

    def end_turn(self) -> None:
        """The turn is over: the next one may have another adapter."""
        self._settled, self._lane = False, Lane.LIVE
        self._changed(self._name)

    def tell(
        self,
        prompt: list[int],
        *,
        lane: Lane | None = None,
        reply: Generation | None = None,
        deadline: float = float("inf"),
        tail: int = 0,
    ) -> None:
        """Tell the engine what the sequence is now, and what reply is wanted behind it.

        One command for both: the step that runs the last ids also draws the first token. Between
        turns there may be no sequence; then the next turn begins one.

        Args:
            lane: None: live, or bulk if the turn has to prefill its history again.
            tail: ids at the end that the next revision may change: never shared with others.
        """
        if self._told is None:
            assert reply is None, "a turn has a sequence"
            return
        keep = common_prefix(self._told, prompt)
        if keep == len(self._told) == len(prompt) and reply is None:
            return
        self._told, rest = prompt, prompt[keep:]
        settled = len(prompt) - tail
        wanted = self._lane if lane is None else lane

        def command(engine: Engine) -> None:
            if (sequence := self._sequence) is None:
                return
            sequence.lane = wanted
            engine.splice(sequence, keep, rest, settled)
            if reply is not None:
                engine.generate(sequence, reply, deadline)

        self._worker.submit(command)

    def release(self, generation: Generation, deadline: float) -> None:
        """The turn has ended as a reply ahead of it assumed: it goes on."""

        def release(engine: Engine) -> None:
            if (sequence := self._sequence) is not None:
                engine.release(sequence, generation, deadline)

        self._worker.submit(release)

    def cancel(self, generation: Generation) -> None:
        """Stop generating."""

        def cancel(engine: Engine) -> None:
            sequence = self._sequence
            if sequence is not None and sequence.generation is generation:
                engine.cancel(sequence)

        self._worker.submit(cancel)

    # --- inside

    def _changed(self, name: str) -> None:
        """Between turns, let go of an adapter that the name does not stand for any more."""
        stale = bool(name) and self._adapters.find(name) is not self._adapter
        if name == self._name and stale and not self._settled:
            self._let_go()

    def _begin(self, adapter: LoadedAdapter | None) -> None:
        self._let_go()
        self._adapter, self._told = adapter, []

        def add(engine: Engine) -> None:
            self._sequence = engine.add(self._tenant, self._account, adapter)

        self._worker.submit(add)

    def _let_go(self) -> None:
        if self._told is None:
            return
        self._adapter = self._told = None

        def remove(engine: Engine) -> None:
            sequence, self._sequence = self._sequence, None
            if sequence is not None:
                engine.remove(sequence)

        self._worker.submit(remove)
