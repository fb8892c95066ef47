"""The inference engine. Schedule, run, commit; I/O stays outside.

A sequence's ids are the truth and its KV a cache of them: any sequence may lose its blocks and be
prefilled again. `sequence`, `blocks` and `scheduler` know no torch.
"""
