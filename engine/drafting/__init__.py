"""Speculative decoding: which tokens are drafted, and how many pay. Public face: Speculation, Drafter, PromptLookup."""

from .prompt_lookup import PromptLookup
from .speculation import Drafter, Speculation

__all__ = ["Drafter", "PromptLookup", "Speculation"]
