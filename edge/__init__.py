"""The vehicle's side: sources, tokenizer, conversations. Never loads torch or flwr."""

from edge.agent import Agent, connect
from edge.talk import Talk
from shared.transport.credentials import Credentials

__all__ = ["Agent", "Credentials", "Talk", "connect"]
