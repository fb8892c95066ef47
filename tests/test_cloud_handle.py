"""A conversation's hold on the engine: one sequence with one adapter, whatever is swapped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engine.account import Account
from cloud.engine.engine import Engine
from cloud.engine.sequence import Sequence
from cloud.handle import SequenceHandle
from shared.errors import ModelError
from tests.test_cloud_engine import generation, run
from tests.test_cloud_engine_prefix import honest_engine


@dataclass(frozen=True)
class Content:
    digest: str
    rank: int = 1
    num_bytes: int = 1


@dataclass
class Names:
    """A registry without loading."""

    loaded: dict[str, Content] = field(default_factory=dict[str, Content])
    watchers: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]])

    def find(self, name: str) -> Content | None:
        return self.loaded.get(name)

    def get(self, name: str) -> Content:
        if name not in self.loaded:
            raise ModelError(name)
        return self.loaded[name]

    def put(self, name: str, digest: str) -> None:
        self.loaded[name] = Content(digest)
        self.tell(name)

    def drop(self, name: str) -> None:
        self.loaded.pop(name, None)
        self.tell(name)

    def tell(self, name: str) -> None:
        for watcher in list(self.watchers):
            watcher(name)

    def watch(self, watcher: Callable[[str], None]) -> None:
        if watcher not in self.watchers:
            self.watchers.append(watcher)

    def unwatch(self, watcher: Callable[[str], None]) -> None:
        if watcher in self.watchers:
            self.watchers.remove(watcher)


class Direct:
    """A worker whose commands run at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, command: Callable[[Engine], None]) -> None:
        command(self.engine)


def open_handle(
    engine: Engine, names: Names, name: str
) -> tuple[SequenceHandle, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    handle = SequenceHandle(
        Direct(engine),  # type: ignore[arg-type]
        names,  # type: ignore[arg-type]
        lambda topic, text: heard.append((topic, text)),
        "tenant",
        Account(),
    )
    handle.open(name)
    return handle, heard


def only(engine: Engine) -> Sequence:
    [sequence] = engine.sequences
    return sequence


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_whatever_is_swapped_a_turn_keeps_its_adapter_and_sees_no_keys_of_another(
    seed: int,
) -> None:
    rng = Random(seed)
    engine, names = honest_engine(40, seed), Names({"a": Content("0"), "b": Content("1")})
    handles = [open_handle(engine, names, name)[0] for name in ("a", "a", "b", "")]
    history: list[list[int]] = [[] for _ in handles]
    begun: list[Content | str | None] = ["between"] * 4
    for _ in range(50):
        number = rng.randrange(4)
        handle, name = handles[number], ("a", "a", "b", "")[number]
        match rng.randrange(6):
            case 0 | 1:
                there = handle.begin_turn()
                assert there == (begun[number] != "between" or not name or name in names.loaded)
                if there and begun[number] == "between":
                    begun[number] = names.find(name)
                if there:
                    words = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
                    handle.tell([*history[number], *words], tail=rng.randrange(2))
                    assert handle._sequence is not None
                    assert handle._sequence.ids == [*history[number], *words]
            case 2:
                handle.end_turn()
                begun[number] = "between"
                history[number] = [*history[number], rng.randrange(2)][-20:]
                handle.tell(history[number])
            case 3:
                names.put(rng.choice("ab"), str(rng.randrange(3)))
            case 4 if rng.random() < 0.4:
                names.drop(rng.choice("ab"))
            case _:
                engine.step()
        for one, content, of in zip(handles, begun, ("a", "a", "b", ""), strict=True):
            sequence = one._sequence
            if content != "between":
                assert sequence is not None
                assert sequence.adapter == content
            else:
                assert sequence is None or sequence.adapter == names.find(of)
        engine.check()
    run(engine)
    for handle in handles:
        handle.close()
    assert names.watchers == []
    assert engine.num_free_blocks == 40


def test_a_swap_there_and_back_between_turns_is_no_news() -> None:
    names = Names({"a": Content("0")})
    engine = honest_engine(10)
    handle, heard = open_handle(engine, names, "a")
    names.put("a", "1")
    names.put("a", "0")
    assert handle.begin_turn()
    assert heard == []
    handle.end_turn()
    names.put("a", "1")
    assert handle.begin_turn()
    assert [topic for topic, _ in heard] == ["adapter"]


def test_a_reply_under_way_is_drawn_to_its_end_with_the_adapter_it_began_with() -> None:
    names = Names({"a": Content("0")})
    engine = honest_engine(10)
    handle, _ = open_handle(engine, names, "a")
    assert handle.begin_turn()
    handle.tell([1, 0, 1], reply=generation(5))
    engine.step()
    names.drop("a")
    run(engine)
    assert len(only(engine).ids) == 8
    handle.end_turn()
    assert list(engine.sequences) == []
    assert not handle.begin_turn()


def test_a_name_that_stands_for_nothing_opens_nothing() -> None:
    engine = honest_engine(10)
    with pytest.raises(ModelError):
        open_handle(engine, Names(), "a")
    assert list(engine.sequences) == []
