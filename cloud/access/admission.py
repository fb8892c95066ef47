"""Who may ask for how much: limits per device and tenant, and the account a device runs on.

Two kinds of tokens count. Ids sent to be prefilled are charged when they come, over the limit or
not (`charge`); whoever is over it waits before more is done for it. A reply is asked for with all
the tokens it may have (`ask`), and what it did not use is given back at its end (`done`). No I/O,
no clock.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from cloud.access.roster import Key, Roster, digest_of
from cloud.engine.account import Account
from cloud.settings import AdmissionSettings, LimitSettings, TenantSettings
from shared.errors import ConfigError, InputError
from shared.flow import Limit, Meter, SlidingWindow, TokenBucket

DEFAULT_TENANT = "default"
_DIGITS = re.compile("[0-9a-f]{64}", re.IGNORECASE)
RETRY = 0.5
"""Seconds after which it is worth asking again when too many replies are under way."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a request."""

    wait: float = 0.0
    """Seconds after which to ask again (HTTP: Retry-After, rounded up); 0: admitted."""
    reason: str = ""
    """Which bound is reached, where it is set."""

    @property
    def admitted(self) -> bool:
        """It may go on; `done` is owed at its end."""
        return self.wait == 0


@dataclass(slots=True)
class _Device:
    limit: Limit
    account: Account
    active: int = 0


@dataclass(slots=True)
class _Tenant:
    settings: TenantSettings
    limit: Limit = field(init=False)

    def __post_init__(self) -> None:
        self.limit = _limit(self.settings.limit)


class Admission:
    """Limits of one decoder. Times are seconds of one monotonic clock.

    Raises:
        ConfigError: the settings contradict each other.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        _check(settings)
        self._settings = settings
        tenants = {DEFAULT_TENANT: TenantSettings()} | settings.tenants
        self._tenants = {name: _Tenant(tenant) for name, tenant in tenants.items()}
        self._keys = {
            digest: Key(digest.hex()[:8], "", name, digest)
            for name, tenant in tenants.items()
            for digest in _written_digests(name, tenant)
        }
        self.roster = Roster()
        """Keys and devices besides those of the settings; its owner replaces it when it changes."""
        self._devices: OrderedDict[tuple[str, str], _Device] = OrderedDict()
        """By tenant and name, the one unheard of for longest first."""

    # --- who somebody is

    def tenant_of_device(self, device: str) -> str:
        """Return the tenant it is registered for, else the first with a pattern for its name."""
        registered = self.roster.tenant_of(device)
        if registered is not None:
            return registered
        for name, tenant in self._tenants.items():
            if any(fnmatchcase(device, pattern) for pattern in tenant.settings.devices):
                return name
        return DEFAULT_TENANT

    @property
    def wants_keys(self) -> bool:
        """There are API keys, so whoever comes without one is refused.

        Revoked ones count: who revokes the last key does not open the door.
        """
        return bool(self._keys or self.roster.keys)

    def key(self, text: str) -> Key | None:
        """Return what is known of an API key, revoked or not; None: it is none."""
        digest = digest_of(text)
        return self.roster.key(digest) or self._keys.get(digest)

    def account(self, device: str, tenant: str) -> Account:
        """Return the account on which a device's sequences run."""
        return self._device(device, tenant).account

    def forget(self, device: str) -> None:
        """Forget what a device has used and owes."""
        for key in [key for key in self._devices if key[1] == device]:
            del self._devices[key]

    # --- what somebody may do

    @property
    def max_active(self) -> int:
        """Replies of one device that may be under way at once."""
        return self._settings.max_active

    def ask(self, device: str, tenant: str, tokens: int, now: float, replies: int = 1) -> Verdict:
        """Ask for replies of up to `tokens` tokens in all.

        Admitted: the tokens are charged, and `done` is owed.

        Raises:
            InputError: `tokens` is negative.
        """
        asking = self._device(device, tenant)
        if asking.active + replies > self._settings.max_active:
            reason = f"{_who(device)} has {asking.active} replies under way (admission.max_active)"
            return Verdict(RETRY, reason)
        verdict = self._verdict(device, tenant, tokens, now)
        if verdict.admitted:
            self.charge(device, tenant, tokens, now)
            asking.active += replies
        return verdict

    def charge(self, device: str, tenant: str, tokens: int, now: float) -> None:
        """Charge tokens that were not asked for."""
        self._device(device, tenant).limit.spend(tokens, now)
        self._tenant(tenant).limit.spend(tokens, now)

    def done(self, device: str, tenant: str, unused: int, now: float, replies: int = 1) -> None:
        """What was admitted is over, and used `unused` tokens less than it asked for."""
        asked = self._device(device, tenant)
        asked.active = max(0, asked.active - replies)
        asked.limit.refund(unused, now)
        self._tenant(tenant).limit.refund(unused, now)

    def standing(self, device: str, tenant: str, now: float) -> Verdict:
        """Return whether a device owes tokens, and how long until it does not."""
        return self._verdict(device, tenant, 0, now)

    # --- inside

    def _verdict(self, device: str, tenant: str, tokens: int, now: float) -> Verdict:
        own = self._device(device, tenant).limit.wait(tokens, now)
        shared = self._tenant(tenant).limit.wait(tokens, now)
        if shared > own:
            where = f"tenant {tenant} is over its limit (admission.tenants.{tenant}.limit)"
            return Verdict(shared, where)
        where = "its own" if self.roster.limit_of(device) else "admission.device"
        return Verdict(own, f"{_who(device)} is over its limit ({where})" if own else "")

    def _tenant(self, name: str) -> _Tenant:
        """Return a tenant; one that the settings do not name has no limit."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(TenantSettings())
        return tenant

    def _device(self, name: str, tenant: str) -> _Device:
        key = tenant, name
        device = self._devices.get(key)
        if device is None:
            self._forget_one()
            limit = self.roster.limit_of(name) or self._settings.device
            device = _Device(_limit(limit), Account(self._tenant(tenant).settings.weight))
            self._devices[key] = device
        self._devices.move_to_end(key)
        return device

    def _forget_one(self) -> None:
        if len(self._devices) >= self._settings.max_devices:
            idle = (key for key, device in self._devices.items() if device.active == 0)
            del self._devices[next(idle, next(iter(self._devices)))]


def _limit(settings: LimitSettings) -> Limit:
    meters: list[Meter] = []
    if settings.rate:
        meters.append(TokenBucket(settings.rate, settings.burst))
    if settings.per_minute:
        meters.append(SlidingWindow(settings.per_minute, 60.0))
    return Limit(meters)


def _check(settings: AdmissionSettings) -> None:
    limits: dict[str, LimitSettings] = {"admission.device": settings.device}
    owner: dict[bytes, str] = {}
    for name, tenant in settings.tenants.items():
        limits[f"admission.tenants.{name}.limit"] = tenant.limit
        for digest in _written_digests(name, tenant):
            if digest in owner:
                raise ConfigError(
                    f"admission.tenants.{name}.keys: a key is tenant {owner[digest]}'s too: "
                    "choose another"
                )
            owner[digest] = name
    for path, limit in limits.items():
        check_limit(path, limit)


def check_limit(path: str, limit: LimitSettings) -> None:
    """Refuse a limit that contradicts itself; `path` says where it is written.

    Raises:
        ConfigError: it does.
    """
    if bool(limit.rate) != bool(limit.burst):
        raise ConfigError(
            f"{path}: rate = {limit.rate:g}, burst = {limit.burst:g}: "
            "give both, or neither for no such bound"
        )
    try:
        _limit(limit)
    except InputError as error:
        raise ConfigError(f"{path}: {error}") from None


def _who(account: str) -> str:
    return account.replace(":", " ", 1) if account.startswith("key:") else f"device {account}"


def _written_digests(name: str, tenant: TenantSettings) -> list[bytes]:
    """Return the digests of the keys that a tenant's settings have."""
    entries = [entry.partition(":") for entry in tenant.keys]
    if not all(kind == "sha256" and _DIGITS.fullmatch(digits) for kind, _, digits in entries):
        raise ConfigError(
            f"admission.tenants.{name}.keys: an entry is not sha256:<64 hexadecimal digits>. Keys "
            "are not written down themselves: make one with `deltarelay cloud keys add`, or give "
            "the SHA-256 of a long random one"
        )
    return [bytes.fromhex(digits) for _, _, digits in entries]
