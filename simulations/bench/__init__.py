"""What is promised about speed and memory, measured. Light: probes count what they import."""
