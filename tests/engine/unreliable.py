"""A runner whose steps fail on demand."""

from __future__ import annotations

from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.loop.steps_in_flight import Launched, Runner
from tests.engine.harness import ContentCheckingRunner


class Broken:
    """A step whose failure shows when it is read."""

    def result(self) -> Sampled:
        raise FloatingPointError("as told")


class UnreliableRunner:
    """Fails chosen steps: at their launch, or when they are read, computed or not."""

    def __init__(self, runner: Runner) -> None:
        self.failures: list[str] = []
        self.lookahead = runner.lookahead
        self._runner = runner

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Launched:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "at launch":
            raise FloatingPointError("as told")
        if failure == "when read":
            if isinstance(self._runner, ContentCheckingRunner):
                self._runner.is_misled = True
            return Broken()
        launched = self._runner.launch(plan)
        return Broken() if failure == "computed" else launched
