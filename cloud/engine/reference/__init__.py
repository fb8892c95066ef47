"""The same step in plain torch: what a GPU runs, and the naive twin of the program for CPUs."""
