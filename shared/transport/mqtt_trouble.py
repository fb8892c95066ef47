"""What can go wrong between us and a broker, in words that say where to look."""

import ssl

from paho.mqtt.reasoncodes import ReasonCode

_NOT_ALLOWED = (134, 135, 138)
"""CONNACK: bad user name or password, not authorized, banned (MQTT 5, 3.2.2.2)."""


def no_tls(error: ssl.SSLError) -> str:
    """No TLS connection came about."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the broker's certificate is not trusted: {error.verify_message}; "
            "credentials.ca says whom to trust"
        )
    return f"TLS failed: {error.reason or error}; does this port speak TLS 1.2 or newer?"


def alert_in(text: str) -> str:
    """Return the TLS alert that a line of paho's log speaks of; empty: none."""
    _, found, alert = text.partition("[SSL: ")
    return f"TLS alert {alert.partition(']')[0]}" if found else ""


def closed_early(why: str, *, tls: bool) -> str:
    """The broker closed the connection before it answered CONNECT."""
    hint = "check credentials.certificate and key" if tls else "if it wants TLS, say mqtts"
    return f"{why}, before it answered: {hint}"


def refused(reason: ReasonCode) -> str:
    """The broker answered CONNECT with a refusal."""
    hint = "; check user name and password" if reason.value in _NOT_ALLOWED else ""
    return f"refused: {reason}{hint}"


def may_not_publish(topic: str, reason: ReasonCode) -> str:
    """The broker took a message and does not pass it on."""
    return f"publishing {topic} was refused: {reason}; check the broker's access list"
