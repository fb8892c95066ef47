"""Fuzzing: every door through which bytes of strangers come in.

A target is a module with two functions. `seeds()` returns valid inputs; `target(data)` puts `data`
through the door and returns, whatever it is: it swallows the errors that the door declares, and
nothing else, and asserts what must hold afterwards. `test_fuzz.py` runs all of them briefly with
mutated seeds; `python -m tests.fuzz NAME` runs one for long, guided by coverage (atheris).
"""

TARGETS = (
    "adapter",
    "body",
    "frames",
    "gguf",
    "ring",
    "session_cloud",
    "session_edge",
    "session_link",
    "snapshot",
    "state",
    "tokenizer",
)
