"""An empty room, kept on purpose: gradient summaries, aggregation and adapters move in here."""
