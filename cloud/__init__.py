"""The decoder: incremental prefill, continuous batching, replies."""
