"""The bytes of snapshot files: what was written comes back, and nothing else is taken for it."""

import struct
import zlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.snapshot.format import (
    LOG_MAGIC,
    SavedConversation,
    SegmentHead,
    block_keys,
    check_blocks,
    decode_head,
    decode_log,
    encode_head,
    encode_log,
)
from shared.errors import InputError
from shared.frames import OpenBody, Reason, Sampling
from shared.session.saved_stream import SavedStream

FINGERPRINT = bytes(range(32))
BODY = OpenBody("c1", "Be brief.", Sampling(temperature=0.5, logit_bias={3: 1.0}), stop=["\n"])


def conversation(turns: int = 2, **changes: object) -> SavedConversation:
    stream = SavedStream(BODY, turns, 77, (1, 2, 3), 1)
    values: dict[str, object] = {
        "tokenizer": "ab" * 32,
        "device": "car",
        "epoch": 4,
        "stream": stream,
        "adapter": "cd" * 32,
        "turns": [((n, 5), (7,)) if n else None for n in range(turns)],
    }
    return SavedConversation(**(values | changes))  # type: ignore[arg-type]


def segment(num_blocks: int, block_bytes: int = 96, seed: int = 0) -> bytes:
    rng = Random(seed)
    keys = tuple(rng.randbytes(16) for _ in range(num_blocks))
    blocks = rng.randbytes(num_blocks * block_bytes)
    return encode_head(SegmentHead(FINGERPRINT, block_bytes, keys, zlib.crc32(blocks))) + blocks


def read_segment(data: bytes) -> SegmentHead:
    head = decode_head(data, len(data), "here")
    check_blocks(head, memoryview(data)[head.start :], "here")
    return head


def test_a_log_comes_back_as_it_was() -> None:
    for saved in (
        conversation(),
        conversation(0),
        conversation(stream=SavedStream(BODY, 1, 9, (1,), 2, (4, 4), Reason.STOP)),
    ):
        assert decode_log(encode_log(saved), "here") == saved


def test_a_segment_comes_back_as_it_was() -> None:
    for count in (0, 1, 5):
        head = read_segment(segment(count))
        assert (head.fingerprint, head.block_bytes, len(head.keys)) == (FINGERPRINT, 96, count)
        assert head.start % 64 == 0


def test_a_log_cut_short_anywhere_is_refused() -> None:
    data = encode_log(conversation())
    for length in range(len(data)):
        with pytest.raises(InputError, match="here"):
            decode_log(data[:length], "here")
    with pytest.raises(InputError, match="here"):
        decode_log(data + b"\0", "here")


def test_a_segment_cut_short_anywhere_is_refused() -> None:
    data = segment(3)
    for length in range(len(data)):
        with pytest.raises(InputError, match="here"):
            read_segment(data[:length])
    with pytest.raises(InputError, match="here"):
        read_segment(data + b"\0")


def test_any_flipped_bit_of_a_log_or_a_segment_is_found() -> None:
    log, blocks = encode_log(conversation()), segment(2)
    for bit in range(8 * len(log)):
        with pytest.raises(InputError, match="here"):
            decode_log(flipped(log, bit), "here")
    for bit in range(8 * len(blocks)):
        with pytest.raises(InputError, match="here"):
            read_segment(flipped(blocks, bit))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), start=st.integers(0, 40))
def test_arbitrary_bytes_raise_nothing_but_an_error_that_names_the_file(
    data: bytes, start: int
) -> None:
    for whole, read in ((encode_log(conversation()), decode_log), (segment(1), _read)):
        with pytest.raises(InputError, match="here"):
            read(whole[:start] + data + b"x", "here")


def _read(data: bytes, place: str) -> SegmentHead:
    return decode_head(data, len(data), place)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"device": 3}, "no log of this version"),
        ({"epoch": -1}, "no log of this version"),
        ({"stream": {"turn": -1}}, "no log of this version"),
        ({"turns": [None] * 3}, "3 finished turns where 2 are due"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused_though_its_crc_is_right(
    body: dict[str, object], says: str
) -> None:
    import msgspec

    values = msgspec.to_builtins(conversation())
    for key, value in body.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    packed = msgspec.msgpack.encode(values)
    data = struct.pack("<8sII", b"drlog\0\0\1", len(packed), zlib.crc32(packed)) + packed
    with pytest.raises(InputError, match=says):
        decode_log(data, "here")


def test_another_version_is_refused_by_name() -> None:
    newer = bytearray(encode_log(conversation()))
    newer[7] = 2
    with pytest.raises(InputError, match="version"):
        decode_log(bytes(newer), "here")


def test_a_key_depends_on_the_namespace_and_on_every_id_before() -> None:
    ids = list(range(48))
    keys = block_keys(("tenant", ""), ids, 16)
    assert len(set(keys)) == 3
    assert block_keys(("tenant", ""), [*ids, 7], 16) == keys
    assert block_keys(("tenant", ""), ids[:47], 16) == keys[:2]
    for other in (("other", ""), ("tenant", "ab"), ("tenant", "a", "b")):
        assert set(block_keys(other, ids, 16)).isdisjoint(keys)
    assert set(block_keys(("tenant", ""), [1, *ids[1:]], 16)).isdisjoint(keys)
    assert block_keys(("tenant", ""), [*ids[:20], 1, *ids[21:]], 16)[:1] == keys[:1]


@pytest.mark.parametrize("body", [b"\x81\xa1x" + b"\x91" * 100_000, b"\x81\xa1x\xa2\xff\xfe", b""])
def test_a_log_whose_crc_is_right_and_whose_body_is_not_is_refused(body: bytes) -> None:
    head = struct.pack("<8sII", LOG_MAGIC, len(body), zlib.crc32(body))
    with pytest.raises(InputError, match="here: no log of this version"):
        decode_log(head + body, "here")
