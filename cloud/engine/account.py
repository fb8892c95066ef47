"""Whose tokens are counted together when steps are shared (`fairness`). Plain values."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Account:
    """Whose tokens are counted together: a device, or whoever holds an API key."""

    weight: float = 1.0
    """Its share against the others'; above 0."""
    served: float = 0.0
    """Tokens by weight, raised to what the others had while it wanted nothing."""
