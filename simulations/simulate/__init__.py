"""Faults, played with real processes: what is promised about them, shown."""
