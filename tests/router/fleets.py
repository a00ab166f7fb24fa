"""Fleets of engines that tests play."""

from __future__ import annotations

import itertools
from typing import Any

from pagoda_server.router.engines.adapters import Adapters
from pagoda_server.router.engines.choosing import LeastLoaded
from pagoda_server.router.engines.fleet import Engines, Fleet, Member
from pagoda_server.router.engines.held_adapters import HeldAdapters
from pagoda_server.router.engines.table import EngineTable
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.models import ServedModel, ServedModels

UNUSED: Any = None


class RestlessTable(EngineTable):
    """That of engines which do not say when they change."""

    versions = itertools.count()

    @property
    def version(self) -> int:
        return next(self.versions)

    @version.setter
    def version(self, version: int) -> None:
        pass


def fleet_of(*engines: Any) -> Fleet:
    """A fleet of these, whatever stands for their channels. They are named by their places, from 0."""

    def connect(member: Member, number: int) -> Any:
        engine = engines[number]
        engine.name, engine.address, engine.number, engine.is_leaving = member.name, member.address, number, False
        engine.held = HeldAdapters()
        return engine

    chooser = LeastLoaded()
    chooser.table = RestlessTable()
    fleet = Fleet(connect, chooser)
    for place in range(len(engines)):
        fleet.join(Member(str(place), f"unix:{place}"))
    return fleet


def served(
    engines: Engines, name: str = "m", tokenizer: Any = UNUSED, limits: Limits = UNUSED, architecture: str = "llama"
) -> ServedModel:
    """A model that these engines serve."""
    return ServedModel(name, UNUSED, tokenizer, None, limits, UNUSED, engines, Adapters(engines), architecture)


def one_model(engines: Engines, tokenizer: Any = UNUSED, limits: Limits = UNUSED) -> ServedModels:
    return ServedModels([served(engines, tokenizer=tokenizer, limits=limits)])
