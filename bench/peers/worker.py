"""A peer's process: `python -m bench.peers.worker NAME SETTINGS`, with JSON lines as input and output.

It loads the peer, warms it up, writes {"ready": versions, "pid": …}, and then waits for input without using the CPU.
Each line of input is a workload; the answers are {"done": tokens} now and then, and {"run": …} at the end. The process
ends with its input.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.peers.peer import PeerRun, PeerSettings
from bench.peers.registry import PEERS
from bench.workloads import Request, Workload

REPORT_EVERY_S = 0.5
WARM_UP = Workload("warm-up", [Request([1, 2, 3, 4, 5, 6, 7, 8], 4)])


def main(name: str, settings: str) -> None:
    # Libraries print to standard output too. That goes to the log, and answers go to a copy of standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    peer = PEERS[name].make(PeerSettings(**json.loads(settings)))
    peer.run(WARM_UP, lambda count: None)
    answer({"ready": peer.versions, "pid": peer.pid})
    for line in sys.stdin:
        answer({"run": dataclasses.asdict(peer.run(read_workload(line), _Reporter(answer)))})


def write_workload(workload: Workload) -> str:
    return json.dumps(dataclasses.asdict(workload))


def read_workload(line: str) -> Workload:
    fields = json.loads(line)
    requests = [Request(**request) for request in fields.pop("requests")]
    return Workload(requests=requests, **fields)


def read_run(fields: dict[str, Any]) -> PeerRun:
    from bench.measure import RequestTimes

    return PeerRun([RequestTimes(**times) for times in fields["times"]], fields["steps"])


class _Reporter:
    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer
        self._count = 0
        self._reported = time.monotonic()

    def __call__(self, count: int) -> None:
        self._count += count
        if time.monotonic() - self._reported >= REPORT_EVERY_S:
            self._answer({"done": self._count})
            self._count, self._reported = 0, time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
