"""`deltarelay cloud` serves a model; `deltarelay models` manages what can be served.

`deltarelay cloud keys|devices|forget` are in `operate`.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloud.operate import ACTIONS, open_registry, operate
from shared.child import die_with_parent
from shared.commands import parser, print_json, progress, run, start_logging
from shared.config import load_settings
from shared.models import known_models, model_path, pull
from shared.paths import default_socket
from shared.transport.mqtt_address import without_secrets

if TYPE_CHECKING:  # importing it loads torch, which `deltarelay models` can do without
    from cloud.access.registry import Registry
    from cloud.api.listener import HttpListener
    from cloud.decoder import Brain
    from cloud.server import Decoder
    from cloud.settings import DecoderSettings


_STARTED_OVER = "DELTARELAY_STARTED_OVER"
"""Set in the environment of a decoder that compiled its program before."""


def cloud(arguments: Sequence[str]) -> int:
    """Run a decoder until SIGTERM or Ctrl-C, or operate those that run."""
    if arguments and arguments[0] in ACTIONS:
        return operate(arguments)
    also = ", ".join(ACTIONS)
    about = f"Serve a model to vehicles. `deltarelay cloud ACTION --help` has more: {also}."
    ask = parser("cloud", about, settings=True)
    ask.add_argument("--model", help="a known model's name or a path")
    ask.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="shm:///path or mqtt://host:port; may be repeated",
    )
    ask.add_argument(
        "--http", metavar="HOST:PORT", help="serve the OpenAI-compatible API there as well"
    )
    ask.add_argument(
        "--check",
        action="store_true",
        help="load the model, run a step and leave: what a start does",
    )
    ask.add_argument("--with-parent", action="store_true", help="end when the parent process ends")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    if options.with_parent:
        die_with_parent()
    from cloud.settings import DecoderSettings

    settings = load_settings(DecoderSettings, options.config, _changes(options))
    if options.check:
        _load(settings)
        progress(f"{settings.model} is ready to serve")
        return 0
    addresses = settings.listen or [f"shm://{default_socket()}"]
    with open_registry(settings) as registry:
        return asyncio.run(_serve(settings, addresses, registry))


def _load(settings: "DecoderSettings") -> "Brain":
    from cloud.decoder import load_brain

    progress(f"loading {settings.model}")
    if settings.device != "cpu":
        return load_brain(settings)
    from cloud.engine.cpu import COMPILED, forget_old_programs

    if not COMPILED.exists():
        progress("compiling the engine for this processor: once, for about half a minute")
    forget_old_programs()
    brain = load_brain(settings)
    from cloud.engine.cpu.runner import was_compiled

    if was_compiled():
        _start_over()
    return brain


def _start_over() -> None:
    """Run this command again, with the program that was compiled and kept just now.

    A process that compiles it may run other copies of its functions than those that load it, with
    other roundings: replies are to be the same whoever gives them.
    """
    if os.environ.get(_STARTED_OVER) != "yes":
        os.environ[_STARTED_OVER] = "yes"
        progress("starting with what was compiled")
        os.execv(sys.executable, sys.orig_argv)


async def _serve(
    settings: "DecoderSettings", addresses: Sequence[str], registry: "Registry"
) -> int:
    from cloud.server import Decoder

    loop = asyncio.get_running_loop()
    decoder = Decoder(_load(settings), settings, registry)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    http = _http_listener(decoder, settings.http) if settings.http else None
    try:
        await decoder.start(addresses)
        if http is not None:
            http.start()
            addresses = [*addresses, http.name]
        where = ", ".join(map(without_secrets, addresses))
        progress(f"decoder {decoder.name} serves {settings.model} at {where}")
        serving = asyncio.create_task(decoder.run(), name="serve")
        stop = asyncio.create_task(stopping.wait(), name="stop")
        done, waiting = await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if serving in done:
            serving.result()
        await _drain(decoder, settings.drain_seconds, stopping)
    finally:
        if http is not None:
            await http.close()
        await decoder.close()
    return 0


async def _drain(decoder: "Decoder", seconds: float, stopping: asyncio.Event) -> None:
    """Leave without cutting replies off; a second signal does not wait for them."""
    stopping.clear()
    draining = asyncio.create_task(decoder.drain(seconds), name="drain")
    again = asyncio.create_task(stopping.wait(), name="stop")
    done, waiting = await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    for task in done:
        task.result()


def _http_listener(decoder: "Decoder", address: str) -> "HttpListener":
    from cloud.api.app import make_app
    from cloud.api.listener import HttpListener

    return HttpListener(make_app(decoder), address)


def _changes(options: argparse.Namespace) -> list[str]:
    changes = list(options.changes)
    if options.model:
        changes.append(f"model={_quoted(options.model)}")
    if options.http:
        changes.append(f"http={_quoted(options.http)}")
    if options.listen:
        changes.append(f"listen=[{', '.join(map(_quoted, options.listen))}]")
    return changes


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def models(arguments: Sequence[str]) -> int:
    """Pull, list and find models."""
    ask = parser("models", "Models that can be served by name.", reports=True)
    actions = ask.add_subparsers(dest="action", required=True)
    for name, about in (("pull", "download and verify"), ("path", "print where a model lies")):
        action = actions.add_parser(name, help=about)
        action.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    actions.add_parser("list", help="print the known models")
    options = ask.parse_args(arguments)
    start_logging(options.log_level)
    if options.action == "list":
        return _list_models(as_json=options.json)
    path = (
        pull(options.model, progress=progress)
        if options.action == "pull"
        else model_path(options.model)
    )
    if options.json:
        print_json({"model": options.model, "path": str(path)})
    else:
        print(path)
    return 0


def _list_models(*, as_json: bool) -> int:
    known = known_models()
    if as_json:
        rows = [
            {"model": m.name, "bytes": m.size, "licence": m.licence, "pulled": m.is_pulled}
            for m in known
        ]
        print_json({"models": rows})
        return 0
    for model in known:
        state = "pulled" if model.is_pulled else "not pulled"
        print(f"{model.name}  {model.size / 1e6:.0f} MB  {model.licence}  {state}")
    return 0


if __name__ == "__main__":
    sys.exit(run("cloud", cloud, sys.argv[1:]))
