"""`deltarelay cloud keys|devices|forget`: what an operator asks of decoders, running or not.

All goes through the registry in the state folder; a running decoder follows within a second.
"""

import argparse
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloud.access.admission import DEFAULT_TENANT, check_limit
from cloud.access.orders import Order, Orders
from cloud.access.registry import Registry
from cloud.settings import DecoderSettings, LimitSettings
from cloud.snapshot.reader import forget_device
from shared.commands import parser, print_json, progress, start_logging
from shared.config import load_settings
from shared.errors import CapacityError, InputError
from shared.paths import state_folder
from shared.transport.mqtt_topics import check_name

ACTIONS = ("keys", "devices", "forget")
CONFIRMED_WITHIN = 10.0
"""Seconds that running decoders may take to forget a device."""
_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]{1,64}")

Result = dict[str, Any]
"""What an action reports, as JSON has it."""


def open_registry(settings: DecoderSettings) -> Registry:
    """Open the registry that the settings mean.

    Raises:
        ConfigError: the state folder cannot be used.
    """
    return Registry(Path(settings.state) if settings.state else state_folder() / "cloud")


def operate(arguments: Sequence[str]) -> int:
    """Change or list what the registry has, or have a device forgotten."""
    options = _parser().parse_args(arguments)
    start_logging(options.log_level)
    settings = load_settings(DecoderSettings, options.config, options.changes)
    options.settings = settings
    with open_registry(settings) as registry:
        result: Result = options.run(registry, options)
    if options.json:
        print_json(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    common = parser("cloud", "", settings=True, reports=True, is_parent=True)
    ask = argparse.ArgumentParser(prog="deltarelay cloud")
    actions = ask.add_subparsers(required=True)
    keys = actions.add_parser("keys", help="API keys of HTTP clients").add_subparsers(required=True)
    add = keys.add_parser("add", parents=[common], help="make a key and print it, once")
    add.add_argument("name", help="what it is for")
    add.add_argument("--tenant", default=DEFAULT_TENANT, help="whose it is (default: %(default)s)")
    for bound, about in (
        ("rate", "tokens a second in the long run; wants --burst"),
        ("burst", "tokens at once, after a pause"),
        ("per-minute", "tokens within any minute"),
    ):
        add.add_argument(f"--{bound}", type=float, default=0.0, metavar="TOKENS", help=about)
    add.set_defaults(run=_add_key)
    revoke = keys.add_parser("revoke", parents=[common], help="end what runs with a key, for ever")
    revoke.add_argument("id", help="as `keys list` shows it")
    revoke.set_defaults(run=_revoke_key)
    show = keys.add_parser("list", parents=[common], help="show all keys, but not the keys")
    show.set_defaults(run=_list_keys)
    devices = actions.add_parser("devices", help="vehicles").add_subparsers(required=True)
    for name, about, run in (
        ("add", "register a device, or let a revoked one back", _add_device),
        ("revoke", "cut a device off within a second", _revoke_device),
    ):
        change = devices.add_parser(name, parents=[common], help=about)
        change.add_argument("device", help="its name; * and ? stand for any characters")
        change.set_defaults(run=run)
        if run is _add_device:
            change.add_argument("--tenant", help="whose it is; by default as the settings say")
    show = devices.add_parser("list", parents=[common], help="show all entries")
    show.set_defaults(run=_list_devices)
    about = "drop all that decoders hold of a device"
    forget = actions.add_parser("forget", parents=[common], help=about)
    forget.add_argument("device")
    forget.add_argument(
        "--spool",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a spool of it on this host, deleted as well; its agent must not run",
    )
    forget.set_defaults(run=_forget)
    return ask


# --- keys


def _add_key(registry: Registry, options: argparse.Namespace) -> Result:
    bounds = options.rate, options.burst, options.per_minute
    if min(bounds) < 0:
        raise InputError("--rate, --burst and --per-minute are at least 0")
    limit = LimitSettings(*bounds) if any(bounds) else None
    if limit is not None:
        check_limit("the key's limit", limit)
    key, text = registry.add_key(options.name, check_name("tenant", options.tenant), limit)
    progress(f"key {key.id} of tenant {key.tenant}; keep it, it is not shown again:")
    if not options.json:
        print(text)
    return {"id": key.id, "tenant": key.tenant, "key": text}


def _revoke_key(registry: Registry, options: argparse.Namespace) -> Result:
    registry.revoke_key(options.id)
    progress(f"key {options.id} is revoked")
    return {"id": options.id}


def _list_keys(registry: Registry, options: argparse.Namespace) -> Result:
    keys: list[Result] = []
    for key in registry.roster().keys:
        limit = key.limit
        keys.append(
            {
                "id": key.id,
                "name": key.name,
                "tenant": key.tenant,
                "rate": limit and limit.rate,
                "burst": limit and limit.burst,
                "per_minute": limit and limit.per_minute,
                "created": _time(key.created),
                "revoked": _time(key.revoked),
            }
        )
    _show(keys, options)
    return {"keys": keys}


# --- devices


def _add_device(registry: Registry, options: argparse.Namespace) -> Result:
    pattern = _checked(options.device)
    tenant = options.tenant and check_name("tenant", options.tenant)
    registry.add_device(pattern, tenant)
    progress(f"device {pattern} is registered")
    return {"device": pattern, "tenant": tenant}


def _revoke_device(registry: Registry, options: argparse.Namespace) -> Result:
    pattern = _checked(options.device)
    registry.revoke_device(pattern)
    progress(f"device {pattern} is revoked; `deltarelay cloud devices add` lets it back")
    return {"device": pattern}


def _list_devices(registry: Registry, options: argparse.Namespace) -> Result:
    devices = [
        asdict(rule) | {"created": _time(rule.created), "revoked": _time(rule.revoked)}
        for rule in registry.roster().devices
    ]
    _show(devices, options)
    return {"devices": devices}


def _checked(pattern: str) -> str:
    if not _PATTERN.fullmatch(pattern):
        raise InputError(
            f"device {pattern!r}: 1..64 letters, digits, '.', '_', '-', '*' and '?' are allowed"
        )
    return pattern if set("*?") & set(pattern) else check_name("device", pattern)


# --- forget


def _forget(registry: Registry, options: argparse.Namespace) -> Result:
    device = check_name("device", options.device)
    orders = Orders(registry)
    order = orders.give(device)
    confirmed = _wait(orders, order)
    orders.take_back(order)
    count = sum(confirmed.values())
    files = _delete_files(device, options)
    progress(
        f"{len(confirmed)} running decoders have forgotten {device}, with {count} conversations"
        if confirmed
        else f"no decoder runs with {registry.folder}"
    )
    for folder in files:
        progress(f"deleted {folder}")
    result = {"device": device, "decoders": len(confirmed), "conversations": count}
    return result | {"deleted": list(map(str, files))}


def _delete_files(device: str, options: argparse.Namespace) -> list[Path]:
    """Delete what is on this host's disks of a device; return the folders where that was."""
    snapshots: str = options.settings.snapshots
    deleted: list[Path] = []
    try:
        if snapshots and forget_device(Path(snapshots), device):
            deleted.append(Path(snapshots))
        for spool in options.spool:
            if not (spool / "spool.sqlite").exists():
                raise InputError(f"--spool {spool}: no spool is there")
            shutil.rmtree(spool)
            deleted.append(spool)
    except OSError as error:
        raise CapacityError(f"{error.filename}: {error.strerror}; not all is deleted") from None
    return deleted


def _wait(orders: Orders, order: Order) -> dict[str, int]:
    """Return what the decoders that run have confirmed."""
    until = time.monotonic() + CONFIRMED_WITHIN
    while True:
        confirmed, running = orders.confirmed(order), orders.running()
        missing = running - set(confirmed)
        if not missing:
            return confirmed
        if time.monotonic() > until:
            raise CapacityError(
                f"{len(missing)} running decoders have not confirmed in "
                f"{CONFIRMED_WITHIN:g} s that {order.device} is forgotten; see their logs. The "
                "order stands: they carry it out when they can"
            )
        time.sleep(0.02)


# --- tables


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _show(rows: Sequence[Result], options: argparse.Namespace) -> None:
    """Print a table, if no JSON is asked for."""
    if options.json or not rows:
        return
    table = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
