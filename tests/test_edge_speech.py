"""The speech source: samples of files, silences that end turns, hypotheses that are revised."""

import asyncio
import math
import re
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moonshine_voice", reason="needs the speech extra: moonshine-voice")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.sources import Reading, speech
from edge.sources.speech import RATE, Line, SpeechSource, TurnCutter, read_audio, shipped_recording
from shared.errors import InputError, ModelError

pytestmark = pytest.mark.speech

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "speech"
LATE = speech.LOOK_BEHIND / RATE  # seconds from a line's start to where its speech was detected


def wav(data: bytes, tag: int = 1, bits: int = 16, channels: int = 1, rate: int = RATE) -> bytes:
    frame = channels * bits // 8
    shape = struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits)
    chunks = b"LIST" + struct.pack("<I", 3) + b"odd\0"  # an odd chunk is padded
    chunks += b"fmt " + struct.pack("<I", len(shape)) + shape
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def tone(hertz: float, rate: int) -> speech.Samples:
    return np.sin(2 * np.pi * hertz * np.arange(rate // 2) / rate).astype(np.float32)


def collect(source: SpeechSource) -> list[Reading]:
    async def readings() -> list[Reading]:
        return [reading async for reading in source.readings()]

    return asyncio.run(readings())


def said(readings: list[Reading]) -> list[str]:
    return [reading.text for reading in readings if reading.ended]


@pytest.mark.parametrize(
    ("tag", "bits", "data"),
    [
        (1, 8, bytes([0, 64, 128, 192])),
        (1, 16, struct.pack("<4h", -(2**15), -(2**14), 0, 2**14)),
        (1, 24, bytes.fromhex("000080 0000c0 000000 000040")),
        (1, 32, struct.pack("<4i", -(2**31), -(2**30), 0, 2**30)),
        (3, 32, struct.pack("<4f", -1.0, -0.5, math.nan, 0.5)),
        (3, 64, struct.pack("<4d", -1.0, -0.5, 0.0, 0.5)),
    ],
)
def test_every_width_decodes_to_the_same_samples(tag: int, bits: int, data: bytes) -> None:
    assert speech.decode_pcm(data, tag, bits).tolist() == [-1.0, -0.5, 0.0, 0.5]


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_a_tone_survives_resampling(rate: int) -> None:
    heard = speech.resample(tone(440, rate), rate)
    assert np.abs((heard - tone(440, RATE))[800:-800]).max() < 0.01  # the filter needs neighbours


def test_what_16_khz_cannot_hold_is_filtered_not_folded() -> None:
    assert np.abs(speech.resample(tone(11_000, 48_000), 48_000)[800:-800]).max() < 0.01


def test_stereo_is_mixed_down_and_a_streamed_length_is_bounded_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    whole = wav(struct.pack("<6h", 16384, 0, 8192, 8192, 0, -16384), channels=2)
    path.write_bytes(whole.replace(struct.pack("<I", 12), b"\xff\xff\xff\xff"))
    assert read_audio(path).tolist() == [0.25, 0.25, -0.25]


def test_an_extensible_header_names_its_format_inside(tmp_path: Path) -> None:
    shape = struct.pack("<HHIIHH", 0xFFFE, 1, RATE, RATE * 4, 4, 32)
    shape += struct.pack("<HHIH", 22, 32, 4, 3) + bytes(14)
    path = tmp_path / "extensible.wav"
    fmt = b"fmt " + struct.pack("<I", len(shape)) + shape
    path.write_bytes(b"RIFF\0\0\0\0WAVE" + fmt + b"data" + struct.pack("<If", 4, 0.5))
    assert read_audio(path).tolist() == [0.5]


def test_a_part_is_cut_by_seconds_of_audio(tmp_path: Path) -> None:
    path = tmp_path / "second.raw"
    path.write_bytes(np.arange(RATE, dtype="<i2").tobytes())
    part = read_audio(path, start=0.25, seconds=0.5)
    assert (part * 2**15).tolist() == list(range(RATE // 4, 3 * RATE // 4))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.wav", None, "No such file"),
        ("song.wav", b"ID3\x04 this is an mp3", "not a WAV file"),
        ("nothing.wav", b"", "not a WAV file"),
        ("cut.wav", wav(b"")[:30], "no 'data' chunk"),
        ("empty.wav", wav(b""), "holds no audio"),
        ("empty.raw", b"", "holds no audio"),
        ("phone.wav", wav(b"1234", tag=7, bits=8), "format 0x0007, 8 bits"),
        ("silly.wav", wav(b"1234", rate=3), "3 Hz is not supported"),
        ("short.wav", wav(b"1234"), "start=2 s, but it ends at 0.00 s"),
        ("long.wav", wav(bytes(3_700 * 4_000), bits=8, rate=4_000), "over 3600 s"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_path(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    source = SpeechSource(path, start=2.0 if name == "short.wav" else 0.0)
    with pytest.raises(InputError, match=complaint) as caught:
        collect(source)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("setting", [{"pace": -1.0}, {"start": math.nan}, {"seconds": 0.0}])
def test_a_setting_out_of_bounds_is_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(setting))}=.* must be at least"):
        SpeechSource("any.wav", **setting)


@pytest.fixture
def silent(tmp_path: Path) -> SpeechSource:
    path = tmp_path / "second.raw"
    path.write_bytes(bytes(2 * RATE))
    return SpeechSource(path)


def test_a_missing_extra_is_named(silent: SpeechSource, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = re.escape("pip install 'deltarelay[speech]'")
    monkeypatch.setitem(sys.modules, "moonshine_voice.transcriber", None)
    with pytest.raises(InputError, match=advice):
        collect(silent)
    with pytest.raises(InputError, match=advice):
        shipped_recording()
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.delitem(sys.modules, "edge.sources.speech")
    with pytest.raises(InputError, match=advice):
        import_module("edge.sources.speech")


def test_a_damaged_model_is_named(silent: SpeechSource, monkeypatch: pytest.MonkeyPatch) -> None:
    library = import_module("moonshine_voice.transcriber")
    monkeypatch.setattr(library, "get_model_path", lambda name: f"/nowhere/{name}")
    with pytest.raises(ModelError, match="/nowhere/tiny-en: does not load"):
        collect(silent)


def spoken(text: str, start: float, end: float, *, complete: bool = True) -> Line:
    """A line whose speech was detected at `start`."""
    return Line(text, start - LATE, end, complete)


def test_a_turn_is_read_whole_each_time_and_its_completed_lines_are_stable() -> None:
    turns = TurnCutter(0.6)
    first = spoken("Turn left.", 1.0, 2.0)
    assert turns.advance([spoken("Burn", 1.0, 1.3, complete=False)], 1.3) == [Reading("Burn")]
    assert turns.advance([first], 2.1) == [Reading("Turn left.", 10)]
    assert turns.advance([first], 2.4) == []
    second = spoken("Then", 2.5, 2.8, complete=False)
    assert turns.advance([first, second], 2.8) == [Reading("Turn left. Then", 10)]
    second = spoken("Then stop.", 2.5, 3.0)
    assert turns.advance([first, second], 3.1) == [Reading("Turn left. Then stop.", 21)]
    assert turns.advance([first, second], 3.6) == [Reading("Turn left. Then stop.", 21, ended=True)]


def test_words_taken_back_entirely_leave_an_empty_open_turn() -> None:
    turns = TurnCutter(0.6)
    assert turns.advance([spoken("Uh", 1.0, 1.3, complete=False)], 1.3) == [Reading("Uh")]
    assert turns.advance([spoken("", 1.0, 1.5)], 5.0) == [Reading("")]


def test_the_end_of_the_recording_ends_a_line_still_open() -> None:
    lines = [spoken("Stop he", 1.0, 2.0, complete=False)]
    assert TurnCutter(0.6).advance(lines, math.inf) == [Reading("Stop he", 7, ended=True)]


@given(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=8), st.lists(st.floats(0.0, 20.0)))
def test_a_slow_recognizer_cuts_the_same_turns(pauses: list[float], looks: list[float]) -> None:
    lines, now = list[Line](), 0.0
    for pause in pauses:
        now += pause
        lines.append(spoken(f"word{len(lines)}", now, now + 0.5))
        now += 0.5
    turns, ended = TurnCutter(0.6), list[str]()
    for look in sorted(looks):
        seen = [x if x.end <= look else replace(x, text="wo", complete=False) for x in lines]
        ended += said(turns.advance([x for x in seen if x.start + LATE <= look], look))
    ended += said(turns.advance(lines, math.inf))
    assert ended == said(TurnCutter(0.6).advance(lines, math.inf))
    assert " ".join(ended) == " ".join(line.text for line in lines)


@pytest.fixture(scope="module")
def heard() -> list[Reading]:
    """Two lines of the recording in the wheel, one turn."""
    return collect(
        SpeechSource(shipped_recording(), pace=0, update_seconds=0.4, start=4.5, seconds=4.1)
    )


def test_hypotheses_are_revised_not_only_extended(heard: list[Reading]) -> None:
    steps = pairwise(reading.text for reading in heard)
    assert sum(not after.startswith(before) for before, after in steps) >= 2


def test_the_recording_is_recognized_and_ends_its_one_turn(heard: list[Reading]) -> None:
    assert [reading.ended for reading in heard] == [False] * (len(heard) - 1) + [True]
    assert re.search("age of wisdom.*age of foolishness", heard[-1].text)


def test_what_was_called_stable_is_never_changed(heard: list[Reading]) -> None:
    for before, after in pairwise(heard):
        assert after.stable >= before.stable
        assert after.text.startswith(before.text[: before.stable])
    assert any(0 < reading.stable < len(reading.text) for reading in heard)


def test_a_long_silence_makes_two_turns_of_one_recording(tmp_path: Path) -> None:
    phrase = read_audio(shipped_recording(), 4.5, 2.0)
    mono = np.repeat(np.concatenate([phrase, np.zeros(RATE), phrase]), 3)  # 48 kHz
    ints = (np.repeat(mono, 2) * 2**23).astype("<i4")  # both channels
    path = tmp_path / "twice.wav"
    data = ints.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    path.write_bytes(wav(data, bits=24, channels=2, rate=48_000))
    readings = collect(SpeechSource(path, pace=0, update_seconds=0.6))
    assert ["wisdom" in text for text in said(readings)] == [True, True]


def test_silence_says_nothing_and_takes_as_long_as_it_lasts(silent: SpeechSource) -> None:
    began = time.monotonic()
    assert collect(SpeechSource(silent.path, pace=4.0)) == []
    assert time.monotonic() - began >= 1 / 4.0


def num_threads() -> int:
    """Threads, native ones too; the kernel lists one for a moment after it was joined."""
    time.sleep(0.1)
    return len(list(Path("/proc/self/task").iterdir()))


async def leave(source: SpeechSource) -> None:
    async with aclosing(source.readings()) as readings:
        async for _ in readings:
            break


async def forget(source: SpeechSource) -> None:
    async for _ in source.readings():
        break


async def cancel(source: SpeechSource) -> None:
    readings = source.readings()
    await anext(readings)
    waiting = asyncio.ensure_future(anext(readings))
    await asyncio.sleep(0.02)  # inside the recognizer
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(readings)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc (Linux)")
@pytest.mark.usefixtures("heard")  # what libraries start once has started
@pytest.mark.parametrize("consumer", [leave, forget, cancel])
def test_no_thread_is_left_behind(consumer: Callable[..., Coroutine[Any, Any, None]]) -> None:
    before = num_threads()
    asyncio.run(consumer(SpeechSource(shipped_recording(), pace=0, start=4.5, seconds=2.0)))
    assert num_threads() <= before


@pytest.mark.parametrize(
    ("name", "words"),
    [("goforward.raw", "go forward ten meters"), ("piper_joe_navigate.wav", "gas station")],
)
def test_recordings_with_a_transcript_are_recognized(name: str, words: str) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert words in " ".join(said(collect(SpeechSource(path, pace=0, update_seconds=2.0)))).lower()
