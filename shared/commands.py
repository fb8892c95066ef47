"""The `deltarelay` command: finds the commands of the installed packages, and what they all have in
common.

A command is a function `(arguments) -> exit status`, registered in the entry point group
`deltarelay.commands`, so that an edge install has only the edge's.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from shared.errors import DeltarelayError

Command = Callable[[Sequence[str]], int]


def main() -> int:
    """Run `deltarelay COMMAND ...`."""
    known = {entry.name: entry for entry in entry_points(group="deltarelay.commands")}
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(known))
        return 0 if arguments else 64
    name, *rest = arguments
    if name not in known:
        print(f"deltarelay: unknown command {name!r}\n{_overview(known)}", file=sys.stderr)
        return 64
    try:
        command: Command = known[name].load()
    except ModuleNotFoundError as error:
        print(f"deltarelay {name}: {_missing(error)}", file=sys.stderr)
        return 69
    return run(name, command, rest)


def run(name: str, command: Command, arguments: Sequence[str]) -> int:
    """Run a command; errors of ours become one line on standard error and an exit status."""
    try:
        return command(arguments)
    except DeltarelayError as error:
        print(f"deltarelay {name}: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        print(f"deltarelay {name}: {_missing(error)}", file=sys.stderr)
        return 69
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


def parser(
    name: str,
    about: str,
    *,
    settings: bool = False,
    reports: bool = False,
    is_parent: bool = False,
) -> argparse.ArgumentParser:
    """Return an argument parser with the options that every command has.

    Args:
        settings: the command has settings.
        reports: it can report in JSON.
        is_parent: it only gives its options to the parsers of actions.
    """
    result = argparse.ArgumentParser(
        prog=f"deltarelay {name}", description=about, add_help=not is_parent
    )
    if settings:
        result.add_argument("--config", type=Path, metavar="FILE", help="settings, as TOML")
        result.add_argument(
            "--set",
            dest="changes",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting (a.b=c); may be repeated",
        )
    result.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="what is logged to standard error (default: %(default)s)",
    )
    if reports:
        result.add_argument(
            "--json", action="store_true", help="one JSON object as the last line of the output"
        )
    return result


def start_logging(level: str) -> None:
    """Log to standard error."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def progress(text: str) -> None:
    """Tell a person how far a command is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object as the last line of standard output."""
    print(json.dumps(result), flush=True)


def _overview(known: Mapping[str, EntryPoint]) -> str:
    names = " | ".join(sorted(known))
    return f"usage: deltarelay COMMAND ...\n\ncommands: {names}\nhelp: deltarelay COMMAND --help"


def _missing(error: ModuleNotFoundError) -> str:
    return (
        f"the package {error.name!r} is not installed; this command needs an extra: "
        "pip install 'deltarelay[all]' (or edge, speech, cloud, simulations)"
    )
