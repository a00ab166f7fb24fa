"""The outcomes of steps on their way to the host: one copy a step, for which only `DeviceStep.result` waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ....kernels import MAX_TOP_LOGPROBS, SampledRows
from ...core.step import NOT_FINITE, Chunk, Reading, Sampled, TokenLogprobs
from ..readings import PendingReading
from .staging import Layout, all_launched, host_bytes

_IN_FLIGHT = 3  # steps whose outcomes are copied but not yet read, plus one that is launched


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step on the device.

    places       chunk position → chunk and its first entry among the outcomes
    faults       as in Sampled
    copied_s     returns `Sampled.copied_s`, once the step is computed
    readings     what is read from prompts, by chunk position
    num_choices  as in DeviceRows
    """

    num_chunks: int
    places: dict[int, tuple[Chunk, int]]
    faults: dict[int, str]
    arrays: dict[str, np.ndarray]
    wait: Callable[[], None]
    copied_s: Callable[[], float]
    readings: dict[int, PendingReading]
    num_choices: dict[int, int]

    def result(self) -> Sampled:
        self.wait()
        chosen = self.arrays["tokens"].tolist()
        tokens = [-1] * self.num_chunks
        logprobs: list[TokenLogprobs | None] = [None] * self.num_chunks
        faults = dict(self.faults)
        more: dict[int, list[tuple[int, TokenLogprobs | None]]] = {}
        for index, (chunk, entry) in self.places.items():
            if index in faults:
                continue
            tokens[index] = chosen[entry]
            if tokens[index] < 0:
                faults[index] = NOT_FINITE
            elif (count := chunk.seq.params.logprobs) is not None:
                logprobs[index] = self._logprobs(entry, count)
            if chunk.drafts:
                drafts = chunk.drafts[: self.num_choices.get(index, chunk.length) - 1]
                more[index] = self._accepted_run(chunk, drafts, entry, chosen)
        readings: dict[int, Reading] = {}
        for index, pending in self.readings.items():
            if (reading := pending.result()) is None:
                faults[index] = NOT_FINITE
            else:
                readings[index] = reading
        postponed = {index for index, count in self.num_choices.items() if not count}
        return Sampled(tokens, logprobs, faults, self.copied_s(), readings, more, postponed)

    def _accepted_run(
        self, chunk: Chunk, drafts: tuple[int, ...], entry: int, chosen: list[int]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Return the tokens behind accepted drafts, and one more. A broken one ends them: the next step meets it again.

        drafts  those of the chunk behind which a token could be chosen
        entry   of the token before the first draft
        """
        count = chunk.seq.params.logprobs
        run: list[tuple[int, TokenLogprobs | None]] = []
        for behind, draft in enumerate(drafts, entry + 1):
            if draft != chosen[behind - 1] or chosen[behind] < 0:
                break
            run.append((chosen[behind], None if count is None else self._logprobs(behind, count)))
        return run

    def _logprobs(self, entry: int, count: int) -> TokenLogprobs:
        first = entry * MAX_TOP_LOGPROBS
        return TokenLogprobs(
            float(self.arrays["chosen"][entry]),
            self.arrays["top_ids"][first : first + count].tolist(),
            self.arrays["top"][first : first + count].tolist(),
        )


class Outcomes:
    """Memory for what `size` entries of a step choose: on the device, and on the host for each step in flight."""

    def __init__(self, size: int, device: torch.device) -> None:
        layout = Layout(
            {
                "tokens": (torch.int32, size),
                "chosen": (torch.float32, size),
                "top_ids": (torch.int32, size * MAX_TOP_LOGPROBS),
                "top": (torch.float32, size * MAX_TOP_LOGPROBS),
            }
        )
        self._device = device
        self._source = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self._views = layout.views(self._source)
        self._targets = [host_bytes(layout.size, device) for _ in range(_IN_FLIGHT)]
        self._arrays = [{name: view.numpy() for name, view in layout.views(t).items()} for t in self._targets]
        self._tokens_end = size * torch.int32.itemsize
        self._turn = 0

    def rows(self, count: int) -> SampledRows:
        """Return the first `count` entries, as the kernels write them."""
        return SampledRows(
            tokens=self._views["tokens"][:count],
            chosen=self._views["chosen"][:count],
            top_ids=self._views["top_ids"].view(-1, MAX_TOP_LOGPROBS)[:count],
            top=self._views["top"].view(-1, MAX_TOP_LOGPROBS)[:count],
        )

    def read(
        self,
        num_chunks: int,
        places: dict[int, tuple[Chunk, int]],
        faults: dict[int, str],
        copied_s: Callable[[], float],
        readings: dict[int, PendingReading],
        num_choices: dict[int, int],
    ) -> DeviceStep:
        """Start the copy of the step that was launched last, without logprobs if no sequence asks for them."""
        asks = any(chunk.seq.params.logprobs is not None for chunk, _ in places.values())
        end = self._source.shape[0] if asks else self._tokens_end
        self._turn = (self._turn + 1) % _IN_FLIGHT
        self._targets[self._turn][:end].copy_(self._source[:end], non_blocking=True)
        wait = all_launched(self._device)
        arrays = self._arrays[self._turn]
        return DeviceStep(num_chunks, places, faults, arrays, wait, copied_s, readings, num_choices)
