"""Pagoda's server: the folders of the repository under one import name."""

from __future__ import annotations


def installed_version() -> str:
    """The version of the installed distribution; "not installed" in a checkout that runs where it lies."""
    from importlib.metadata import PackageNotFoundError, version  # only two commands pay for this import

    try:
        return version("pagoda-server")
    except PackageNotFoundError:
        return "not installed"
