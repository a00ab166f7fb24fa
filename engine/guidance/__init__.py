"""Structured output: grammars that decide which tokens a sequence may choose. Public face: Grammars."""

from pagoda_server.engine.guidance.grammars import Grammars

__all__ = ["Grammars"]
