"""The decoder's end alone: what it applies, what it asks for again, and whom it refuses."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from shared import frames
from shared.errors import (
    CapacityError,
    ContextLengthError,
    LocalProtocolError,
    RemoteProtocolError,
    SupersededError,
)
from shared.frames import Frame, Held, HelloBody, Load, OpenBody, WelcomeBody
from shared.session import (
    Cancelled,
    Closed,
    CloudSession,
    CloudStream,
    Ended,
    Event,
    FetchAsked,
    Greeted,
    HistorySet,
    Opened,
    Reopened,
    Revised,
)
from shared.session.cloud import (
    ACK_EVERY,
    ACK_WITHIN,
    MAX_BLOB_DATA,
    MAX_OVER,
    MAX_STREAMS,
    MAX_TEXT,
    greeting,
)
from shared.session.cloud_stream import MAX_RESYNCS, RESYNC_JUMP
from shared.session.conversation_log import MAX_TURN
from shared.tokenlog import crc_of, history_crc
from tests.relay_world import VOCABULARY, check_ids

T = 1000.0
SHA = "a" * 64
HELLO = HelloBody("car", "b0", epoch=3, clock_us=1)
BODY = OpenBody("c")


def sent(session: CloudSession) -> list[Frame]:
    """Return the frames that `session` owes the wire."""
    decoded = [frames.decode(data) for data, _ in session.take_outgoing()]
    return [frame for frame in decoded if frame is not None]


def hear(session: CloudSession, *arriving: Frame, now: float = T) -> list[Event]:
    """Let frames arrive; return all events."""
    return [e for frame in arriving for e in session.receive(frames.encode(frame), now)]


def welcome(
    session: CloudSession, held: dict[int, CloudStream] | None = None, hello: HelloBody = HELLO
) -> WelcomeBody:
    """Greet as a device and be welcomed."""
    assert hear(session, frames.Hello(0, hello.epoch, hello)) == [Greeted(hello)]
    body = WelcomeBody("d", "b1", 0, SHA, SHA, "m", SHA, vocabulary=VOCABULARY)
    session.welcome(greeting(hello, body, known_epoch=3), held or {})
    (answer,) = sent(session)
    assert isinstance(answer, frames.Welcome)
    return answer.body


def begin() -> tuple[CloudSession, CloudStream]:
    """Return a session under epoch 4 with an open stream 1 at sequence number 1."""
    session = CloudSession(check_ids)
    welcome(session)
    assert hear(session, frames.Open(1, 4, 1, BODY)) == [Opened(1, BODY)]
    return session, session.streams[1]


def commit(seq: int, base: int, ids: Sequence[int], before: Sequence[int] = ()) -> frames.Commit:
    crc = crc_of([*before[:base], *ids])
    return frames.Commit(1, 4, seq, turn=0, base=base, ids=tuple(ids), crc=crc)


def end(seq: int, ids: Sequence[int], *, attempt: int = 0, turn: int = 0) -> frames.EndTurn:
    """The end of a turn that has nothing but `ids`."""
    length, crc = len(ids), crc_of(ids)
    return frames.EndTurn(
        1, 4, seq, turn=turn, attempt=attempt, ids=tuple(ids), length=length, crc=crc
    )


def ack(turn: int, ids: Sequence[int], *, again: bool = False) -> frames.ReplyAck:
    return frames.ReplyAck(1, 4, turn=turn, index=len(ids), crc=crc_of(ids), again=again)


def the_resync(session: CloudSession) -> Held:
    (frame,) = sent(session)
    assert isinstance(frame, frames.Resync)
    return frame.held


# --- greeting


def test_before_hello_nothing_counts() -> None:
    session = CloudSession(check_ids)
    fetch = frames.Fetch(0, 0, digest=SHA, offset=0)
    assert hear(session, frames.Open(1, 0, 1, BODY), frames.Bye(1, 9, 2), fetch) == []
    session.notice(0, "t", "x")
    assert (sent(session), session.streams) == ([], {})


def test_welcome_grants_the_next_epoch_and_says_what_is_held() -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1, 2]))
    session.detach()
    later = CloudSession(check_ids, credit=5)
    hello = HelloBody("car", "b0", minor=9, epoch=1, max_frame=1000, clock_us=2)
    body = welcome(later, {7: stream}, hello)
    assert (body.epoch, body.answers, body.credit) == (4, "b0/2", 5)
    assert (body.minor, body.max_frame) == (frames.MINOR, 1000)
    assert body.held == [Held(7, 0, 0, 2, crc_of([1, 2]), False, 0, 2)]


def test_a_second_copy_of_hello_is_no_greeting_and_gets_the_same_answer() -> None:
    session = CloudSession(check_ids)
    body = welcome(session)
    assert hear(session, frames.Hello(0, 3, HELLO)) == []
    assert sent(session) == [frames.Welcome(0, 4, body)]
    older = HelloBody("car", "b0", epoch=3, clock_us=0)
    assert hear(session, frames.Hello(0, 3, older)) == []
    assert session.take_outgoing() == []
    session.detach()
    assert hear(session, frames.Hello(0, 3, HELLO)) == []
    assert sent(session) == [], "whoever is gone is welcomed no more"
    assert hear(session, frames.Hello(0, 3, HelloBody("car", "other boot"))) != []


def test_frames_that_overtake_their_open_are_told_again() -> None:
    session = CloudSession(check_ids)
    welcome(session)
    assert hear(session, commit(2, 0, [1, 2])) == []
    assert sent(session) == []
    assert hear(session, frames.Open(1, 4, 1, BODY)) == [Opened(1, BODY)]
    held = the_resync(session)
    assert (held.turn, held.length) == (0, 0)
    assert hear(session, commit(held.seq + 1, 0, [1, 2])) == [Revised(1)]


def test_a_refusal_reaches_a_device_of_any_epoch() -> None:
    session = CloudSession(check_ids)
    session.refuse(ContextLengthError("no"))
    assert sent(session) == [frames.Error(0, 0, code=ContextLengthError.code, text="no")]


def test_an_older_epoch_is_told_that_it_was_superseded_and_a_newer_one_ignored() -> None:
    session, _ = begin()
    assert hear(session, frames.Bye(1, 3, 2), frames.Bye(1, 5, 2)) == []
    (error,) = sent(session)
    assert isinstance(error, frames.Error)
    assert (error.stream, error.epoch, error.code) == (0, 3, SupersededError.code)
    assert "another agent uses the same identity" in error.text


def test_a_session_whose_stream_lives_elsewhere_lets_go_of_it() -> None:
    old, stream = begin()
    new = CloudSession(check_ids)
    hear(new, frames.Hello(0, 4, HELLO))
    body = WelcomeBody("d", "b1", 9, SHA, SHA, "m", SHA)
    new.welcome(body, {1: stream})
    assert hear(old, commit(2, 0, [1])) == []
    (error,) = sent(old)
    assert isinstance(error, frames.Error)
    assert (error.epoch, error.code) == (4, SupersededError.code)
    old.detach()
    sent(new)
    assert hear(new, frames.Rewind(1, 9, 2, turn=0, to=0)) == [Revised(1)]
    assert hear(new, frames.EndTurn(1, 9, 3, turn=0, attempt=0, ids=(), length=0, crc=0)) != []
    stream.extend_reply([1])
    assert [type(frame) for frame in sent(new)] == [frames.Tokens], "the old session took nothing"


def test_a_new_greeting_on_the_same_connection_lets_go_of_the_streams_it_does_not_name() -> None:
    session, stream = begin()
    hear(session, end(2, []))
    welcome(session, {}, HelloBody("car", "b1", epoch=0))
    stream.extend_reply([1, 2])
    assert sent(session) == []
    assert stream.reply == [1, 2]


# --- acknowledgements


def test_eight_frames_are_acknowledged_at_once_and_fewer_within_a_tenth_of_a_second() -> None:
    session, _ = begin()
    assert session.timer() == T + ACK_WITHIN
    session.load = Load.YELLOW
    for n in range(ACK_EVERY - 1):
        hear(session, commit(2 + n, n, [n], before=range(n)))
    assert sent(session) == [frames.Ack(1, 4, seq=8, credit=64, load=1)]
    hear(session, commit(9, 7, [7], before=range(7)), now=T + 0.05)
    session.credit = 1
    assert session.poll(T + ACK_WITHIN - 0.01) == []
    assert sent(session) == []
    session.poll(T + ACK_WITHIN)
    assert sent(session) == [frames.Ack(1, 4, seq=9, credit=1, load=1)]
    assert session.timer() is None


def test_a_duplicate_changes_nothing_and_is_confirmed_again() -> None:
    session, stream = begin()
    first = commit(2, 0, [1, 2])
    assert hear(session, first, first, frames.Open(1, 4, 1, BODY)) == [Revised(1)]
    session.poll(T + 1)
    assert sent(session) == [frames.Ack(1, 4, seq=2, credit=64, load=0)]
    assert stream.log.ids == [1, 2]
    assert hear(session, first, first) == []
    session.poll(T + 2)
    assert sent(session) == [frames.Ack(1, 4, seq=2, credit=64, load=0)]
    session.poll(T + 3)
    assert sent(session) == []


def test_an_old_frame_behind_a_gap_is_answered_by_what_is_held_not_confirmed() -> None:
    session, stream = begin()
    assert hear(session, commit(3, 2, [3])) == []
    held = the_resync(session)
    assert hear(session, commit(3, 2, [3])) == []
    session.poll(T + 1)
    assert the_resync(session) == held, "the first one may be lost"
    assert hear(session, commit(held.seq + 1, 0, [1, 2, 3])) == [Revised(1)]
    session.poll(T + 2)
    assert sent(session) == [frames.Ack(1, 4, seq=held.seq + 1, credit=64, load=0)]
    assert stream.log.ids == [1, 2, 3]


# --- tails


def tail(after: int, tick: int, ids: Sequence[int], turn: int = 0) -> frames.Tail:
    return frames.Tail(1, 4, turn=turn, after=after, tick=tick, ids=tuple(ids))


def test_a_tail_counts_only_right_behind_its_frame_and_with_a_newer_tick() -> None:
    session, stream = begin()
    assert hear(session, tail(1, 5, [7])) == [Revised(1)]
    assert hear(session, tail(1, 5, [8]), tail(1, 4, [8]), tail(0, 6, [8])) == []
    assert hear(session, tail(2, 7, [8]), tail(1, 8, [8], turn=1)) == []
    assert hear(session, tail(1, 9, [7])) == [], "the same tail is no revision"
    assert stream.log.tail == (7,)
    assert hear(session, commit(2, 0, [1])) == [Revised(1)]
    assert stream.log.ids == [1]
    assert hear(session, tail(1, 10, [7])) == [], "it was sent before the commit"
    assert hear(session, tail(2, 11, [9])) == [Revised(1)]


def test_a_late_tail_after_a_rewind_or_the_end_of_its_turn_is_dropped() -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1, 2]), frames.Rewind(1, 4, 3, turn=0, to=1))
    assert hear(session, tail(2, 1, [9])) == []
    hear(session, frames.Rewind(1, 4, 4, turn=0, to=0), end(5, []))
    assert hear(session, tail(4, 2, [9]), tail(5, 3, [9])) == []
    hear(session, frames.Reopen(1, 4, 6, turn=0, attempt=1))
    assert hear(session, tail(5, 4, [9])) == []
    assert hear(session, tail(6, 5, [9])) == [Revised(1)]
    assert stream.log.ids == [9]


def test_a_restarted_edge_counts_its_ticks_anew() -> None:
    session, stream = begin()
    hear(session, tail(1, 500, [1]))
    session.detach()
    assert stream.log.tail == ()
    welcome(session, {1: stream}, HelloBody("car", "new boot", epoch=0))
    assert hear(session, tail(1, 1, [2])) == [Revised(1)]


# --- resyncs


def test_a_gap_is_reported_once_and_whatever_was_under_way_is_old() -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1]))
    late = [commit(n, n - 2, [n], before=[1, *range(3, n)]) for n in range(3, 9)]
    assert hear(session, *late[1:], *late) == []
    held = the_resync(session)
    assert held == Held(1, 0, 0, 1, crc_of([1]), False, 0, 2 + RESYNC_JUMP)
    assert hear(session, commit(3 + RESYNC_JUMP, 1, [3], before=[1])) == [Revised(1)]
    assert stream.log.ids == [1, 3]
    session.poll(T + 1)
    (confirmed,) = sent(session)
    assert isinstance(confirmed, frames.Ack)
    assert confirmed.seq == 3 + RESYNC_JUMP


@pytest.mark.parametrize(
    "bad",
    [
        frames.Commit(1, 4, 3, turn=0, base=2, ids=(3,), crc=1),  # the CRC has drifted
        commit(3, 1, [9], before=[1]),  # below what is committed, without a rewind
        commit(3, 3, [9], before=[1, 2, 3]),  # beyond it
        frames.Commit(1, 4, 3, turn=1, base=0, ids=(3,), crc=crc_of([3])),
        frames.Rewind(1, 4, 3, turn=0, to=3),
        frames.Rewind(1, 4, 3, turn=1, to=0),
        frames.EndTurn(1, 4, 3, turn=0, attempt=0, ids=(3,), length=2, crc=crc_of([1, 2, 3])),
        frames.EndTurn(1, 4, 3, turn=0, attempt=0, ids=(3,), length=3, crc=1),
        frames.EndTurn(1, 4, 3, turn=1, attempt=0, ids=(), length=0, crc=0),
        frames.Cancel(1, 4, 3, turn=0, heard=0),
        frames.Reopen(1, 4, 3, turn=1, attempt=1),
        frames.History(1, 4, 3, turn=1, attempt=0, user_ids=(), reply_ids=(), done=True),
    ],
    ids=lambda frame: f"{type(frame).__name__}",
)
def test_what_does_not_fit_is_answered_by_what_is_held_and_changes_nothing(
    bad: frames.Reliable,
) -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1, 2]), tail(2, 1, [5]))
    assert hear(session, bad, bad) == []
    held = the_resync(session)
    assert (held.turn, held.length, held.crc, held.ended) == (0, 2, crc_of([1, 2]), False)
    assert (stream.log.ids, stream.ended) == ([1, 2], False)


def test_a_turn_that_has_ended_is_not_revised_nor_ended_again() -> None:
    session, stream = begin()
    assert hear(session, end(2, [1])) == [Ended(1)]
    for n, late in enumerate(
        (
            commit(3, 1, [2], before=[1]),
            frames.Rewind(1, 4, 0, turn=0, to=0),
            end(0, [1]),
            end(0, [1], attempt=1),
        )
    ):
        frame = msgspec.structs.replace(late, seq=3 + n * RESYNC_JUMP)
        assert hear(session, frame) == []
        assert the_resync(session).ended
    assert (stream.log.ids, stream.ended, stream.attempt) == ([1], True, 0)


def test_a_peer_that_never_finds_its_way_back_is_given_up() -> None:
    session, _ = begin()
    bad = frames.Rewind(1, 4, 0, turn=5, to=0)
    for n in range(MAX_RESYNCS):
        hear(session, frames.Rewind(1, 4, 2 + n * RESYNC_JUMP, turn=5, to=0))
    with pytest.raises(RemoteProtocolError, match="8 resyncs without progress"):
        hear(session, frames.Rewind(1, 4, 2 + MAX_RESYNCS * RESYNC_JUMP, turn=5, to=0))
    assert hear(session, bad) == []


def test_progress_between_resyncs_is_forgiven() -> None:
    session, stream = begin()
    for n in range(3 * MAX_RESYNCS):
        hear(session, frames.Rewind(1, 4, stream.seq + 1, turn=5, to=0))
        hear(session, commit(stream.seq + 1, n, [n], before=range(n)))
    assert len(stream.log) == 3 * MAX_RESYNCS


# --- replies


def test_a_complete_reply_stays_until_the_edge_has_all_of_it() -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10, 11])
    stream.extend_reply([])
    stream.finish("stop")
    assert [type(frame) for frame in sent(session)] == [frames.Tokens, frames.Finish]
    assert (stream.turn, stream.ended, stream.held.attempt) == (0, True, 0)
    assert hear(session, ack(0, [10])) == []
    assert (stream.delivered, stream.turn) == (1, 0)
    assert hear(session, ack(0, [10], again=True)) == []
    tokens, finish = sent(session)
    assert tokens == frames.Tokens(1, 4, turn=0, attempt=0, index=1, ids=(11,))
    assert finish == frames.Finish(1, 4, turn=0, attempt=0, length=2, reason="stop")
    assert hear(session, ack(0, [10, 11])) == []
    assert (stream.turn, stream.ended, len(stream.log)) == (1, False, 0)
    assert stream.held.history == history_crc([1], [10, 11])
    assert hear(session, ack(0, [10, 11]), ack(7, [])) == []


def test_a_reply_can_be_extended_and_finished_only_while_it_is_due() -> None:
    session, stream = begin()
    with pytest.raises(LocalProtocolError, match="turn 0 is not asked for"):
        stream.extend_reply([1])
    hear(session, end(2, []))
    stream.finish("stop")
    call: Callable[[], object]
    for call in (lambda: stream.extend_reply([1]), lambda: stream.finish("stop")):
        with pytest.raises(LocalProtocolError, match=r"turn 0 is complete \(stop\)"):
            call()


def test_the_end_of_a_turn_can_be_taken_back_even_when_the_reply_is_complete() -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10])
    stream.finish("stop")
    sent(session)
    assert hear(session, frames.Reopen(1, 4, 3, turn=0, attempt=1)) == [Reopened(1, 0)]
    assert (stream.reply, stream.reason, stream.log.ids) == ([], "", [1])
    again = frames.EndTurn(1, 4, 4, turn=0, attempt=1, ids=(2,), length=2, crc=crc_of([1, 2]))
    assert hear(session, again) == [Ended(1)]
    stream.extend_reply([20])
    (tokens,) = sent(session)
    assert isinstance(tokens, frames.Tokens)
    assert (tokens.attempt, tokens.ids) == (1, (20,))


def test_a_cut_reply_says_whether_it_was_complete_before() -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10, 11, 12])
    assert hear(session, frames.Cancel(1, 4, 3, turn=0, heard=2)) == [Cancelled(1, 0, 2, (1,))]
    assert stream.held.history == history_crc([1], [10, 11])
    hear(session, end(4, [2], turn=1))
    stream.extend_reply([20])
    stream.finish("stop")
    assert hear(session, frames.Cancel(1, 4, 5, turn=1, heard=0)) == [Cancelled(1, 1, 0)]
    hear(session, end(6, [3], turn=2))
    stream.finish("error")
    assert hear(session, frames.Cancel(1, 4, 7, turn=2, heard=0)) == [
        Reopened(1, 2),
        Cancelled(1, 2, 0, (3,)),
    ]
    assert stream.turn == 3


def test_more_heard_than_was_said_does_not_fit() -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10])
    sent(session)
    assert hear(session, frames.Cancel(1, 4, 3, turn=0, heard=2)) == []
    assert the_resync(session).ended


def test_a_restored_reply_goes_on_behind_what_the_edge_has() -> None:
    session, stream = begin()
    done = frames.History(1, 4, 2, turn=0, attempt=0, user_ids=(1,), reply_ids=(9,), done=True)
    open_ = frames.History(1, 4, 3, turn=1, attempt=2, user_ids=(2,), reply_ids=(8,), done=False)
    assert hear(session, done, open_) == [
        HistorySet(1, 0, (1,), (9,), True),
        HistorySet(1, 1, (2,), (8,), False),
        Ended(1),
    ]
    stream.extend_reply([7])
    (tokens,) = sent(session)
    assert tokens == frames.Tokens(1, 4, turn=1, attempt=2, index=1, ids=(7,))


def test_a_reply_waits_on_a_new_connection_until_the_edge_says_what_it_has() -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10, 11])
    sent(session)
    session.detach()
    stream.extend_reply([12])
    welcome(session, {1: stream}, HelloBody("car", "b0", epoch=3, clock_us=2))
    stream.extend_reply([13])
    stream.finish("stop")
    assert sent(session) == []
    assert hear(session, ack(0, [10], again=True)) == []
    tokens, finish = sent(session)
    assert isinstance(tokens, frames.Tokens)
    assert (tokens.index, tokens.ids) == (1, (11, 12, 13))
    assert isinstance(finish, frames.Finish)


@pytest.mark.parametrize("theirs", [[10, 99], [10, 11, 12]])
def test_a_reply_that_went_on_elsewhere_is_void_here(theirs: list[int]) -> None:
    session, stream = begin()
    hear(session, end(2, [1]))
    stream.extend_reply([10, 11])
    sent(session)
    assert hear(session, ack(0, theirs, again=True)) == [Reopened(1, 0)]
    held = the_resync(session)
    assert (held.turn, held.ended, held.length) == (0, False, 1)


# --- ids, kinds, numbers


@pytest.mark.parametrize(
    "frame",
    [
        commit(3, 2, [VOCABULARY], before=[1, 2]),
        tail(2, 1, [VOCABULARY]),
        end(3, [VOCABULARY]),
        frames.History(1, 4, 3, turn=0, attempt=0, user_ids=(VOCABULARY,), reply_ids=(), done=True),
        frames.History(1, 4, 3, turn=0, attempt=0, user_ids=(), reply_ids=(VOCABULARY,), done=True),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_an_id_that_a_peer_may_not_send_ends_its_connection_and_changes_nothing(
    frame: Frame,
) -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1, 2]))
    with pytest.raises(RemoteProtocolError, match=f"token id {VOCABULARY}"):
        hear(session, frame)
    assert (stream.log.ids, stream.turn, stream.ended) == ([1, 2], 0, False)


def test_a_frame_that_only_goes_down_ends_the_connection() -> None:
    session, _ = begin()
    with pytest.raises(RemoteProtocolError, match="Ack goes down, not up"):
        hear(session, frames.Ack(1, 4, seq=1, credit=1, load=0))


def test_a_reliable_frame_of_no_known_use_ends_the_connection() -> None:
    _, stream = begin()
    with pytest.raises(RemoteProtocolError, match="Reliable is not an upward frame"):
        stream.apply(frames.Reliable(1, 4, 2))


def test_a_conversation_ends_with_bye_and_no_late_copy_of_open_revives_it() -> None:
    session, stream = begin()
    assert hear(session, frames.Bye(1, 4, 2)) == [Closed(1, "c")]
    assert sent(session) == [frames.Ack(1, 4, seq=2, credit=64, load=0)]
    assert hear(session, frames.Bye(1, 4, 2), frames.Open(1, 4, 1, BODY), end(2, [])) == []
    assert session.streams == {}
    assert hear(session, frames.Open(2, 4, 1, BODY)) == [Opened(2, BODY)]
    assert stream.turn == 0


def test_stream_zero_is_the_connection_and_no_conversation() -> None:
    session, _ = begin()
    with pytest.raises(RemoteProtocolError, match="OPEN of stream 0"):
        hear(session, frames.Open(0, 4, 1, BODY))


def test_one_conversation_too_many_is_refused_and_the_others_go_on() -> None:
    session, _ = begin()
    for number in range(2, MAX_STREAMS + 1):
        hear(session, frames.Open(number, 4, 1, OpenBody(f"c{number}")))
    assert hear(session, frames.Open(MAX_STREAMS + 1, 4, 1, OpenBody("more"))) == []
    error = sent(session)[-1]
    assert isinstance(error, frames.Error)
    assert (error.stream, error.code) == (MAX_STREAMS + 1, CapacityError.code)
    assert hear(session, frames.Commit(MAX_STREAMS + 1, 4, 2, turn=0, base=0, ids=(), crc=0)) == []
    assert hear(session, commit(2, 0, [1])) == [Revised(1)]


def test_a_refused_conversation_is_over_and_the_others_go_on() -> None:
    session, stream = begin()
    hear(session, frames.Open(2, 4, 1, OpenBody("other")))
    session.refuse_stream(1, ContextLengthError("too long"))
    assert sent(session) == [frames.Error(1, 4, code=ContextLengthError.code, text="too long")]
    assert (list(session.streams), hear(session, commit(2, 0, [1]))) == ([2], [])
    assert stream.log.ids == []


def test_opening_anew_drops_what_was_held() -> None:
    session, stream = begin()
    hear(session, commit(2, 0, [1]), tail(2, 1, [5]))
    body = OpenBody("c", system="new")
    assert hear(session, frames.Open(1, 4, 3, body)) == [Opened(1, body)]
    assert (stream.log.ids, stream.body.system, stream.held.history) == ([], "new", 0)


def test_a_blob_goes_down_in_pieces_and_past_its_end_there_is_nothing() -> None:
    session, _ = begin()
    content = bytes(range(256)) * 300
    offset, got = 0, b""
    while offset < len(content):
        (asked,) = hear(session, frames.Fetch(0, 4, digest=SHA, offset=offset))
        assert asked == FetchAsked(SHA, offset)
        session.blob(SHA, offset, content)
        (blob,) = sent(session)
        assert isinstance(blob, frames.Blob)
        assert len(blob.data) <= MAX_BLOB_DATA
        assert blob.size == len(content)
        got += blob.data
        offset += len(blob.data)
    assert got == content
    session.blob(SHA, 1 << 40, content)
    (past,) = sent(session)
    assert isinstance(past, frames.Blob)
    assert past.data == b""


def test_a_notice_names_its_stream() -> None:
    session, _ = begin()
    session.notice(1, "turns-dropped", "turns 0..2")
    assert sent(session) == [frames.Notice(1, 4, topic="turns-dropped", text="turns 0..2")]


def test_a_kind_that_may_be_skipped_is_skipped() -> None:
    session, _ = begin()
    assert session.receive(b"\x10\x60\x01\x04later", T) == []


# --- what a stranger may not make us hold


def test_a_turn_is_no_longer_than_a_frame_could_restore_however_it_grows() -> None:
    full = [7] * MAX_TURN
    end_ids = (7,) * (MAX_TURN + 1)
    for arriving in (
        commit(3, MAX_TURN, [8], before=full),
        frames.Tail(1, 4, turn=0, after=2, tick=1, ids=(8,)),
        frames.EndTurn(1, 4, 3, turn=0, attempt=0, ids=(8,), length=MAX_TURN + 1, crc=0),
        frames.History(1, 4, 3, turn=0, attempt=0, user_ids=end_ids, reply_ids=(), done=True),
    ):
        session, stream = begin()
        assert hear(session, commit(2, 0, full)) == [Revised(1)]
        with pytest.raises(
            RemoteProtocolError, match=f"has {MAX_TURN + 1} ids; at most {MAX_TURN}"
        ):
            hear(session, arriving)
        assert len(stream.log.ids) == MAX_TURN


def test_a_conversation_has_one_stream_and_a_stream_one_conversation() -> None:
    for number, name in ((1, "other"), (2, "c")):
        session, stream = begin()
        with pytest.raises(RemoteProtocolError, match="a conversation has one stream"):
            hear(session, frames.Open(number, 4, 2, OpenBody(name)))
        assert (stream.body, list(session.streams)) == (BODY, [1])


def test_a_copy_of_the_first_frame_of_a_closed_conversation_is_still_ignored() -> None:
    session, _ = begin()
    hear(session, frames.Bye(1, 4, 2), frames.Open(2, 4, 1, BODY))
    assert hear(session, frames.Open(1, 4, 1, BODY)) == []
    assert list(session.streams) == [2]


@pytest.mark.parametrize("conversations", [{1: "c", 2: "c"}, {0: "c"}])
def test_a_greeting_that_names_a_conversation_twice_or_as_the_connection_is_refused(
    conversations: dict[int, str],
) -> None:
    session = CloudSession(check_ids)
    hello = HelloBody("car", "b0", conversations=conversations)
    with pytest.raises(RemoteProtocolError, match="a conversation has one stream"):
        hear(session, frames.Hello(0, 0, hello))


def test_a_message_that_repeats_what_a_device_sent_fits_a_frame() -> None:
    session, _ = begin()
    long = "é" * frames.MAX_FRAME
    session.refuse(ContextLengthError(long))
    session.refuse_stream(1, ContextLengthError(long))
    session.notice(0, "no-blob", long)
    texts = [
        frame.text for frame in sent(session) if isinstance(frame, frames.Error | frames.Notice)
    ]
    assert texts == ["é" * MAX_TEXT] * 3


def test_only_the_last_closed_conversations_are_remembered_to_know_a_copy_by() -> None:
    session, _ = begin()
    hear(session, frames.Bye(1, 4, 2))
    for number in range(2, MAX_OVER + 2):
        hear(session, frames.Open(number, 4, 1, BODY), frames.Bye(number, 4, 2))
    assert len(session._over) == MAX_OVER
    assert hear(session, frames.Open(MAX_OVER + 1, 4, 1, BODY)) == []
