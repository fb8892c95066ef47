"""`python -m tests.fuzz NAME --seconds 600`: one target for long, guided by coverage.

The first input that breaks a promise, takes longer than two seconds or the process over its memory
ends the run; it is left in `runs/fuzz/NAME/`, beside the corpus, and `--input` runs it again.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tests.fuzz import TARGETS

try:
    import atheris
except ImportError:
    sys.exit("atheris is missing: pip install -e '.[fuzz]' (CPython 3.11 to 3.13 on Linux, x86-64)")

_OURS = ["shared", "edge", "cloud"]


def main() -> None:
    """Run one target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--memory-mb", type=int, default=2048, help="most resident memory")
    parser.add_argument("--input", type=Path, help="run this input alone")
    given = parser.parse_args()
    with atheris.instrument_imports(include=_OURS, enable_loader_override=False):
        module = importlib.import_module(f"tests.fuzz.{given.name}")
    folder = given.folder / given.name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = module.seeds()
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-max_total_time={given.seconds}",
        f"-max_len={max(4096, 2 * max(map(len, seeds)))}",
        f"-artifact_prefix={folder}/",
        f"-rss_limit_mb={given.memory_mb}",
        "-timeout=2",
        "-reduce_inputs=0",  # seeds stay whole: of what compiled parsers do, nothing is seen
        "-report_slow_units=1",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(given.input or corpus)], module.target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
