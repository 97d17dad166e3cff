"""Random calls of the public functions, compared bit for bit with an oracle in numpy that shares no code with them.

python -m tests.fuzz --seed 0 --local 100000 --processes 2000
"""
