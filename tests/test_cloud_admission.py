"""Who is admitted, who waits and for how long."""

from typing import Any

import msgspec
import pytest

from cloud.access.admission import DEFAULT_TENANT, RETRY, Admission
from cloud.access.roster import digest_of
from cloud.settings import AdmissionSettings, DecoderSettings
from shared.config import load_settings
from shared.errors import ConfigError, InputError

T = 1000.0


def written(key: str) -> str:
    """Return how settings have a key."""
    return f"sha256:{digest_of(key).hex()}"


SAME = written("the same")


def admission(**settings: Any) -> Admission:
    return Admission(msgspec.convert(settings, AdmissionSettings))


def tight(**more: Any) -> Admission:
    """Return one whose devices may have 100 tokens at once and 10 a second."""
    return admission(device={"rate": 10, "burst": 100, "per_minute": 0}, **more)


def ask(rules: Admission, device: str, tokens: int, now: float = T) -> float:
    return rules.ask(device, rules.tenant_of_device(device), tokens, now).wait


def test_a_device_over_its_limit_waits_as_long_as_it_is_told_and_others_do_not() -> None:
    rules = tight()
    assert ask(rules, "car-1", 100) == 0
    wait = ask(rules, "car-1", 50)
    assert wait == pytest.approx(5)
    assert ask(rules, "car-2", 100) == 0
    assert ask(rules, "car-1", 50, T + wait) == 0


def test_what_a_reply_did_not_use_is_given_back_to_device_and_tenant() -> None:
    limit = {"rate": 10, "burst": 150}
    rules = tight(tenants={"taxi": {"devices": ["*"], "limit": limit}})
    assert ask(rules, "car", 100) == 0
    rules.done("car", "taxi", 80, T)
    assert ask(rules, "car", 80) == 0
    assert ask(rules, "car2", 50) == 0
    assert ask(rules, "car2", 1) > 0, "the tenant has had its 150"


def test_what_is_refused_costs_nothing() -> None:
    rules = tight(tenants={"taxi": {"devices": ["*"], "limit": {"rate": 1, "burst": 200}}})
    assert ask(rules, "car", 60) == 0
    for _ in range(50):
        assert ask(rules, "car", 60) > 0
    assert ask(rules, "car", 40) == 0
    assert ask(rules, "other", 100) == 0, "nor did it cost the tenant anything"


def test_ids_that_come_unasked_are_charged_over_the_limit_and_then_waited_for() -> None:
    rules = tight()
    rules.charge("car", DEFAULT_TENANT, 300, T)
    standing = rules.standing("car", DEFAULT_TENANT, T)
    assert standing.wait == pytest.approx(20)
    assert "device car" in standing.reason
    assert "admission.device" in standing.reason
    assert ask(rules, "car", 10) == pytest.approx(21)
    assert rules.standing("car", DEFAULT_TENANT, T + 20).admitted


def test_the_devices_of_a_tenant_share_its_limit_and_the_reason_names_it() -> None:
    rules = admission(
        tenants={"taxi": {"devices": ["taxi-*"], "limit": {"per_minute": 100}}, "bus": {}}
    )
    assert ask(rules, "taxi-1", 60) == 0
    verdict = rules.ask("taxi-2", "taxi", 60, T)
    assert 60 <= verdict.wait < 66
    assert "admission.tenants.taxi.limit" in verdict.reason
    assert ask(rules, "bus-1", 60) == 0


def test_replies_under_way_are_bounded_per_device() -> None:
    rules = admission(max_active=2)
    assert [ask(rules, "car", 1) for _ in range(3)] == [0, 0, RETRY]
    assert ask(rules, "other", 1) == 0
    assert "max_active" in rules.ask("car", DEFAULT_TENANT, 1, T).reason
    rules.done("car", DEFAULT_TENANT, 0, T)
    assert ask(rules, "car", 1) == 0


def test_a_device_belongs_to_the_first_tenant_that_has_it() -> None:
    rules = admission(
        tenants={
            "taxi": {"devices": ["taxi-*", "van?"], "weight": 2, "keys": [written("secret-1")]},
            "all": {"devices": ["*-7"], "keys": [written("secret-2"), written("secret-3")]},
        }
    )
    names = {n: rules.tenant_of_device(n) for n in ("taxi-7", "van3", "bus-7", "van33", "Taxi-1")}
    assert list(names.values()) == ["taxi", "taxi", "all", DEFAULT_TENANT, DEFAULT_TENANT]
    assert rules.wants_keys
    found = rules.key("secret-3")
    assert found is not None
    assert (found.tenant, found.revoked) == ("all", None)
    for wrong in ("secret-4", "", written("secret-3")):
        assert rules.key(wrong) is None
    assert rules.account("taxi-1", "taxi").weight == 2
    assert rules.account("taxi-1", "taxi") is rules.account("taxi-1", "taxi")
    assert rules.account("taxi-2", "taxi") is not rules.account("taxi-1", "taxi")
    assert not admission().wants_keys


def test_a_million_devices_take_no_more_room_than_the_bound() -> None:
    rules = tight(max_devices=10)
    assert ask(rules, "busy", 100) == 0
    for n in range(1000):
        ask(rules, f"car-{n}", 5)
        rules.done(f"car-{n}", DEFAULT_TENANT, 0, T)
    assert len(rules._devices) == 10
    assert ask(rules, "busy", 100) > 0, "one with a reply under way is not forgotten for others"


def test_by_default_no_driver_is_ever_over_the_limit() -> None:
    rules = admission()
    for conversation in range(8):
        rules.charge("car", DEFAULT_TENANT, 2048, T)  # back after a break: all histories again
        assert ask(rules, "car", 1024) == 0, conversation
    for second in range(3600):  # an hour of talking and being answered without a pause
        rules.charge("car", DEFAULT_TENANT, 20, T + second)
        if second % 10 == 0:
            assert ask(rules, "car", 1024, T + second) == 0
            rules.done("car", DEFAULT_TENANT, 700, T + second)


@pytest.mark.parametrize("tokens", [-1, -(10**9)])
def test_a_negative_cost_is_refused(tokens: int) -> None:
    rules = tight()
    with pytest.raises(InputError, match="cost"):
        ask(rules, "car", tokens)
    with pytest.raises(InputError, match="cost"):
        rules.charge("car", DEFAULT_TENANT, tokens, T)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("admission.device.rate=0", r"admission\.device: rate = 0, burst = 60000: give both"),
        ("admission.device.per_minute=-1", r"admission\.device\.per_minute"),
        ("admission.device.rate=inf", r"admission\.device: rate = inf"),
        ("admission.devise.rate=1", r"did you mean admission\.device\?"),
        ("admission.tenants.taxi.limit.rate=1", r"admission\.tenants\.taxi\.limit: rate = 1"),
        ("admission.tenants.taxi.weight=0", "weight"),
        ("admission.tenants.taxi.weihgt=1", "weihgt"),
        ("admission.tenants.taxi.keys=['']", r"tenants\.taxi\.keys: an entry is not sha256:<64"),
        ("admission.tenants.taxi.keys=['sha256:00']", r"taxi\.keys: an entry is not sha256:<64"),
        (f"admission.tenants.taxi.keys={[SAME, SAME]}", r"taxi\.keys: a key is tenant taxi's too"),
        ("admission.max_active=0", "max_active"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(change: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Admission(load_settings(DecoderSettings, None, [change]).admission)
