"""Command line programs: train, bench, compare, doctor."""
