"""The page of the benchmarks: what it has, and how it is made of the figures."""
