"""The adapters of a decoder, by name: loaded, unloaded and swapped while it serves.

A name stands for some content, and conversations hold the content. Loading under a name that is in
use swaps it: who asks from then on gets the new content, and the old one stays in memory until no
sequence runs with it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cloud.engine.engine import Engine
from cloud.engine.sequence import LoadedAdapter
from cloud.worker import Worker
from shared.adapter import Adapter
from shared.errors import CapacityError, InputError, ModelError
from shared.nn.llama import LlamaConfig
from shared.peft_folder import read_adapter

log = logging.getLogger(__name__)

MAX_NAME = 128
PATIENCE = 10.0
"""Seconds within which the engine must end a step."""


class AdapterRunner(Protocol):
    """Lays adapters out for the model it runs; in any thread."""

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter: ...


@dataclass(frozen=True, slots=True)
class AdapterLoader:
    """Reads folders, for one model."""

    config: LlamaConfig
    runner: AdapterRunner
    max_rank: int

    def read(self, folder: Path) -> Adapter:
        """Read a PEFT folder and check that the model can run with it.

        Raises:
            ModelError: it is damaged, not plain LoRA, or of another model.
            CapacityError: its rank is above the bound.
        """
        adapter = read_adapter(folder)
        adapter.check_fits(self.config.shapes())
        if adapter.rank > self.max_rank:
            raise CapacityError(
                f"{adapter.source}: its rank is {adapter.rank}, this decoder takes up to "
                f"max_lora_rank = {self.max_rank}: raise that setting"
            )
        digest = adapter.digest  # hash it here, in a thread that nobody waits for
        log.info("%s %s, rank %d", adapter.source, digest[:12], adapter.rank)
        return adapter

    def load_all(self, folders: Mapping[str, str], most: int) -> dict[str, LoadedAdapter]:
        """Load adapters before the decoder serves.

        Raises:
            ModelError, CapacityError: one of them cannot be used, or there are more than `most`.
        """
        loaded: dict[str, LoadedAdapter] = {}
        known: dict[str, LoadedAdapter] = {}
        for name, folder in folders.items():
            _check_name(name)
            adapter = self.read(Path(folder))
            if adapter.digest not in known:
                _check_room(name, known, most)
                known[adapter.digest] = self.runner.load_adapter(adapter)
            loaded[name] = known[adapter.digest]
        return loaded


class Adapters:
    """Names and what they stand for. Lives in the event loop.

    Args:
        most: contents in memory at a time; while one is swapped, one more.
        loaded: what there is at first.
    """

    def __init__(
        self, loader: AdapterLoader, worker: Worker, most: int, loaded: Mapping[str, LoadedAdapter]
    ) -> None:
        self._loader, self._worker, self._most = loader, worker, most
        self._loaded = dict(loaded)
        self._loading = asyncio.Lock()
        self._watchers: dict[Callable[[str], None], None] = {}

    def names(self) -> list[str]:
        """Return the names that are loaded, sorted."""
        return sorted(self._loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        """Return what a name stands for now; None: nothing."""
        return self._loaded.get(name)

    def get(self, name: str) -> LoadedAdapter:
        """Return what a name stands for now.

        Raises:
            ModelError: nothing is loaded under it; the message has the names there are.
        """
        adapter = self.find(name)
        if adapter is None:
            known = ", ".join(self.names()) or "none"
            raise ModelError(f"adapter {name!r} is not loaded here; loaded are: {known}")
        return adapter

    async def load(self, name: str, folder: Path) -> LoadedAdapter:
        """Read a PEFT folder and let `name` stand for it from now on.

        Steps go on meanwhile; sequences that run with what the name stood for keep it.

        Raises:
            ModelError: it cannot be used with this model; the name stands for what it stood for.
            CapacityError: its rank, or the number of adapters in memory, is above the bound, or the
                engine stands still.
            InputError: the name is empty, too long or not printable.
        """
        _check_name(name)
        async with self._loading:
            adapter = await asyncio.to_thread(self._loader.read, folder)
            kept = {a.digest: a for n, a in self._loaded.items() if n != name}
            known = kept | {a.digest: a for a in self._loaded.values()}
            for used in await self._worker.ask(_in_use, PATIENCE):
                if used.digest not in known:  # swapped or unloaded, and not let go of yet
                    kept[used.digest] = known[used.digest] = used
            loaded = known.get(adapter.digest)
            if loaded is None:
                _check_room(name, kept, self._most)
                loaded = await asyncio.to_thread(self._loader.runner.load_adapter, adapter)
            self._loaded[name] = loaded
        log.info("adapter %r is %s", name, loaded.digest[:12])
        self._tell(name)
        return loaded

    async def unload(self, name: str) -> None:
        """Let `name` stand for nothing; sequences that run with what it stood for keep it.

        Raises:
            ModelError: nothing is loaded under it.
        """
        async with self._loading:
            self.get(name)
            del self._loaded[name]
        log.info("adapter %r is unloaded", name)
        self._tell(name)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with every name that stands for something else from now on."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Callable[[str], None]) -> None:
        """Do not call it any more."""
        self._watchers.pop(watcher, None)

    def _tell(self, name: str) -> None:
        for watcher in list(self._watchers):
            watcher(name)


def _in_use(engine: Engine) -> list[LoadedAdapter]:
    """Return what the engine's sequences run with."""
    return [s.adapter for s in engine.sequences if s.adapter is not None]


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InputError(
            f"adapter name {name[:MAX_NAME]!r}: expected 1 to {MAX_NAME} printable characters"
        )


def _check_room(name: str, kept: Iterable[str], most: int) -> None:
    digests = sorted(kept)
    if len(digests) >= most:
        raise CapacityError(
            f"adapter {name!r}: {len(digests)} adapters are in memory, max_adapters = {most} "
            f"({', '.join(digest[:12] for digest in digests)}; swapped and unloaded ones stay as "
            "long as turns end with them): unload one, or raise that setting"
        )
