"""Who comes over HTTP: a tenant by API key, a device by the host it comes from."""

import time
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated

from fastapi import Depends, Request

from cloud.access.admission import DEFAULT_TENANT
from cloud.access.roster import Key
from cloud.api.errors import ApiError
from cloud.api.house import House, OwnHouse
from cloud.completion import Caller
from cloud.completion import Request as Replies


class Visitor:
    """One client: a key, or a host that needs none.

    The name it is counted under is not its own choice: it would multiply its share.
    """

    def __init__(self, house: House, device: str, tenant: str) -> None:
        self._admission, self._gate = house.admission, house.gate
        self._device, self._tenant = device, tenant
        self._replies = 0
        self._leave: Callable[[], None] | None = None

    @property
    def caller(self) -> Caller:
        """As the engine knows it."""
        account = self._admission.account(self._device, self._tenant)
        return Caller(self._tenant, account, self._settle)

    def admit(self, request: Replies) -> None:
        """Charge what a request may take; closing it gives back what it did not.

        Raises:
            ApiError: the client is over a limit; it may come back after a while.
        """
        tokens = request.num_prompt_tokens + request.num_granted
        self._replies = len(request.completions)
        if self._replies > self._admission.max_active:
            raise ApiError(
                400,
                f"{self._replies} replies are asked for at once; this decoder gives a client at "
                f"most {self._admission.max_active} (admission.max_active)",
            )
        verdict = self._admission.ask(
            self._device, self._tenant, tokens, time.monotonic(), self._replies
        )
        if not verdict.admitted:
            raise ApiError(
                429,
                f"{verdict.reason}: come back in {verdict.wait:.1f} s",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=verdict.wait,
            )
        self._leave = self._gate.enter(self._device, request.cut_off)

    def _settle(self, unused: int) -> None:
        if self._leave is not None:
            self._leave()
        now = time.monotonic()
        self._admission.done(self._device, self._tenant, unused, now, self._replies)


async def _visitor_of(http: Request, house: OwnHouse) -> Visitor:
    if not house.admission.wants_keys:
        return Visitor(house, _host_of(http), DEFAULT_TENANT)
    key = _key_of(http, house)
    return Visitor(house, key.account, key.tenant)


def _host_of(http: Request) -> str:
    """Return the host; of IPv6 addresses the network, which is what one client has."""
    host = http.client.host if http.client is not None else "http"
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host


def _key_of(http: Request, house: House) -> Key:
    scheme, _, text = http.headers.get("authorization", "").partition(" ")
    key = house.admission.key(text) if scheme.lower() == "bearer" else None
    if key is not None and key.revoked is None:
        return key
    why = (
        "this decoder serves clients with an API key: send it as Authorization: Bearer ..."
        if key is None
        else f"the API key {key.id} was revoked"
    )
    raise ApiError(401, why, kind="authentication_error", code="invalid_api_key")


OwnVisitor = Annotated[Visitor, Depends(_visitor_of)]
"""The client, as a parameter of a route; routes that have it want a key where there are keys."""
known = Depends(_visitor_of)
"""For routes that want a key and do not care whose."""
