"""Runners compute step plans: on a CPU, on a GPU, or without a model. Public face: load_runner of load.py."""
