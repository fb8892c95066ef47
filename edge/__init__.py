"""The vehicle's side: sources, tokenizer, conversations. Never loads torch or flwr."""

from edge.agent import Agent, connect
from edge.talk import Talk

__all__ = ["Agent", "Talk", "connect"]
