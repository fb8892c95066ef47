"""Which devices and keys are let in, by name and by pattern."""

import pytest

from cloud.access.roster import DeviceRule, Key, Roster, digest_of
from cloud.settings import LimitSettings
from shared.errors import AccessError

NOW = 1_790_000_000


def roster(*devices: tuple[str, str | None, int | None]) -> Roster:
    return Roster((), [DeviceRule(name, tenant, NOW, revoked) for name, tenant, revoked in devices])


def test_a_devices_own_entry_goes_before_a_pattern_and_an_older_pattern_before_a_newer() -> None:
    rules = roster(("taxi-*", "taxi", None), ("taxi-7", "vip", None), ("*-7", "sevens", None))
    assert [rules.tenant_of(n) for n in ("taxi-7", "taxi-17", "bus-7", "bus-8")] == [
        "vip",
        "taxi",
        "sevens",
        None,
    ]
    rules = roster(("car", None, None), ("*", "all", None))
    assert rules.tenant_of("car") == "all", "an entry that names none leaves it to others"


def test_who_is_revoked_by_name_or_by_a_pattern_may_not_connect() -> None:
    rules = roster(("taxi-*", "taxi", NOW), ("taxi-7", "vip", None), ("bus-1", "bus", NOW))
    for name, says in (
        ("taxi-1", r"device taxi-1 was revoked with all of taxi-\*"),
        ("taxi-7", r"with all of taxi-\*: .*devices add taxi-\*"),
        ("bus-1", "device bus-1 was revoked: it may not connect until it is registered again"),
    ):
        with pytest.raises(AccessError, match=says):
            rules.check_device(name, registered=False)
    rules.check_device("bus-2", registered=False)


def test_where_only_registered_devices_may_come_others_are_told_how_to_become_one() -> None:
    rules = roster(("taxi-*", "taxi", None))
    rules.check_device("taxi-1", registered=True)
    with pytest.raises(AccessError, match=r"bus-2 is not registered.*`deltarelay cloud dev"):
        rules.check_device("bus-2", registered=True)
    with pytest.raises(AccessError, match="not registered"):
        Roster().check_device("car", registered=True)
    Roster().check_device("car", registered=False)


def test_a_key_is_found_by_its_digest_and_has_its_own_limit() -> None:
    limit = LimitSettings(1.0, 10.0)
    free = Key("aa", "web", "taxi", digest_of("secret"), limit, NOW)
    gone = Key("bb", "old", "taxi", digest_of("other"), None, NOW, NOW)
    rules = Roster([free, gone])
    assert rules.key(digest_of("secret")) is free
    assert rules.key(digest_of("secret ")) is None
    assert rules.limit_of("key:aa") == limit
    assert rules.limit_of("key:bb") is rules.limit_of("car") is None
    assert rules.revoked("key:aa") is rules.revoked("car") is None
    assert "API key bb was revoked" in str(rules.revoked("key:bb"))
