"""Splicing a sequence: what is equal stays cached."""

from hypothesis import given
from hypothesis import strategies as st

from cloud.engine.sequence import Generation, Sequence
from shared.frames import Sampling

ids = st.lists(st.integers(0, 3), max_size=12)


@given(ids, ids, st.data())
def test_a_splice_keeps_the_longest_common_prefix_cached(
    old: list[int], new: list[int], data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, len(old)))
    cached = data.draw(st.integers(0, len(old)))
    sequence = Sequence(0, list(old), cached)
    sequence.splice(keep, new)
    whole = old[:keep] + new
    assert sequence.ids == whole
    same = next((i for i, (a, b) in enumerate(zip(old, whole, strict=False)) if a != b), None)
    prefix = min(len(old), len(whole)) if same is None else same
    assert sequence.cached == min(cached, prefix)


def test_a_splice_that_changes_no_id_changes_nothing() -> None:
    sequence = Sequence(0, [1, 2, 3], cached=3)
    assert sequence.splice(1, [2, 3]) == 0
    assert sequence.cached == 3


def test_a_generating_sequence_always_has_a_token_to_run() -> None:
    sequence = Sequence(0, [1, 2, 3], cached=3)
    assert sequence.remaining == 0
    sequence.generation = Generation(Sampling(), 1, frozenset(), lambda _t, _w: None)
    assert sequence.remaining == 1
    assert sequence.decoding
