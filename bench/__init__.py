"""Workloads, and the systems that they are run on."""


class BenchError(Exception):
    """A system did not start or did not do what it was asked, or the command asks for something that does not exist."""
