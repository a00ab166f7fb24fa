"""Workloads, and the systems that they are run on."""
