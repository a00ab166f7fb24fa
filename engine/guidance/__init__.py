"""Structured output: grammars that decide which tokens a sequence may choose. Public face: Grammars."""

from .grammars import Grammars

__all__ = ["Grammars"]
