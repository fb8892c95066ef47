"""The edge's end alone: what it sends when, and what it takes from a decoder."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from shared import frames
from shared.errors import (
    AccessError,
    ContextLengthError,
    DeltarelayError,
    LinkError,
    LocalProtocolError,
    ModelError,
    RemoteProtocolError,
    SupersededError,
    TokenizerMismatchError,
)
from shared.frames import Frame, Held, HelloBody, Load, OpenBody, WelcomeBody
from shared.session import (
    BlobArrived,
    Connected,
    Disconnected,
    EdgeSession,
    EdgeStream,
    Event,
    Finished,
    Noticed,
    Refused,
    Replied,
)
from shared.session.conversation_log import MAX_TURN
from shared.session.edge import GREET_EVERY, PATIENCE, REPEAT, SILENCE
from shared.session.pacing import LOAD_LASTS, PACE, SLOWER
from shared.session.waits import MAX_WAIT

T = 1000.0
SHA, OTHER = "a" * 64, "b" * 64


def sent(session: EdgeSession) -> list[Frame]:
    """Return the frames that `session` owes the wire."""
    decoded = [frames.decode(data) for data, _ in session.take_outgoing()]
    assert None not in decoded
    return [frame for frame in decoded if frame is not None]


def hear(session: EdgeSession, frame: Frame, now: float = T) -> list[Event]:
    """Let `frame` arrive."""
    return session.receive(frames.encode(frame), now)


def welcome(session: EdgeSession, now: float = T, **changes: Any) -> list[Event]:
    """Connect `session` and answer its HELLO."""
    session.connect(now)
    (hello,) = sent(session)
    assert isinstance(hello, frames.Hello)
    body: dict[str, Any] = {
        "decoder": "d",
        "boot": "b1",
        "epoch": hello.body.epoch + 1,
        "tokenizer": SHA,
        "golden": SHA,
        "model": "m",
        "model_digest": SHA,
        "answers": hello.body.tag,
        "vocabulary": 100,
        "context": 50,
    }
    answer = WelcomeBody(**(body | changes))
    return hear(session, frames.Welcome(0, answer.epoch, answer), now)


def begin(*, max_tokens: int = 256, **changes: Any) -> tuple[EdgeSession, EdgeStream]:
    """Return a connected session with one stream whose OPEN is on the wire and confirmed."""
    session = EdgeSession(HelloBody("car", "b0"))
    welcome(session, **changes)
    stream = session.open(OpenBody("c", max_tokens=max_tokens))
    hear(session, frames.Ack(1, 1, seq=1, credit=changes.get("credit", 64), load=0))
    assert [type(frame) for frame in sent(session)] == [frames.Open]
    return session, stream


def revise(
    session: EdgeSession,
    stream: EdgeStream,
    keep: int,
    ids: Sequence[int],
    tail: Sequence[int] = (),
    *,
    now: float = T,
) -> list[Frame]:
    """Revise, touch, poll; return what goes out."""
    session.touch(stream, now, urgent=stream.revise(keep, ids, tail))
    assert session.poll(now) == []
    return sent(session)


def kinds(out: Sequence[Frame]) -> list[str]:
    return [type(frame).__name__ for frame in out]


# --- greeting


def test_hello_names_the_device_its_conversations_and_the_epoch_it_had() -> None:
    session, _ = begin()
    session.disconnect()
    session.connect(T + 1)
    (hello,) = sent(session)
    assert isinstance(hello, frames.Hello)
    assert (hello.body.device, hello.body.epoch, hello.body.clock_us) == ("car", 1, 1_001_000_000)
    assert hello.body.conversations == {1: "c"}


def test_a_welcome_counts_only_for_the_hello_it_answers() -> None:
    session = EdgeSession(HelloBody("car", "b0"))
    session.connect(T)
    sent(session)
    body = WelcomeBody("d", "b1", 1, SHA, SHA, "m", SHA, answers="another agent/1")
    assert hear(session, frames.Welcome(0, 1, body)) == []
    assert not session.live
    assert welcome(session, T + 1, epoch=5) != []
    assert session.live


def test_a_second_copy_of_welcome_changes_nothing() -> None:
    session, stream = begin()
    revise(session, stream, 0, [1, 2])
    assert session.welcome is not None
    assert hear(session, frames.Welcome(0, 1, session.welcome)) == []
    assert sent(session) == []


def test_without_a_connection_no_welcome_counts() -> None:
    session, _ = begin()
    body = session.welcome
    assert body is not None
    session.disconnect()
    assert hear(session, frames.Welcome(0, 9, body)) == []


@pytest.mark.parametrize(
    ("hello", "changes", "error", "names"),
    [
        ({"tokenizer": OTHER}, {}, TokenizerMismatchError, [SHA, OTHER]),
        ({"golden": OTHER}, {}, TokenizerMismatchError, [SHA, OTHER]),
        ({"model": "mine"}, {"model": "theirs"}, ModelError, ["mine", "theirs"]),
    ],
)
def test_a_mismatch_ends_the_connection_for_good_and_names_both(
    hello: dict[str, Any],
    changes: dict[str, Any],
    error: type[DeltarelayError],
    names: Sequence[str],
) -> None:
    session = EdgeSession(HelloBody("car", "b0", **hello))
    (event,) = welcome(session, **changes)
    assert isinstance(event, Disconnected)
    assert isinstance(event.error, error)
    assert not event.retry
    assert all(name in str(event.error) for name in names)
    assert not session.live
    assert session.timer() is None


def test_a_tokenizer_learned_later_is_stated_in_the_next_hello() -> None:
    session = EdgeSession(HelloBody("car", "b0"))
    assert isinstance(welcome(session)[0], Connected)
    session.use_tokenizer(SHA, OTHER)
    session.connect(T + 1)
    (hello,) = sent(session)
    assert isinstance(hello, frames.Hello)
    assert (hello.body.tokenizer, hello.body.golden) == (SHA, OTHER)


# --- pacing, credit, silence


def test_the_first_words_go_at_once_and_the_next_ones_at_the_pace() -> None:
    session, stream = begin()
    assert kinds(revise(session, stream, 0, [1], [2])) == ["Commit", "Tail"]
    for n in range(1, 6):
        assert revise(session, stream, n, [n + 1], now=T + n * 0.005) == []
    assert session.timer() == T + PACE
    session.poll(T + PACE)
    (commit,) = sent(session)
    assert isinstance(commit, frames.Commit)
    assert (commit.base, commit.ids) == (1, (2, 3, 4, 5, 6)), "one flush for five revisions"


def test_with_nothing_to_say_nothing_is_sent() -> None:
    session, stream = begin()
    revise(session, stream, 0, [1], [2])
    hear(session, frames.Ack(1, 1, seq=2, credit=64, load=0))
    for n in range(1, 10):
        assert revise(session, stream, 1, [], [2], now=T + n) == []
    assert session.timer() is None


def test_a_tail_that_a_commit_has_cleared_is_not_cleared_again() -> None:
    session, stream = begin()
    revise(session, stream, 0, [], [1])
    assert kinds(revise(session, stream, 0, [1], now=T + 0.1)) == ["Commit"]
    assert kinds(revise(session, stream, 1, [], [2], now=T + 0.2)) == ["Tail"]
    (tail,) = revise(session, stream, 1, [], now=T + 0.3)
    assert isinstance(tail, frames.Tail)
    assert tail.ids == ()


def test_every_tail_says_what_it_stands_behind_and_has_a_newer_tick() -> None:
    session, stream = begin()
    tails: list[Frame] = []
    for n in range(4):
        ids = [5] if n == 2 else []
        tails += revise(session, stream, len(stream.log), ids, [n], now=T + n)
    got = [(t.after, t.tick, t.ids) for t in tails if isinstance(t, frames.Tail)]
    assert got == [(1, 1, (0,)), (1, 2, (1,)), (2, 3, (2,)), (2, 4, (3,))]


def test_ids_taken_back_are_rewound_at_once_and_only_if_they_were_told() -> None:
    session, stream = begin()
    revise(session, stream, 0, [1, 2, 3])
    out = revise(session, stream, 1, [9], now=T + 0.001)
    assert kinds(out) == ["Rewind", "Commit"]
    assert isinstance(out[0], frames.Rewind)
    assert out[0].to == 1
    assert revise(session, stream, 2, [4, 5], now=T + 0.002) == []
    assert revise(session, stream, 2, [6], now=T + 0.003) == [], "4 and 5 were never told"
    session.poll(T + 1)
    (commit,) = sent(session)
    assert isinstance(commit, frames.Commit)
    assert (commit.base, commit.ids) == (2, (6,))


def test_the_end_of_a_turn_passes_pacing_and_credit_and_commits_the_tail() -> None:
    session, stream = begin(credit=1)
    revise(session, stream, 0, [1], [2])
    assert revise(session, stream, 1, [2, 3], [4], now=T + 0.01) == []
    assert revise(session, stream, 1, [5], [4], now=T + 1) == [], "out of credit"
    stream.end()
    (end,) = sent(session)
    assert end == frames.EndTurn(
        1, 1, 3, turn=0, attempt=0, ids=(5, 4), length=3, crc=stream.log.crc()
    )


def test_a_stream_out_of_credit_waits_for_an_acknowledgement_and_for_nothing_else() -> None:
    session, stream = begin(credit=1)
    other = session.open(OpenBody("c2"))
    sent(session)
    assert kinds(revise(session, stream, 0, [1])) == ["Commit"]
    assert revise(session, stream, 1, [2], [3], now=T + 1) == []
    assert session.timer() == T + REPEAT, "no time that never comes"
    hear(session, frames.Ack(2, 1, seq=1, credit=1, load=0), T + 1)
    assert kinds(revise(session, other, 0, [7], now=T + 1)) == ["Commit"]
    assert revise(session, stream, 2, [4], now=T + 1.2) == []
    hear(session, frames.Ack(1, 1, seq=2, credit=1, load=2), T + 2)
    assert session.load is Load.RED
    session.poll(T + 2)
    commit, *_ = sent(session)
    assert isinstance(commit, frames.Commit)
    assert (commit.stream, commit.base, commit.ids) == (1, 1, (2, 4))


@pytest.mark.parametrize("load", [Load.YELLOW, Load.RED])
def test_a_busy_decoder_is_told_less_often_and_nothing_is_lost(load: Load) -> None:
    session, stream = begin()
    revise(session, stream, 0, [1])
    hear(session, frames.Ack(1, 1, seq=2, credit=64, load=load), T)
    slow = PACE * SLOWER[load]
    assert revise(session, stream, 1, [2], now=T + PACE) == []
    assert session.timer() == T + slow
    session.poll(T + slow)
    (commit,) = sent(session)
    assert isinstance(commit, frames.Commit)
    assert commit.ids == (2,)
    assert revise(session, stream, 2, [3], [4], now=T + slow + PACE) == []
    stream.end()
    (end,) = sent(session)
    assert isinstance(end, frames.EndTurn)
    assert end.ids == (3, 4), "the end of a turn waits for no load"


def test_under_red_tails_wait_for_the_end_of_the_turn() -> None:
    session, stream = begin()
    for n, load in enumerate((Load.YELLOW, Load.RED, Load.GREEN)):
        hear(session, frames.Ack(1, 1, seq=1, credit=64, load=load), T + n)
        out = revise(session, stream, 0, [], [n], now=T + n + 0.6)
        assert kinds(out) == ([] if load is Load.RED else ["Tail"])


def test_a_load_that_is_not_repeated_is_over_after_a_while() -> None:
    session, stream = begin()
    hear(session, frames.Ack(1, 1, seq=1, credit=64, load=Load.RED), T)
    assert revise(session, stream, 0, [], [1], now=T + LOAD_LASTS - 0.1) == []
    assert kinds(revise(session, stream, 0, [], [2], now=T + LOAD_LASTS + 1)) == ["Tail"]


def test_another_decoder_is_not_as_busy_as_the_last_one_was() -> None:
    session, stream = begin()
    hear(session, frames.Ack(1, 1, seq=1, credit=64, load=Load.RED), T)
    session.disconnect()
    welcome(session, now=T + 0.1)
    sent(session)
    assert kinds(revise(session, stream, 0, [], [2], now=T + 0.2)) == ["Tail"]


def test_a_rewind_passes_credit() -> None:
    session, stream = begin(credit=1)
    revise(session, stream, 0, [1, 2])
    assert kinds(revise(session, stream, 1, [3], now=T + 1)) == ["Rewind"]


def test_a_decoder_that_grants_no_credit_gets_one_frame_at_a_time() -> None:
    session, stream = begin(credit=0)
    hear(session, frames.Ack(1, 1, seq=1, credit=0, load=9))
    assert kinds(revise(session, stream, 0, [1])) == ["Commit"]
    assert revise(session, stream, 1, [2], now=T + 1) == []


def test_touching_a_stream_that_is_gone_does_nothing() -> None:
    session, stream = begin()
    session.touch(stream, T)
    assert hear(session, frames.Error(1, 1, code=31, text="too long")) == [
        Refused(1, 31, "too long")
    ]
    session.touch(stream, T)
    session.forget(stream)
    assert session.poll(T + 1) == []
    stream.revise(0, [1], [])
    assert (sent(session), session.timer()) == ([], None)


# --- patience


def test_the_same_hello_is_sent_again_until_it_is_answered() -> None:
    session = EdgeSession(HelloBody("car", "b0"))
    session.connect(T)
    first = session.take_outgoing()
    assert session.poll(T + GREET_EVERY - 0.01) == []
    assert session.take_outgoing() == []
    for times in (1, 2):
        assert session.poll(T + times * GREET_EVERY) == []
        assert session.take_outgoing() == first
    session.disconnect()
    assert session.poll(T + 99) == []
    assert (session.take_outgoing(), session.timer()) == ([], None)


def test_a_hello_without_an_answer_ends_the_connection_after_three_seconds() -> None:
    session = EdgeSession(HelloBody("car", "b0"))
    session.connect(T)
    assert session.timer() == T + GREET_EVERY
    assert session.poll(T + PATIENCE - 0.01) == []
    (event,) = session.poll(T + PATIENCE)
    assert isinstance(event, Disconnected)
    assert isinstance(event.error, LinkError)
    assert event.retry
    assert "no answer to HELLO" in str(event.error)
    assert (session.timer(), sent(session)) == (None, [])


def test_work_without_an_acknowledgement_ends_it_too_but_idling_does_not() -> None:
    session, stream = begin()
    assert session.poll(T + 100) == []
    revise(session, stream, 0, [1], now=T + 100)
    assert session.timer() == T + 100 + REPEAT
    hear(session, frames.Ack(1, 1, seq=2, credit=9, load=0), T + 102)
    assert session.poll(T + 200) == []
    revise(session, stream, 1, [2], now=T + 200)
    (event,) = session.poll(T + 200 + PATIENCE)
    assert isinstance(event, Disconnected)
    assert "no acknowledgement for 3 s" in str(event.error)


def test_a_frame_that_nobody_confirms_is_sent_again_less_and_less_often() -> None:
    session, stream = begin()
    first = revise(session, stream, 0, [1])
    (second,) = revise(session, stream, 1, [2], now=T + 1)
    assert [type(frame) for frame in first] == [frames.Commit]
    repeated: list[float] = []
    for n in range(1, 7):
        at = T + 1 + n * REPEAT / 4
        assert session.poll(at) == []
        if out := sent(session):
            assert out == [second], "the last one shows whether others are missing"
            repeated.append(at)
    assert repeated == [T + 1 + REPEAT]
    hear(session, frames.Ack(1, 1, seq=3, credit=9, load=0), T + 4)
    assert session.poll(T + 99) == []
    assert sent(session) == []


# --- what a user may do


def test_a_turn_that_outgrows_the_context_is_refused_before_anything_changes() -> None:
    session, stream = begin()
    revise(session, stream, 0, range(40), [1])
    with pytest.raises(ContextLengthError, match=r"51 tokens; the decoder's context takes 50"):
        stream.revise(30, range(20), [1])
    assert (len(stream.log), stream.log.tail) == (40, (1,))
    stream.revise(30, range(20), [])


def test_a_turn_never_outgrows_the_frame_that_would_restore_it() -> None:
    session, stream = begin(max_tokens=MAX_TURN, context=1 << 20, vocabulary=1 << 21)
    assert stream.context == MAX_TURN
    top = (1 << 21) - 1
    stream.revise(0, [top] * MAX_TURN, [])
    stream.end()
    hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(top,) * MAX_TURN))
    sent(session)
    welcome(session, T + 1, vocabulary=1 << 21)
    history = sent(session)[-1]
    assert isinstance(history, frames.History)
    assert len(history.reply_ids) == MAX_TURN
    welcome(session, T + 2, max_frame=128 * 1024, context=0)
    assert stream.context == MAX_TURN // 2


@pytest.mark.parametrize("keep", [-1, 3])
def test_keeping_more_or_less_than_there_is_is_refused(keep: int) -> None:
    _, stream = begin()
    stream.revise(0, [1, 2], [3])
    with pytest.raises(LocalProtocolError, match=rf"keep {keep}: committed are 0\.\.2"):
        stream.revise(keep, [9], [])
    assert stream.log.ids == [1, 2, 3]


@pytest.mark.parametrize(("ids", "tail"), [([-1], []), ([], [1 << 32])])
def test_what_is_no_token_id_is_refused_before_anything_changes(
    ids: list[int], tail: list[int]
) -> None:
    _, stream = begin()
    stream.revise(0, [1, 2], [3])
    with pytest.raises(LocalProtocolError, match="token id"):
        stream.revise(1, ids, tail)
    assert stream.log.ids == [1, 2, 3]


def test_a_turn_ends_once_and_only_an_ended_one_can_be_cut_or_taken_back() -> None:
    _, stream = begin()
    call: Callable[[], object]
    for call in (lambda: stream.cancel(0), stream.reopen):
        with pytest.raises(LocalProtocolError, match="turn 0 has n"):
            call()
    stream.end()
    for call in (stream.end, lambda: stream.revise(0, [1], [])):
        with pytest.raises(LocalProtocolError, match="turn 0"):
            call()
    stream.reopen()
    stream.revise(0, [1], [])
    stream.end()
    assert (stream.attempt, stream.turn) == (1, 0)


def test_a_closed_conversation_takes_nothing_more() -> None:
    session, stream = begin()
    stream.end()
    stream.close()
    stream.close()
    assert kinds(sent(session)) == ["EndTurn", "Bye"]
    for call in (stream.end, stream.reopen, lambda: stream.cancel(0)):
        with pytest.raises(LocalProtocolError):
            call()
    with pytest.raises(LocalProtocolError, match="closed"):
        stream.revise(0, [1], [])
    assert hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(1,))) == []


# --- replies


def test_reply_ids_arrive_once_in_order_and_a_gap_is_asked_for_once() -> None:
    session, stream = begin()
    stream.end()
    sent(session)

    def tokens(index: int, *ids: int, attempt: int = 0, turn: int = 0) -> list[Event]:
        return hear(session, frames.Tokens(1, 1, turn=turn, attempt=attempt, index=index, ids=ids))

    assert tokens(0, 10, 11) == [Replied(1, (10, 11))]
    assert tokens(0, 10, 11) == tokens(1, 11) == []
    assert tokens(1, 11, 12) == [Replied(1, (12,))]
    assert tokens(3, 1, attempt=1) == tokens(3, 1, turn=1) == []
    assert sent(session) == []
    assert tokens(5, 15) == tokens(6, 16) == []
    (again,) = sent(session)
    assert isinstance(again, frames.ReplyAck)
    assert (again.index, again.again) == (3, True)
    finish = frames.Finish(1, 1, turn=0, attempt=0, length=7, reason="stop")
    assert hear(session, finish) == []
    assert sent(session) == [], "the same gap is not asked for twice"
    assert tokens(3, 13, 14, 15, 16) == [Replied(1, (13, 14, 15, 16))]
    assert hear(session, finish) == [Finished(1, 0, "stop")]
    (done,) = sent(session)
    assert isinstance(done, frames.ReplyAck)
    assert (done.turn, done.index, done.again) == (0, 7, False)
    assert hear(session, finish) == []
    assert stream.turns[0].reply_ids == tuple(range(10, 17))


def asked_again(session: EdgeSession, now: float) -> bool:
    """Whether `session` asks for the rest of a reply at `now`."""
    assert session.poll(now) == []
    out = sent(session)
    assert all(isinstance(frame, frames.ReplyAck) and frame.again for frame in out)
    return bool(out)


def test_a_reply_of_which_nothing_comes_is_asked_for_less_and_less_often() -> None:
    session, stream = begin()
    revise(session, stream, 0, [1, 2])
    stream.end()
    session.poll(T)
    sent(session)
    assert not asked_again(session, T + 1), "the end has not been acknowledged"
    hear(session, frames.Ack(1, 1, seq=3, credit=64, load=0), T + 1)
    assert not asked_again(session, T + 1)
    assert session.timer() == T + 1 + SILENCE
    asked = [T + 1 + n / 2 for n in range(200) if asked_again(session, T + 1 + n / 2)]
    waits = [b - a for a, b in pairwise([T + 1, *asked])]
    assert waits == [SILENCE, 2 * SILENCE, 4 * SILENCE, *[MAX_WAIT] * (len(waits) - 3)]


def test_each_piece_of_a_reply_breaks_the_silence_and_its_end_ends_it() -> None:
    session, stream = begin()
    stream.end()
    session.poll(T)
    sent(session)
    hear(session, frames.Ack(1, 1, seq=2, credit=64, load=0))
    assert not asked_again(session, T)
    hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(5,)), T + 1.9)
    assert not asked_again(session, T + 1.9)
    assert not asked_again(session, T + 3.8)
    assert asked_again(session, T + 3.9)
    hear(session, frames.Finish(1, 1, turn=0, attempt=0, length=1, reason="stop"), T + 4)
    assert [type(frame) for frame in sent(session)] == [frames.ReplyAck], "it is confirmed"
    assert not asked_again(session, T + 99)
    assert session.timer() is None


def test_an_end_taken_back_voids_the_reply_tokens_that_arrived_and_those_under_way() -> None:
    session, stream = begin()
    stream.end()
    hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(1, 2)))
    stream.reopen()
    assert (stream.reply.ids, stream.attempt) == ([], 1)
    stream.end()
    assert hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=2, ids=(3,))) == []
    fresh = frames.Tokens(1, 1, turn=0, attempt=1, index=0, ids=(9,))
    assert hear(session, fresh) == [Replied(1, (9,))]


def test_a_reply_is_cut_at_what_was_heard_of_it() -> None:
    session, stream = begin()
    stream.end()
    hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(1, 2)))
    with pytest.raises(LocalProtocolError, match=r"heard 3: 0\.\.2"):
        stream.cancel(3)
    turn = stream.cancel(1)
    assert (turn.reply_ids, turn.reason, stream.turn) == ((1,), "cancelled", 1)
    assert isinstance(sent(session)[-1], frames.Cancel)


def test_a_reply_shorter_than_what_arrived_of_it_is_a_fault_of_the_decoder() -> None:
    session, stream = begin()
    stream.end()
    hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(1, 2)))
    with pytest.raises(RemoteProtocolError, match="ends after 1 ids: 2 have arrived"):
        hear(session, frames.Finish(1, 1, turn=0, attempt=0, length=1, reason="stop"))


def test_a_reply_id_outside_the_vocabulary_is_a_fault_of_the_decoder() -> None:
    session, stream = begin()
    stream.end()
    with pytest.raises(RemoteProtocolError, match="reply id 100: the vocabulary has 100"):
        hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=0, ids=(99, 100)))


def test_a_frame_that_only_goes_up_is_a_fault_of_the_decoder() -> None:
    session, _ = begin()
    with pytest.raises(RemoteProtocolError, match="Rewind goes up, not down"):
        hear(session, frames.Rewind(1, 1, 1, turn=0, to=0))


# --- errors and the rest


@pytest.mark.parametrize(
    ("code", "error", "retry"),
    [
        (SupersededError.code, SupersededError, False),
        (TokenizerMismatchError.code, TokenizerMismatchError, False),
        (ModelError.code, ModelError, False),
        (RemoteProtocolError.code, LocalProtocolError, False),
        (LinkError.code, LinkError, True),
        (999, LinkError, True),
    ],
)
def test_an_error_on_the_connection_ends_it_with_its_own_kind(
    code: int, error: type[DeltarelayError], retry: bool
) -> None:
    session, _ = begin()
    (event,) = hear(session, frames.Error(0, 1, code=code, text="why"))
    assert isinstance(event, Disconnected)
    assert type(event.error) is error
    assert event.retry is retry
    assert "why" in str(event.error)
    assert not session.live


def test_frames_of_another_epoch_are_remains_and_change_nothing() -> None:
    session, stream = begin()
    stream.end()
    sent(session)
    for late in (
        frames.Error(0, 7, code=14, text="superseded"),
        frames.Error(1, 7, code=31, text=""),
        frames.Tokens(1, 7, turn=0, attempt=0, index=0, ids=(1,)),
        frames.Finish(1, 7, turn=0, attempt=0, length=0, reason="stop"),
        frames.Resync(1, 7, Held(1, 9, 0, 0, 0, False, 0, 99)),
        frames.Notice(0, 7, topic="t", text=""),
    ):
        assert hear(session, late) == []
    assert (sent(session), session.live, stream.ended) == ([], True, True)
    assert hear(session, frames.Tokens(8, 1, turn=0, attempt=0, index=0, ids=(1,))) == []
    assert session.receive(b"\x10\x77anything", T) == []


def test_a_refusal_is_heard_before_any_epoch_is_granted() -> None:
    session = EdgeSession(HelloBody("car", "b0"))
    session.connect(T)
    (event,) = hear(session, frames.Error(0, 0, code=4, text="no such model"))
    assert isinstance(event, Disconnected)
    assert isinstance(event.error, ModelError)


def test_notices_and_blobs_are_handed_on() -> None:
    session, _ = begin()
    assert hear(session, frames.Notice(0, 1, topic="load", text="busy")) == [
        Noticed(0, "load", "busy")
    ]
    assert hear(session, frames.Notice(1, 1, topic="t", text="x")) == [Noticed(1, "t", "x")]
    blob = frames.Blob(0, 1, digest=SHA, offset=3, size=5, data=b"xy")
    assert hear(session, blob) == [BlobArrived(SHA, 3, 5, b"xy")]
    session.fetch(SHA, 5)
    assert sent(session) == [frames.Fetch(0, 1, digest=SHA, offset=5)]
    session.disconnect()
    with pytest.raises(LocalProtocolError, match="fetch before"):
        session.fetch(SHA)


def test_a_second_copy_of_a_resync_sends_nothing_again() -> None:
    session, stream = begin()
    revise(session, stream, 0, [1, 2])
    resync = frames.Resync(1, 1, Held(1, 0, 0, 0, 0, False, 0, 1 << 20))
    hear(session, resync)
    session.poll(T)
    (commit,) = sent(session)
    assert isinstance(commit, frames.Commit)
    assert (commit.seq, commit.base, commit.ids) == ((1 << 20) + 1, 0, (1, 2))
    hear(session, resync)
    session.poll(T + 1)
    assert sent(session) == []


def test_a_decoder_with_another_history_gets_the_whole_conversation() -> None:
    session, stream = begin()
    stream.revise(0, [1], [])
    stream.end()
    hear(session, frames.Finish(1, 1, turn=0, attempt=0, length=0, reason="stop"))
    sent(session)
    for held in (
        Held(1, 1, 12345, 0, 0, False, 0, 7),  # another first turn
        Held(1, 5, 0, 0, 0, False, 0, 7),  # turns we never had
    ):
        welcome(session, T + held.turn, held=[held])
        out = sent(session)
        assert kinds(out) == ["Open", "History"]
        assert isinstance(out[0], frames.Open)
        assert out[0].seq == 8
    same = Held(1, 1, stream.history(1), 0, 0, False, 0, 7)
    welcome(session, T + 9, held=[same])
    assert sent(session) == []


def test_a_conversation_closed_offline_is_forgotten_or_said_goodbye_to() -> None:
    session, stream = begin()
    session.disconnect()
    stream.close()
    welcome(session, T + 1, held=[Held(1, 0, 0, 0, 0, False, 0, 4)])
    assert sent(session) == [frames.Bye(1, 2, 5)]
    session.disconnect()
    welcome(session, T + 2, held=[])
    assert sent(session) == []
    session.connect(T + 3)
    (hello,) = sent(session)
    assert isinstance(hello, frames.Hello)
    assert hello.body.conversations == {}


def test_an_acknowledgement_may_lower_the_credit() -> None:
    session, stream = begin()
    hear(session, frames.Ack(1, 1, seq=1, credit=1, load=0))
    assert kinds(revise(session, stream, 0, [1])) == ["Commit"]
    assert revise(session, stream, 1, [2], now=T + 1) == []


def test_an_end_that_the_decoder_has_with_fewer_words_is_taken_back_and_told_again() -> None:
    session, stream = begin()
    stream.revise(0, [1, 2], [])
    stream.end()
    crc_of_first = stream.log.crc(1)
    welcome(session, T + 1, held=[Held(1, 0, 0, 1, crc_of_first, True, 0, 9)])
    reopen, end = sent(session)
    assert reopen == frames.Reopen(1, 2, 10, turn=0, attempt=0)
    assert isinstance(end, frames.EndTurn)
    assert (end.ids, end.length) == ((2,), 2)


@pytest.mark.parametrize("sizes", [(5,), (4, 1), (2, 2, 3)])
def test_a_reply_longer_than_was_asked_for_ends_the_connection(sizes: tuple[int, ...]) -> None:
    session, stream = begin(max_tokens=4)
    stream.end()
    with pytest.raises(RemoteProtocolError, match=r"has \d ids; 4 were asked for"):
        for size in sizes:
            at = len(stream.reply.ids)
            hear(session, frames.Tokens(1, 1, turn=0, attempt=0, index=at, ids=(7,) * size))
    assert len(stream.reply.ids) <= 4


@pytest.mark.parametrize("error", [AccessError, ModelError, TokenizerMismatchError])
@pytest.mark.parametrize(("epoch", "is_refused"), [(0, True), (1, True), (7, False)])
def test_a_device_that_is_refused_when_it_comes_back_does_not_try_again(
    error: type[DeltarelayError], epoch: int, is_refused: bool
) -> None:
    session, _ = begin()
    session.disconnect()
    session.connect(T + 1)
    events = hear(session, frames.Error(0, epoch, code=error.code, text="not you"))
    assert [(type(e.error), e.retry) for e in events if isinstance(e, Disconnected)] == [
        (error, False)
    ] * is_refused
