"""Speculative decoding: which tokens are drafted, and how many pay. Public face: Speculation, Drafter, PromptLookup."""

from pagoda_server.engine.drafting.prompt_lookup import PromptLookup
from pagoda_server.engine.drafting.speculation import Drafter, Speculation

__all__ = ["Drafter", "PromptLookup", "Speculation"]
