"""Who may come in, as the registry says it at one moment. No I/O, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256

from cloud.settings import LimitSettings
from shared.errors import AccessError

_ANY = frozenset("*?[")


def digest_of(key: str) -> bytes:
    """Return what is kept of an API key.

    A plain SHA-256 is right for keys of 256 random bits: there is nothing to guess, so salt and
    slowness, which protect passwords, would only make every request slower. Looking a digest up
    takes no longer for a key that is nearly right.
    """
    return sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class Key:
    """An API key, without the key itself. Times are seconds since 1970."""

    id: str
    name: str
    """What it is for, in the words of whoever made it."""
    tenant: str
    digest: bytes
    limit: LimitSettings | None = None
    """On its programs together; None: `admission.device`, as for a device."""
    created: int = 0
    revoked: int | None = None

    @property
    def account(self) -> str:
        """The name under which admission counts; no device can have it."""
        return f"key:{self.id}"


@dataclass(frozen=True, slots=True)
class DeviceRule:
    """A device, or all whose names a pattern (`*`, `?`) matches. Times are seconds since 1970."""

    pattern: str
    tenant: str | None = None
    """None: as the settings say."""
    created: int = 0
    revoked: int | None = None

    @property
    def is_exact(self) -> bool:
        """It is about one device."""
        return _ANY.isdisjoint(self.pattern)


class Roster:
    """Keys and devices, the oldest first."""

    def __init__(self, keys: Iterable[Key] = (), devices: Iterable[DeviceRule] = ()) -> None:
        self.keys, self.devices = tuple(keys), tuple(devices)
        self._by_digest = {key.digest: key for key in self.keys}
        self._by_account = {key.account: key for key in self.keys}
        self._exact = {rule.pattern: rule for rule in self.devices if rule.is_exact}
        self._patterns = [rule for rule in self.devices if not rule.is_exact]

    def key(self, digest: bytes) -> Key | None:
        """Return the key of this digest, revoked or not."""
        return self._by_digest.get(digest)

    def revoked(self, account: str) -> AccessError | None:
        """Return why a program may not go on, if its key was revoked."""
        key = self._by_account.get(account)
        if key is None or key.revoked is None:
            return None
        return AccessError(f"the API key {key.id} was revoked")

    def limit_of(self, account: str) -> LimitSettings | None:
        """Return the limit that a key's account has of its own."""
        key = self._by_account.get(account)
        return None if key is None else key.limit

    def tenant_of(self, device: str) -> str | None:
        """Return a device's tenant, if it has one here: its own entry goes before a pattern."""
        known = (rule.tenant for rule in self._rules(device) if rule.revoked is None)
        return next((tenant for tenant in known if tenant is not None), None)

    def check_device(self, device: str, *, registered: bool) -> None:
        """Refuse a device that is revoked, by name or by a pattern.

        Args:
            registered: refuse a device without an entry, too.

        Raises:
            AccessError: it may not connect.
        """
        rules = self._rules(device)
        revoked = next((rule for rule in rules if rule.revoked is not None), None)
        if revoked is not None:
            why = "" if revoked.is_exact else f" with all of {revoked.pattern}"
            raise AccessError(
                f"device {device} was revoked{why}: it may not connect until it is registered "
                f"again (`deltarelay cloud devices add {revoked.pattern}`)"
            )
        if registered and not rules:
            raise AccessError(
                f"device {device} is not registered and this decoder serves only devices that are "
                f"(admission.require_devices): `deltarelay cloud devices add {device}`"
            )

    def _rules(self, device: str) -> list[DeviceRule]:
        exact = self._exact.get(device)
        patterns = [rule for rule in self._patterns if fnmatchcase(device, rule.pattern)]
        return patterns if exact is None else [exact, *patterns]
