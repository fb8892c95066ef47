"""`deltarelay cloud keys|devices|forget`, as an operator uses them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloud.access.orders import Attendance
from cloud.access.registry import Registry
from cloud.access.roster import digest_of
from cloud.operate import open_registry, operate
from cloud.settings import DecoderSettings, LimitSettings
from shared.errors import CapacityError, ConfigError, InputError

Output = pytest.CaptureFixture[str]


def ask(folder: Path, output: Output, *arguments: str) -> dict[str, Any]:
    """Run an action; return its JSON."""
    assert operate([*arguments, "--set", f"state={folder}", "--json"]) == 0
    result: dict[str, Any] = json.loads(output.readouterr().out.splitlines()[-1])
    return result


def test_a_key_is_printed_once_and_alone_so_that_a_script_can_take_it(
    tmp_path: Path, capsys: Output
) -> None:
    operate(["keys", "add", "web", "--tenant", "taxi", "--set", f"state={tmp_path}"])
    printed = capsys.readouterr()
    text = printed.out.strip()
    with Registry(tmp_path) as registry:
        key = registry.roster().key(digest_of(text))
        assert key is not None
        assert (key.name, key.tenant, key.limit) == ("web", "taxi", None)
    operate(["keys", "list", "--set", f"state={tmp_path}"])
    shown = capsys.readouterr().out
    assert key.id in shown
    assert text not in shown + printed.err
    assert key.digest.hex() not in shown


def test_keys_are_listed_with_limits_and_revoked_by_id(tmp_path: Path, capsys: Output) -> None:
    bounds = ("--rate", "10", "--burst", "100", "--per-minute", "300")
    made = ask(tmp_path, capsys, "keys", "add", "batch", *bounds)
    (listed,) = ask(tmp_path, capsys, "keys", "list")["keys"]
    assert listed["id"] == made["id"]
    assert (listed["rate"], listed["burst"], listed["per_minute"]) == (10, 100, 300)
    assert listed["revoked"] is None
    ask(tmp_path, capsys, "keys", "revoke", made["id"])
    assert ask(tmp_path, capsys, "keys", "list")["keys"][0]["revoked"] is not None
    with Registry(tmp_path) as registry:
        assert registry.roster().keys[0].limit == LimitSettings(10, 100, 300)


def test_devices_are_added_listed_and_revoked(tmp_path: Path, capsys: Output) -> None:
    ask(tmp_path, capsys, "devices", "add", "taxi-*", "--tenant", "taxi")
    ask(tmp_path, capsys, "devices", "revoke", "taxi-7")
    entries = ask(tmp_path, capsys, "devices", "list")["devices"]
    assert [(e["pattern"], e["tenant"], e["revoked"] is None) for e in entries] == [
        ("taxi-*", "taxi", True),
        ("taxi-7", None, False),
    ]
    operate(["devices", "list", "--set", f"state={tmp_path}"])
    assert capsys.readouterr().out.splitlines()[0].split() == list(entries[0])


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["keys", "add", "web", "--rate", "5"], ConfigError, "rate = 5, burst = 0: give both"),
        (["keys", "add", "web", "--rate", "-5"], InputError, "at least 0"),
        (["keys", "add", "web", "--tenant", "a b"], ConfigError, "tenant 'a b'"),
        (["keys", "revoke", "nobody"], InputError, "no key has the id 'nobody'"),
        (["devices", "add", "a b*"], InputError, "'\\*' and '\\?' are allowed"),
        (["devices", "add", "1HGCM82633A004352"], ConfigError, "identification number"),
        (["forget", "taxi-*"], ConfigError, "device 'taxi-\\*'"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        operate([*arguments, "--set", f"state={tmp_path}"])
    with Registry(tmp_path) as registry:
        assert registry.roster().keys == registry.roster().devices == ()


def test_without_a_running_decoder_forgetting_says_so(tmp_path: Path, capsys: Output) -> None:
    assert operate(["forget", "car", "--set", f"state={tmp_path}"]) == 0
    assert f"no decoder runs with {tmp_path}" in capsys.readouterr().err


def test_a_decoder_that_does_not_confirm_is_an_error_and_the_order_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud.operate.CONFIRMED_WITHIN", 0.1)
    with Registry(tmp_path) as registry:
        attendance = Attendance(registry, "frozen")
        with pytest.raises(CapacityError, match=r"1 running decoders have not confirmed in"):
            operate(["forget", "car", "--set", f"state={tmp_path}"])
        assert registry.sql.execute("SELECT device FROM orders").fetchall() == [("car",)]
        attendance.close()


def test_by_default_the_registry_is_in_this_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with open_registry(DecoderSettings()) as registry:
        assert registry.folder == tmp_path / "deltarelay" / "cloud"


def test_the_actions_are_subcommands_that_load_no_model(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom cloud.__main__ import cloud\n"
        "status = cloud(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nraise SystemExit(status)\n"
    )
    command = [sys.executable, "-c", code, "devices", "add", "car", "--set", f"state={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Registry(tmp_path) as registry:
        assert registry.roster().devices[0].pattern == "car"
