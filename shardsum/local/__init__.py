"""Sums of shards that one process holds: what users call, the registered operators, and the raw kernels."""
