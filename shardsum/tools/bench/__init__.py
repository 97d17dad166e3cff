"""``shardsum bench``: rows of bytes, time, rate, share of the ceiling and speed-up over a named baseline, all verified.

Exit code 1: a result of ours differs from the reference in a bit, or a baseline is off by more than its rounding.
"""
