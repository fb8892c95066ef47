"""The wire contract: golden bytes of every kind, and one error for whatever else arrives."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import frames
from shared.errors import LocalProtocolError, RemoteProtocolError
from shared.frames import codec
from shared.wire import (
    BYTES,
    CRC,
    FLAG,
    IDS,
    MAX_COUNTER,
    MAX_ID,
    MAX_VARINT,
    TEXT,
    VARINT,
    put_varint,
    take_varint,
)

GOLDEN = Path(__file__).with_name("golden_frames.json")
SHA = "ab" * 32

EXAMPLES: tuple[frames.Frame, ...] = (
    frames.Hello(
        0,
        3,
        frames.HelloBody(
            "car-7",
            "b0",
            epoch=3,
            tokenizer=SHA,
            golden=SHA,
            model="m",
            max_frame=131072,
            conversations={1: "c1"},
            clock_us=12_345_678,
        ),
    ),
    frames.Open(
        1,
        4,
        1,
        frames.OpenBody(
            "c1",
            system="Be brief.",
            sampling=frames.Sampling(0.7, 0.9, 40, 0.05, 42),
            max_tokens=64,
            stop=["\n\n"],
            schema="{}",
            adapter=SHA,
            deadline=2.5,
        ),
    ),
    frames.Commit(1, 4, 2, turn=0, base=0, ids=(1, 127, 128, 49151, MAX_ID), crc=0xDEADBEEF),
    frames.Rewind(1, 4, 3, turn=0, to=2),
    frames.EndTurn(1, 4, 4, turn=0, attempt=1, ids=(9,), length=3, crc=7),
    frames.Cancel(1, 4, 5, turn=0, heard=12),
    frames.Reopen(1, 4, 6, turn=0, attempt=2),
    frames.History(1, 4, 7, turn=0, attempt=0, user_ids=(1, 2), reply_ids=(300,), done=True),
    frames.Bye(1, 4, 8),
    frames.Tail(1, 4, turn=0, after=3, tick=99, ids=(5, 6)),
    frames.ReplyAck(1, 4, turn=0, index=2, crc=0x01020304, again=True),
    frames.Fetch(0, 4, digest=SHA, offset=65536),
    frames.Welcome(
        0,
        4,
        frames.WelcomeBody(
            "dec",
            "b1",
            4,
            SHA,
            SHA,
            "m",
            SHA,
            answers="b0/12345678",
            template=SHA,
            adapter=SHA,
            vocabulary=49152,
            context=8192,
            credit=32,
            max_frame=131072,
            held=[frames.Held(1, 2, 7, 3, 9, True, 1, 17)],
            clock_us=1,
        ),
    ),
    frames.Ack(1, 4, seq=8, credit=64, load=1),
    frames.Resync(1, 4, frames.Held(1, 2, 7, 3, 9, False, 0, 1 << 20)),
    frames.Tokens(1, 4, turn=0, attempt=1, index=2, ids=(40, 41)),
    frames.Finish(1, 4, turn=0, attempt=1, length=4, reason="stop"),
    frames.Notice(1, 4, topic="turns-dropped", text="turns 0..3"),
    frames.Error(0, 4, code=12, text="Größe"),
    frames.Blob(0, 4, digest=SHA, offset=0, size=5, data=b"\x00\x01\xff"),
)

varints = st.integers(0, MAX_VARINT)
counters = st.integers(0, MAX_COUNTER)
words = st.integers(0, 0xFFFFFFFF)
ids = st.lists(st.integers(0, MAX_ID), max_size=40).map(tuple)
texts = st.text(max_size=20)
naturals = st.integers(0, 1 << 61)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
VALUES = {
    VARINT: varints,
    CRC: words,
    IDS: ids,
    TEXT: texts,
    BYTES: st.binary(max_size=64),
    FLAG: st.booleans(),
}
helds = st.builds(
    frames.Held, naturals, naturals, words, naturals, words, st.booleans(), naturals, naturals
)
BODIES: dict[type[frames.Frame], st.SearchStrategy[msgspec.Struct]] = {
    frames.Hello: st.builds(
        frames.HelloBody,
        names,
        texts,
        epoch=naturals,
        conversations=st.dictionaries(naturals, texts, max_size=3),
        clock_us=st.integers(-(1 << 63), (1 << 63) - 1),
    ),
    frames.Welcome: st.builds(
        frames.WelcomeBody,
        *(texts, texts, naturals, texts, texts, texts, texts),
        answers=texts,
        held=st.lists(helds, max_size=3),
        credit=naturals,
    ),
    frames.Open: st.builds(
        frames.OpenBody,
        texts,
        system=texts,
        sampling=st.builds(frames.Sampling, seed=st.none() | naturals),
        stop=st.lists(texts, max_size=3),
        deadline=st.floats(allow_nan=False),
    ),
    frames.Resync: helds,
}


def any_frame(kind: type[frames.Frame]) -> st.SearchStrategy[frames.Frame]:
    header = {"stream": varints, "epoch": varints} | ({"seq": counters} if kind.reliable else {})
    fields = {name: VALUES[c] if c in VALUES else BODIES[kind] for name, c, _ in codec.FIELDS[kind]}
    return st.builds(kind, **header, **fields)


every_frame = st.one_of(*(any_frame(kind) for kind in codec.FIELDS))
bounded = settings(max_examples=300, deadline=None, derandomize=True)


def accepts(data: bytes) -> bool:
    """Tell whether `data` parses; the only other way out is one error."""
    try:
        frames.decode(data)
    except RemoteProtocolError:
        return False
    return True


# --- golden bytes


def test_the_bytes_of_every_kind_are_those_of_this_protocol_version() -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))
    now = {type(frame).__name__: frames.encode(frame).hex() for frame in EXAMPLES}
    assert golden["version"] == [frames.MAJOR, frames.MINOR], "new version: new golden bytes"
    assert now == golden["frames"], "the wire changed: raise MAJOR or MINOR, then the golden bytes"


def test_the_golden_bytes_still_parse_to_the_frames_they_were_made_of() -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))["frames"]
    for frame in EXAMPLES:
        assert frames.decode(bytes.fromhex(golden[type(frame).__name__])) == frame


def test_every_kind_has_a_golden_example_and_a_number_of_its_own() -> None:
    assert {type(frame) for frame in EXAMPLES} == set(codec.FIELDS)
    assert len({kind.kind for kind in codec.FIELDS}) == len(codec.FIELDS)
    assert all(0 < kind.kind < frames.OPTIONAL_KINDS for kind in codec.FIELDS)


def test_only_the_tail_may_be_lost() -> None:
    assert [kind for kind in codec.FIELDS if kind.provisional] == [frames.Tail]


# --- round trip and damage


@bounded
@given(every_frame)
def test_what_is_encoded_decodes_to_the_same_frame(frame: frames.Frame) -> None:
    assert frames.decode(frames.encode(frame)) == frame


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda f: type(f).__name__)
def test_a_frame_cut_at_any_byte_is_refused(frame: frames.Frame) -> None:
    data = frames.encode(frame)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            frames.decode(data[:size])
    with pytest.raises(RemoteProtocolError, match="1 bytes too many"):
        frames.decode(data + b"\0")


@pytest.mark.parametrize("frame", EXAMPLES, ids=lambda f: type(f).__name__)
def test_no_damaged_byte_raises_anything_but_a_protocol_error(frame: frames.Frame) -> None:
    data = frames.encode(frame)
    for at in range(len(data)):
        for flip in (0x01, 0x40, 0x80, 0xFF):
            accepts(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@bounded
@given(st.sampled_from(sorted(k.kind for k in codec.FIELDS)), st.binary(max_size=80))
def test_no_garbage_raises_anything_but_a_protocol_error(kind: int, garbage: bytes) -> None:
    accepts(bytes([frames.MAJOR << 4, kind]) + garbage)
    accepts(garbage)


# --- versions and kinds


def test_another_major_version_is_refused_and_both_are_named() -> None:
    data = frames.encode(frames.Bye(1, 1, 1))
    with pytest.raises(RemoteProtocolError, match=r"version 2\.0: this end speaks 1\.0"):
        frames.decode(bytes([0x20]) + data[1:])


def test_an_unknown_kind_is_refused_but_an_optional_one_is_skipped() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown frame kind 0x5f"):
        frames.decode(b"\x10\x5f\x01\x01")
    assert frames.decode(b"\x10\x60\x01\x01whatever") is None
    assert frames.decode(b"\x10\xff") is None


def test_what_a_newer_minor_appends_is_ignored() -> None:
    newer = bytes([frames.MAJOR << 4 | frames.MINOR + 1])
    for frame in EXAMPLES:
        data = newer + frames.encode(frame)[1:]
        assert frames.decode(data + b"\x2a later") == frame
        assert frames.decode(data) == frame


class Later(frames.Frame, frozen=True):
    """A kind one of whose fields came with a later minor version."""

    kind = 0x50
    turn: int
    colour: int = 7


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = (codec.Field("turn", VARINT), codec.Field("colour", VARINT, since=1))
    monkeypatch.setattr(codec, "FIELDS", {**codec.FIELDS, Later: fields})
    monkeypatch.setattr(codec, "_KINDS", {**codec._KINDS, Later.kind: Later})


@pytest.mark.usefixtures("later")
def test_a_field_that_an_older_minor_lacks_takes_its_default() -> None:
    frame = Later(1, 1, turn=3, colour=5)
    old, new = frames.encode(frame, 0), frames.encode(frame, 1)
    assert (len(old) + 1, old[0], new[0]) == (len(new), 0x10, 0x11)
    assert frames.decode(old) == Later(1, 1, turn=3, colour=7)
    assert frames.decode(new) == frame


def test_unknown_keys_of_a_body_are_ignored_and_missing_ones_take_their_default() -> None:
    body = msgspec.msgpack.encode({"device": "d", "boot": "b", "colour": [1, {"a": None}]})
    data = b"\x10\x01\x00\x00" + bytes([len(body)]) + body
    assert frames.decode(data) == frames.Hello(0, 0, frames.HelloBody("d", "b"))


# --- bounds


def test_a_frame_of_ten_megabytes_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RemoteProtocolError, match="10485760 bytes: at most 262144"):
        frames.decode(bytes(10 << 20))


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, MAX_VARINT])
def test_a_count_that_the_frame_cannot_hold_is_refused_at_once(count: int) -> None:
    data = bytearray(b"\x10\x03\x01\x01\x01\x00\x00")
    put_varint(data, count)
    with pytest.raises(RemoteProtocolError, match="cut short"):
        frames.decode(bytes(data) + bytes(100))


@pytest.mark.parametrize("token", [MAX_ID + 1, MAX_VARINT])
def test_a_token_id_above_four_bytes_is_refused_by_either_end(token: int) -> None:
    data = bytearray(b"\x10\x03\x01\x01\x01\x00\x00\x01")
    put_varint(data, token)
    with pytest.raises(RemoteProtocolError, match=r"above 2\^32-1"):
        frames.decode(bytes(data) + bytes(4))
    with pytest.raises(LocalProtocolError, match=r"above 2\^32-1"):
        frames.encode(frames.Commit(1, 1, 1, turn=0, base=0, ids=(token,), crc=0))


@pytest.mark.parametrize(
    "tail", [b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x02", b"\x80" * 1000], ids=range(3)
)
def test_a_varint_of_more_than_64_bits_is_refused(tail: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="longer than 64 bits"):
        frames.decode(b"\x10\x21\x01\x01" + tail)


@bounded
@given(varints, st.integers(0, 5))
def test_a_varint_takes_seven_bits_a_byte_and_reads_back(value: int, before: int) -> None:
    out = bytearray(before)
    put_varint(out, value)
    assert len(out) - before == max(1, -(-value.bit_length() // 7))
    assert take_varint(bytes(out), before) == (value, len(out))


def test_a_body_nested_too_deeply_or_negative_is_a_protocol_error() -> None:
    deep = b"\x83\xa6device\xa1d\xa4boot\xa1b\xa1x" + b"\x91" * 100_000 + b"\xc0"
    negative = msgspec.msgpack.encode({"device": "d", "boot": "b", "epoch": -1})
    for body in (deep, negative):
        data = bytearray(b"\x10\x01\x00\x00")
        put_varint(data, len(body))
        with pytest.raises(RemoteProtocolError, match="Hello is malformed"):
            frames.decode(bytes(data) + body)


@pytest.mark.parametrize("seq", [MAX_COUNTER + 1, MAX_VARINT])
def test_a_sequence_number_that_leaves_no_room_to_count_on_is_refused_by_either_end(
    seq: int,
) -> None:
    data = bytearray(b"\x10\x09\x01\x01")
    put_varint(data, seq)
    with pytest.raises(RemoteProtocolError, match=rf"number {seq} is above 2\^62"):
        frames.decode(bytes(data))
    with pytest.raises(LocalProtocolError, match=rf"number {seq} is above 2\^62"):
        frames.encode(frames.Bye(1, 1, seq))
    assert frames.decode(frames.encode(frames.Bye(1, 1, MAX_COUNTER))) is not None


COUNTED: tuple[frames.Frame, ...] = (
    frames.Hello(0, 0, frames.HelloBody("d", "b", epoch=(1 << 61) + 1)),
    frames.Welcome(0, 1, frames.WelcomeBody("d", "b", (1 << 61) + 1, SHA, SHA, "m", SHA)),
    frames.Resync(1, 1, frames.Held(1, 0, 0, 0, 0, False, 0, (1 << 61) + 1)),
)


@pytest.mark.parametrize("frame", COUNTED, ids=lambda f: type(f).__name__)
def test_a_number_in_a_body_that_leaves_no_room_to_count_on_is_refused(frame: frames.Frame) -> None:
    with pytest.raises(RemoteProtocolError, match="is malformed: Expected `int` <="):
        frames.decode(frames.encode(frame))


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n", "é", "#", "x" * 65])
def test_a_device_has_a_name_that_fits_a_topic_and_a_line(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="Hello is malformed"):
        frames.decode(frames.encode(frames.Hello(0, 0, frames.HelloBody(name, "b"))))


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (frames.Rewind(-1, 1, 1, turn=0, to=0), "-1 is outside"),
        (frames.Rewind(1, 1, 1, turn=0, to=1 << 64), "is outside"),
        (frames.Tail(1, 1, turn=0, after=0, tick=0, ids=(-1,)), "-1 is outside"),
        (frames.ReplyAck(1, 1, turn=0, index=0, crc=1 << 32, again=False), "CRC 4294967296"),
        (frames.Notice(1, 1, topic="t", text="\ud800"), "surrogates"),
        (frames.Hello(0, 0, frames.HelloBody("d\ud800", "b")), "surrogates"),
        (frames.Hello(0, 0, frames.HelloBody("d", "b", clock_us=1 << 70)), "ints"),
        (frames.Blob(0, 1, digest="", offset=0, size=0, data=bytes(1 << 18)), "at most 262144"),
        (frames.Tail(1, 1, turn=0, after=0, tick=0, ids=(0,) * 300_000), "at most 262144"),
    ],
)
def test_what_does_not_fit_its_field_is_our_own_mistake(frame: frames.Frame, why: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"{type(frame).__name__}.*{why}"):
        frames.encode(frame)
