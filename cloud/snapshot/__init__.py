"""Conversations on disk, so that a decoder that was killed goes on where it was.

A conversation has a log (the truth: opening, turns, the open turn's words) and segments (keys and
values, a cache of it). `format` says what their bytes are, `store` keeps the files, `writer` copies
blocks out of a serving engine, `restore` puts them back before it serves, `keeper` decides when.
"""
