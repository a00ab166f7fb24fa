"""Benchmarks: workloads, the systems that they run on, and what is measured and reported."""


class BenchError(Exception):
    """A system did not start or did not do what it was asked, or the command asks for something that does not exist."""
