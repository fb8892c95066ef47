"""Recorded links: both formats, made here and real where they are."""

import zipfile
from pathlib import Path

import pytest

from shared.errors import InputError
from simulations.link import Traced, read_irish5g, read_mahimahi
from tests.vocabularies import data

HEADER = "Timestamp,Speed,DL_bitrate,UL_bitrate,PINGAVG\n"


def irish(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "drive.csv"
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


def mahimahi(folder: Path, text: str) -> Path:
    path = folder / "car.up"
    path.write_text(text)
    return path


def test_a_mahimahi_trace_is_read_with_its_gaps(tmp_path: Path) -> None:
    trace = read_mahimahi(mahimahi(tmp_path, "0\n5\n5\n900\n1000\n"))
    assert trace.seconds == 1.0
    assert trace.gaps(0.5) == [(0.005, 0.9)]
    assert Traced(trace, start=0.0).leave(4500, 0.0) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"car\.up: a trace has one time above 0"),
        ("0\n0\n", r"car\.up: a trace has one time above 0"),
        ("1\nx\n", r"car\.up, line 2: 'x' is no time in whole milliseconds"),
        ("1\n-2\n", r"line 2: '-2' is no time"),
        ("1\n\n3\n", r"line 2: '' is no time"),
        ("5\n4\n", r"line 2: '4' comes after 5: times must not go back"),
        ("1\n999999999999\n", r"line 2: '999999999999' is beyond 604800 s"),
    ],
)
def test_a_damaged_mahimahi_trace_is_refused_by_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        read_mahimahi(mahimahi(tmp_path, text))


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    for read in (read_mahimahi, read_irish5g):
        with pytest.raises(InputError, match=r"cannot read the trace .*nowhere"):
            read(tmp_path / "nowhere")


def test_an_irish_drive_is_read_as_steps_of_rate(tmp_path: Path) -> None:
    rows = ["2020.02.14_09.38.22,0,1,1,-", "2020.02.14_09.38.22,0,80,8,-"]
    rows += ["2020.02.14_09.38.24,0,7,7,42", "2020.02.14_09.38.23,0,0,16,42"]
    rows += ["2020.02.14_09.38.25,0,40,0,44"]
    drive = read_irish5g(irish(tmp_path, *rows))
    assert drive.down.seconds == drive.up.seconds == 4.0
    assert drive.round_trip == 0.042
    down = Traced(drive.down, start=0.0)
    assert down.leave(10_000, 0.0) == pytest.approx(1.0), "80 kbit/s are 10,000 bytes a second"
    assert down.leave(12_500, 0.0) == pytest.approx(3.5), "nothing leaves in the third second"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("yesterday,0,1,1,-", r"line 3: Timestamp 'yesterday' is not of the form 2020"),
        (
            "2020.02.14_09.38.19,0,1,1,-",
            r"line 3: .* is -3 s after the first row: times go back by 2 s",
        ),
        ("2020.02.14_09.38.23,0,fast,1,-", r"line 3: DL_bitrate 'fast' is no number from 0 on"),
        ("2020.02.14_09.38.23,0,1,-4,-", r"line 3: UL_bitrate '-4' is no number"),
        ("2020.02.14_09.38.23,0,1,1,slow", r"line 3: PINGAVG 'slow' is no number"),
        ("2020.02.14_09.38.23,0", r"line 3: DL_bitrate None is no number"),
    ],
)
def test_a_damaged_drive_is_refused_by_line_and_column(
    tmp_path: Path, row: str, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        read_irish5g(irish(tmp_path, "2020.02.14_09.38.22,0,1,1,-", row))


def test_a_file_of_other_columns_is_no_drive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: no column UL_bitrate, PINGAVG"):
        read_irish5g(irish(tmp_path, header="Timestamp,DL_bitrate\n"))


def test_a_drive_on_which_nothing_passes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"UL_bitrate is never above 0"):
        read_irish5g(irish(tmp_path, "2020.02.14_09.38.22,0,1,0,-"))


def test_the_real_mahimahi_trace_has_its_tunnel() -> None:
    trace = read_mahimahi(data("mahimahi", "ATT-LTE-driving.up"))
    assert trace.gaps(60) == [(787.595, 865.914)]
    capacity = Traced(trace, start=0.0, offset=780.0)
    assert capacity.leave(100, 20.0) == pytest.approx(85.914)


def test_every_real_irish_drive_can_be_read() -> None:
    folder = zipfile.ZipFile(data("irish5g", "5G-production-dataset.zip"))
    with folder:
        names = [n for n in folder.namelist() if n.endswith(".csv") and "__MACOSX" not in n]
        drives = [read_irish5g(zipfile.Path(folder, name)) for name in names]
    assert len(drives) == 83
    assert sum(drive.down.seconds for drive in drives) > 100_000
    assert any(drive.round_trip for drive in drives)
