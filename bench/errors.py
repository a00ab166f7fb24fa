"""What can go wrong in a benchmark and is to be told in one line."""


class BenchError(Exception):
    """A system did not start, did not do what was asked of it, or the command asks for what there is not."""
