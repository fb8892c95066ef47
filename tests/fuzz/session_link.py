"""Two honest ends and a hostile link: it loses, repeats, reorders and breaks."""

from random import Random

from tests.test_shared_session import STEPS, walk

MAX_STEPS = 200


def seeds() -> list[bytes]:
    """Walks by chance, with one decoder and with two."""
    return [bytes((head,)) + Random(head).randbytes(3 * MAX_STEPS) for head in range(4)]


def target(data: bytes) -> None:
    """After the link heals both logs agree, and no index was given twice with different ids."""
    head, rest = data[:1], data[1 : 1 + 3 * MAX_STEPS]
    steps = [
        (STEPS[rest[i] % len(STEPS)], int.from_bytes(rest[i + 1 : i + 3], "little"))
        for i in range(0, len(rest), 3)
    ]
    choice = head[0] if head else 0
    walk(steps, decoders=1 + choice % 2, shared_link=bool(choice & 2))
