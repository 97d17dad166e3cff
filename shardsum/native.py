"""Finds the native library. Until one is built, every operator runs the plain-torch fallback of kernels.py."""


def load() -> None:
    """Load the native library once; nothing to do while there is none."""
