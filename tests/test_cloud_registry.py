"""The registry's file: what it keeps, who may read it, and how its changes are seen."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cloud.access.orders import Attendance, Orders
from cloud.access.registry import VERSION, Registry
from cloud.access.roster import digest_of
from cloud.settings import LimitSettings
from shared.errors import CapacityError, ConfigError, InputError


def test_a_key_is_known_by_its_digest_and_written_nowhere(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry:
        key, text = registry.add_key("web", "taxi", LimitSettings(1.0, 10.0, 0.0))
        plain, other = registry.add_key("batch", "bus", None)
        found = registry.roster()
        assert found.keys == (key, plain)
        assert found.key(digest_of(text)) == key
        assert len({text, other}) == 2
        assert len(text) >= 43, "256 bits"
        for path in tmp_path.iterdir():
            assert text.encode() not in path.read_bytes()
            assert text.removeprefix("dr_").encode() not in path.read_bytes()


def test_a_revoked_key_stays_known_as_such(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry:
        key, text = registry.add_key("web", "taxi", None)
        registry.revoke_key(key.id)
        first = registry.roster().key(digest_of(text))
        assert first is not None
        assert first.revoked is not None
        registry.revoke_key(key.id)
        assert registry.roster().keys == (first,), "the first time counts"
        with pytest.raises(InputError, match="no key has the id 'nobody'"):
            registry.revoke_key("nobody")


def test_a_revoked_device_may_be_registered_again(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry:
        registry.add_device("taxi-*", "taxi")
        registry.revoke_device("taxi-7")
        registry.revoke_device("taxi-*")
        assert [d.revoked is not None for d in registry.roster().devices] == [True, True]
        assert registry.roster().devices[0].tenant == "taxi"
        registry.add_device("taxi-*")
        assert [d.revoked is not None for d in registry.roster().devices] == [False, True]
        assert registry.roster().devices[0].tenant == "taxi", "whom it belonged to before"


def test_another_process_changes_are_seen_and_ones_own_are_not_news(tmp_path: Path) -> None:
    with Registry(tmp_path) as reader, Registry(tmp_path) as writer:
        assert reader.has_changed()
        assert not reader.has_changed()
        writer.add_device("car")
        assert reader.has_changed()
        assert not reader.has_changed()
        reader.add_device("van")
        assert not reader.has_changed()
        assert len(reader.roster().devices) == 2


def test_a_registry_put_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    with Registry(tmp_path / "a") as reader:
        reader.add_device("car")
        reader.has_changed()
        with Registry(tmp_path / "b") as other:
            other.revoke_device("car")
        (tmp_path / "b" / "registry.db").rename(tmp_path / "a" / "registry.db")
        for suffix in ("-wal", "-shm"):
            (tmp_path / "a" / f"registry.db{suffix}").unlink(missing_ok=True)
        assert reader.has_changed()
        assert reader.roster().devices[0].revoked is not None
        (tmp_path / "a" / "registry.db").unlink()
        with pytest.raises(ConfigError, match=r"registry\.db: No such file"):
            reader.has_changed()


def test_folder_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with Registry(tmp_path / "state") as registry:
            registry.add_device("car")
            attendance = Attendance(registry, "boot")
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in registry.folder.iterdir()}
            assert {"registry.db", "registry.db-wal", "running-boot"} <= set(modes)
            assert set(modes.values()) == {0o600}
            assert stat.S_IMODE(registry.folder.stat().st_mode) == 0o700
            attendance.close()
    finally:
        os.umask(mask)


def test_what_is_no_registry_is_left_alone_and_named(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    file.write_bytes(b"something else " * 100)
    with pytest.raises(ConfigError, match=r"registry\.db: .*; is it a registry"):
        Registry(tmp_path)
    assert file.read_bytes() == b"something else " * 100
    with pytest.raises(ConfigError, match=r"state = .*registry\.db: (Not a|File exists)"):
        Registry(file)
    newer = tmp_path / "newer"
    with Registry(newer) as registry:
        registry.sql.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(ConfigError, match=f"version {VERSION + 1}, this program knows {VERSION}"):
        Registry(newer)


def test_a_registry_that_another_program_holds_is_an_error_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud.access.registry._BUSY", 0.05)
    with Registry(tmp_path) as registry:
        other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CapacityError, match="locked; is its disk full, or another program"):
            registry.add_device("car")
        assert registry.roster().devices == (), "reading goes on"
        other.close()
        registry.add_device("car")


# --- orders


def test_an_order_waits_for_every_decoder_until_it_is_taken_back(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry:
        orders = Orders(registry)
        first, second = Attendance(registry, "a"), Attendance(registry, "b")
        order = orders.give("car")
        assert orders.running() == {"a", "b"}
        assert orders.waiting_for("a") == orders.waiting_for("b") == [order]
        orders.confirm(order, "a", 3)
        orders.confirm(order, "a", 5)
        assert orders.confirmed(order) == {"a": 3}
        assert orders.waiting_for("a") == []
        assert orders.waiting_for("b") == [order]
        second.close()
        assert orders.running() == {"a"}
        orders.take_back(order)
        orders.confirm(order, "b", 1)
        assert orders.confirmed(order) == {}
        assert orders.waiting_for("b") == []
        first.close()


def test_an_order_that_nobody_took_back_is_dropped_in_time(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry:
        orders = Orders(registry)
        old = orders.give("car")
        registry.sql.execute("UPDATE orders SET created = created - 4000")
        new = orders.give("van")
        assert orders.waiting_for("a") == [new]
        assert old != new


def test_a_decoder_that_was_killed_does_not_count_as_running(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom cloud.access.orders import Attendance\n"
        "from cloud.access.registry import Registry\n"
        "a = Attendance(Registry(Path(sys.argv[1])), 'victim')\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        with Registry(tmp_path) as registry:
            orders = Orders(registry)
            assert orders.running() == {"victim"}
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert (tmp_path / "running-victim").exists()
            assert orders.running() == set()
            assert not (tmp_path / "running-victim").exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
