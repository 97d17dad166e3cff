"""Arithmetic and definitions that need no process group: layout, numerics, the reference, bits, argument checks."""
