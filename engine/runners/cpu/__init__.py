"""A runner for a CPU, which computes each step when it is launched. Public face: ModelRunner of runner.py."""
