"""aiosync measured beside torchrl and beside the machine's own limit, in one run and in turn.

``python -m benchmarks.bench --help`` lists the options. Nothing here is imported by aiosync itself,
except that its command ``aiosync bench`` calls :func:`benchmarks.bench.main`.
"""
