"""The OpenAI-compatible HTTP API of a decoder, beside the relay and on the same engine."""
