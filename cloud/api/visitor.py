"""Who comes over HTTP: a tenant by API key, a device by the host it comes from."""

import time
from ipaddress import ip_network
from typing import Annotated

from fastapi import Depends, Request

from cloud.admission import DEFAULT_TENANT, Admission
from cloud.api.errors import ApiError
from cloud.api.house import House, OwnHouse
from cloud.completion import Caller
from cloud.completion import Request as Replies


class Visitor:
    """One client. The name of its device is not its own choice: it would multiply its share."""

    def __init__(self, admission: Admission, device: str, tenant: str) -> None:
        self._admission, self._device, self._tenant = admission, device, tenant
        self._replies = 0

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

    def _settle(self, unused: int) -> None:
        now = time.monotonic()
        self._admission.done(self._device, self._tenant, unused, now, self._replies)


async def _visitor_of(http: Request, house: OwnHouse) -> Visitor:
    return Visitor(house.admission, _device_of(http), _tenant_of(http, house))


def _device_of(http: Request) -> str:
    """Return the host; of IPv6 addresses the network, which is what one client has."""
    host = http.client.host if http.client is not None else "http"
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host


def _tenant_of(http: Request, house: House) -> str:
    if not house.admission.wants_keys:
        return DEFAULT_TENANT
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    tenant = house.admission.tenant_of_key(key) if scheme.lower() == "bearer" else None
    if tenant is None:
        raise ApiError(
            401,
            "this decoder serves clients with an API key of one of its tenants "
            "(admission.tenants): send it as Authorization: Bearer ...",
            kind="authentication_error",
            code="invalid_api_key",
        )
    return tenant


OwnVisitor = Annotated[Visitor, Depends(_visitor_of)]
"""The client, as a parameter of a route; routes that have it want a key where there are keys."""
known = Depends(_visitor_of)
"""For routes that want a key and do not care whose."""
