"""What can go wrong on the way to a model."""


class CheckpointError(Exception):
    """This model cannot be had: the message says which file or name, what is wrong with it and what would be right."""
