"""Benches: what is promised about speed and memory, measured. Light: its probes count what they import."""
