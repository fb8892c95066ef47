"""Speech as a source: a recording, recognized while it plays, as the text of turns that is revised.

Samples of a file, lines cut into turns (pure), the recognizer (foreign records, threads), source.
"""

import asyncio
import math
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

from edge.sources import Reading
from shared.errors import InputError, ModelError

EXTRA = "speech needs moonshine-voice 0.0.73 and numpy: pip install 'deltarelay[speech]'"
try:
    import numpy as np
except ImportError as absent:
    raise InputError(f"{EXTRA} ({absent})") from absent
Samples = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")
RATE = 16_000  # Hz, what the recognizer hears
MAX_SECONDS = 3_600  # of audio in memory at once: 230 MB
LOOK_BEHIND = 8_192  # samples: a line begins this long before its speech was detected
ENCODINGS = {(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)}  # (format tag, bits)
CONVERT = "convert it: ffmpeg -i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"


class Layout(NamedTuple):
    """How a file holds its samples, and where (bytes). Tag 1 is integer PCM, 3 is float."""

    tag: int
    bits: int
    channels: int
    rate: int
    offset: int
    size: int


def read_audio(path: Path, start: float = 0.0, seconds: float | None = None) -> Samples:
    """Read a WAV (PCM or float) or a `.raw` (s16le, 16 kHz, mono) as mono samples at 16 kHz.

    Raises:
        InputError: the file is missing, no such audio, empty, or the part lies outside it.
    """
    try:
        with path.open("rb") as file:
            layout = _layout(file, path, path.stat().st_size)
            frame = layout.channels * layout.bits // 8
            first, count = _part(path, layout.size // frame, layout.rate, start, seconds)
            file.seek(layout.offset + first * frame)
            data = file.read(count * frame)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a .wav or .raw file") from error
    frames = decode_pcm(data, layout.tag, layout.bits).reshape(-1, layout.channels)
    return resample(frames.mean(axis=1, dtype=np.float32), layout.rate)


def _part(path: Path, num: int, rate: int, start: float, seconds: float | None) -> tuple[int, int]:
    first = round(start * rate)
    count = min(num - first, round(min(seconds or math.inf, MAX_SECONDS + 1) * rate))
    if not num:
        raise InputError(f"{path}: holds no audio (0 samples); record it again")
    if first >= num:
        raise InputError(f"{path}: start={start:g} s, but it ends at {num / rate:.2f} s; lower it")
    if count > MAX_SECONDS * rate:
        raise InputError(f"{path}: over {MAX_SECONDS} s of audio; play a part: start and seconds")
    return first, count


def _layout(file: BinaryIO, path: Path, size: int) -> Layout:
    """Walk the chunks of a RIFF file up to its samples."""
    if path.suffix.lower() == ".raw":
        return Layout(1, 16, 1, RATE, 0, size)
    head, shape = file.read(12), bytes(16)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise InputError(f"{path}: not a WAV file (begins with {head[:4]!r}, not RIFF); {CONVERT}")
    while len(header := file.read(8)) == 8:
        name, length = struct.unpack("<4sI", header)
        body = file.tell()
        if name == b"data":  # a recorder that streams writes no true length
            return Layout(*_encoding(shape, path), body, min(length, size - body))
        if name == b"fmt ":
            shape = file.read(min(length, 40)).ljust(16, b"\0")
        file.seek(body + length + length % 2)
    raise InputError(f"{path}: WAV without samples (no 'data' chunk), cut off? Copy it again")


def _encoding(shape: bytes, path: Path) -> tuple[int, int, int, int]:
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", shape)
    if tag == 0xFFFE and len(shape) >= 26:  # WAVE_FORMAT_EXTENSIBLE: the tag opens its GUID
        (tag,) = struct.unpack_from("<H", shape, 24)
    if (tag, bits) not in ENCODINGS or not channels or not 4_000 <= rate <= 384_000:
        raise InputError(
            f"{path}: WAV format {tag:#06x}, {bits} bits, {channels} channels, {rate} Hz is not "
            f"supported, only PCM of 8 to 32 bits or float, 4 to 384 kHz; {CONVERT}"
        )
    return tag, bits, channels, rate


def decode_pcm(data: bytes, tag: int, bits: int) -> Samples:
    """Turn little-endian samples of a WAV's format tag and width into floats, full scale 1.0."""
    if bits == 8:  # the only unsigned one
        data = (np.frombuffer(data, np.uint8) ^ 0x80).tobytes()
    if bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, bits = wide.tobytes(), 32
    kind, scale = ("f", 1.0) if tag == 3 else ("i", 2.0 ** (1 - bits))
    samples: Samples = np.frombuffer(data, f"<{kind}{bits // 8}").astype(np.float32) * scale
    samples[~np.isfinite(samples)] = 0.0
    return samples


def resample(samples: Samples, rate: int) -> Samples:
    """Bring samples from `rate` to 16 kHz by a polyphase filter: sinc under a Hann window."""
    up, down = RATE // math.gcd(rate, RATE), rate // math.gcd(rate, RATE)
    if up == down:
        return samples
    cutoff = 0.95 * min(1.0, up / down)  # share of the input's band; what is above would alias
    half = math.ceil(16 / cutoff)
    padded = np.pad(samples, half)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)  # (samples, taps)
    out = np.empty(-(-len(samples) * up // down), np.float32)
    for phase in range(min(up, len(out))):  # every up-th output lies alike between its inputs
        whole, rest = divmod(phase * down, up)
        offsets = np.arange(-half, half + 1) - rest / up
        taps = np.sinc(cutoff * offsets) * np.cos(np.pi / 2 * offsets / (half + 1)) ** 2
        out[phase::up] = windows[whole::down] @ (taps / taps.sum()).astype(np.float32)
    return out


@dataclass(frozen=True, slots=True)
class Line:
    """Speech between two pauses as recognized so far; times in seconds of audio."""

    text: str
    start: float  # look-behind included
    end: float
    complete: bool


class TurnCutter:
    """Turns a growing transcript into readings; a silence ends a turn. No I/O, no clock.

    Silence is audio from a line's end to the next detected speech: a late recognizer cuts alike.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._num_done = 0  # lines of turns that ended
        self._shown = Reading("")

    def advance(self, lines: Sequence[Line], heard: float) -> list[Reading]:
        """Return what is new, given every line and the seconds heard (infinite: all of them)."""
        found: list[Reading] = []
        while num_lines := self._num_finished(lines[self._num_done :], heard):
            done, self._num_done = self._num_done, self._num_done + num_lines
            if text := _joined(lines[done : self._num_done]):  # a cough is a line without words
                found.append(Reading(text, len(text), ended=True))
                self._shown = Reading("")
        turn = lines[self._num_done :]
        num_fixed = next((i for i, line in enumerate(turn) if not line.complete), len(turn))
        reading = Reading(_joined(turn), len(_joined(turn[:num_fixed])))
        if reading != self._shown:
            found.append(reading)
            self._shown = reading
        return found

    def _num_finished(self, turn: Sequence[Line], heard: float) -> int:
        resumed = [line.start + LOOK_BEHIND / RATE for line in turn[1:]] + [heard]
        for index, (line, following) in enumerate(zip(turn, resumed, strict=False)):
            if (line.complete or following == math.inf) and following - line.end >= self._silence:
                return index + 1
        return 0


def _joined(lines: Sequence[Line]) -> str:
    return " ".join(text for line in lines if (text := line.text.strip()))


def _library() -> Any:
    """Import moonshine_voice.transcriber: untyped, a quarter of a second."""
    try:
        return import_module("moonshine_voice.transcriber")
    except (ImportError, OSError) as error:  # OSError: its native library does not load here
        raise InputError(f"{EXTRA} ({error})") from error


def shipped_recording() -> Path:
    """Return a recording inside the wheel: 44.4 s, read from a book; 0.5 to 13.3 s is a turn."""
    return Path(_library().get_assets_path()) / "two_cities.wav"


class Recognizer:
    """One streaming recognition off the event loop; a context manager, to be opened inside.

    Native work enters by `_alone`, one call at a time: one left behind ends before closing begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resources = ExitStack()
        self._stream: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await asyncio.to_thread(self._alone, self._resources.close)
        finally:  # if cancelled again before a thread took it
            self._alone(self._resources.close)

    def _alone(self, work: Callable[[], T]) -> T:
        with self._lock:
            return work()

    async def open(self) -> None:
        """Load the model (0.7 s, 155 MB)."""
        await asyncio.to_thread(self._alone, self._open)

    def _open(self) -> None:
        library = _library()
        model = library.get_model_path("tiny-en")  # inside the wheel: no network
        options: dict[str, str | float] = {"return_audio_data": "false"}
        options["vad_look_behind_sample_count"] = LOOK_BEHIND
        options["transcription_interval"] = 0.05  # seconds; we say when
        try:
            transcriber = library.Transcriber(model, library.ModelArch.TINY, options=options)
            self._resources.enter_context(transcriber)
            stream = transcriber.create_stream(update_interval=math.inf)
            self._stream = self._resources.enter_context(stream)
            stream.start()
        except library.MoonshineError as error:
            raise ModelError(f"{model}: does not load ({error}); reinstall it, {EXTRA}") from error

    async def hear(self, samples: Samples, *, last: bool = False) -> list[Line]:
        """Add samples and return every line so far; after the `last` samples all are complete."""
        return await asyncio.to_thread(self._alone, partial(self._hear, samples, last))

    def _hear(self, samples: Samples, last: bool) -> list[Line]:
        try:
            self._stream.add_audio(samples.tolist(), RATE)
            if last:  # silence completes a line; `stop()` fails when none is open (0.0.73)
                self._stream.add_audio([0.0] * RATE, RATE)
            lines = self._stream.update_transcription().lines
        except _library().MoonshineError as error:
            raise ModelError(f"the recognizer failed ({error}); play it again") from error
        return [Line(x.text, x.start_time, x.start_time + x.duration, x.is_complete) for x in lines]


@dataclass(frozen=True, slots=True)
class SpeechSource:
    """Readings of a recording as if it were spoken now; a silence, or its end, ends a turn."""

    path: str | Path
    _: KW_ONLY
    pace: float = 1.0  # audio seconds per second; 0: as fast as the recognizer
    update_seconds: float = 0.3  # between two hypotheses of speech; a late recognizer skips some
    feed_seconds: float = 0.1  # between two looks while nobody speaks
    silence_seconds: float = 0.6  # that end a turn
    start: float = 0.0  # seconds of the recording to skip
    seconds: float | None = None  # of the recording to play; None: all

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)[1:]):
            value, least = getattr(self, name), 0.0 if name in ("pace", "start") else 0.01
            if value is not None and not least <= value < math.inf:
                raise InputError(f"{self.path}: {name}={value} must be at least {least} and finite")

    async def readings(self) -> AsyncGenerator[Reading, None]:
        """Yield the text of the turn whenever it changes; nothing is left running afterwards."""
        path, at, lines = Path(self.path), 0, list[Line]()
        audio = await asyncio.to_thread(read_audio, path, self.start, self.seconds)
        turns = TurnCutter(self.silence_seconds)
        async with Recognizer() as recognizer:
            await recognizer.open()
            began = asyncio.get_running_loop().time()
            while at < len(audio):
                step = self.feed_seconds if all(x.complete for x in lines) else self.update_seconds
                upto = await self._spoken(began, min(at + round(step * RATE), len(audio)))
                lines = await recognizer.hear(audio[at:upto], last=upto >= len(audio))
                at, heard = upto, math.inf if upto >= len(audio) else upto / RATE
                for reading in turns.advance(lines, heard):
                    yield reading

    async def _spoken(self, began: float, upto: int) -> int:
        """Wait until the samples `upto` there were spoken; more may have been by then."""
        if not self.pace:
            return upto
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(began + upto / RATE / self.pace - clock())
        return max(upto, int((clock() - began) * self.pace * RATE))
