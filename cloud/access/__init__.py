"""Who may come in, and who may ask for how much."""
