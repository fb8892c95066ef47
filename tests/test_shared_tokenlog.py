"""The token log against a plain list, and its CRCs against the definition."""

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import LocalProtocolError
from shared.tokenlog import TokenLog, common_prefix, crc_of, history_crc

token_ids = st.integers(0, 0xFFFFFFFF)
runs = st.lists(token_ids, max_size=12)
bounded = settings(max_examples=150, deadline=None, derandomize=True)


def naive_crc(ids: list[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(ids)}I", *ids))


@bounded
@given(st.lists(st.tuples(st.sampled_from(["commit", "rewind", "tail"]), runs), max_size=20))
def test_it_is_a_list_whose_crc_is_known_at_every_length(
    steps: list[tuple[str, list[int]]],
) -> None:
    log, ids, tail = TokenLog(), list[int](), list[int]()
    for what, run in steps:
        if what == "commit":
            log.commit(run)
            ids += run
        elif what == "tail":
            log.tail = run
            tail = run
        else:
            to = len(run) * len(ids) // 12
            log.rewind(to)
            del ids[to:]
            tail = []
        assert (list(log.committed), log.tail, log.ids) == (ids, tuple(tail), ids + tail)
        assert len(log) == len(ids)
    assert [log.crc(n) for n in range(len(ids) + 1)] == [
        naive_crc(ids[:n]) for n in range(len(ids) + 1)
    ]
    assert log.crc() == naive_crc(ids) == crc_of(ids)


def test_it_begins_with_what_it_is_given() -> None:
    log = TokenLog([1, 2], [3])
    assert (log.ids, len(log), repr(log)) == ([1, 2, 3], 2, "TokenLog([1, 2], (3,))")
    assert (TokenLog().ids, TokenLog().crc()) == ([], 0)


def test_two_logs_match_at_a_length_only_if_their_first_ids_do() -> None:
    a, b = TokenLog([1, 2, 3]), TokenLog([1, 2, 4, 5])
    assert [a.matches(n, b.crc(n)) for n in range(5)] == [True, True, True, False, False]
    assert not a.matches(-1, a.crc(3))
    assert not a.matches(1 << 70, 0)


@pytest.mark.parametrize("to", [-1, 3, 1 << 40])
def test_a_rewind_past_either_end_is_refused_and_changes_nothing(to: int) -> None:
    log = TokenLog([1, 2], [3])
    with pytest.raises(LocalProtocolError, match=rf"rewind to {to}: committed are 0\.\.2"):
        log.rewind(to)
    assert log.ids == [1, 2, 3]


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_what_is_no_token_id_is_refused_and_changes_nothing(bad: int) -> None:
    log = TokenLog([1], [9])
    with pytest.raises(LocalProtocolError, match=f"token id {bad} is outside"):
        log.commit([2, bad, 3])
    assert (log.ids, log.crc()) == ([1, 9], naive_crc([1]))


def test_the_ids_property_is_a_copy_the_caller_may_change() -> None:
    log = TokenLog([1], [2])
    log.ids.append(3)
    assert log.ids == [1, 2]


@bounded
@given(runs, runs)
def test_a_crc_goes_on_where_another_ended(a: list[int], b: list[int]) -> None:
    assert crc_of(b, crc_of(a)) == crc_of(a + b)


@bounded
@given(runs, runs, st.integers(0, 12))
def test_a_history_knows_where_a_turn_ends_and_its_reply_begins(
    user: list[int], reply: list[int], cut: int
) -> None:
    both = user + reply
    moved = history_crc(both[:cut], both[cut:])
    assert (moved == history_crc(user, reply)) == (min(cut, len(both)) == len(user))
    assert history_crc(user, reply, before=1) != history_crc(user, reply)


@bounded
@given(runs, runs, runs)
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int], same: list[int]) -> None:
    x, y = same + a, same + b
    n = common_prefix(x, y)
    assert n >= len(same)
    assert x[:n] == y[:n]
    assert n in (len(x), len(y)) or x[n] != y[n]
    assert common_prefix(tuple(x), y) == n
