"""Print the kernels that serving would compile and starting has not. Run it as a module with TRITON_INTERPRET=0.

Kernels are recorded as they would be compiled for a GPU, and not run: a step "chooses" whatever lies in memory.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pagoda_server.engine.core.sequence import SamplingParams
from pagoda_server.engine.runners.cuda import DeviceRunner
from pagoda_server.engine.runners.loaded_model import choose_backend, load_for_serving
from pagoda_server.kernels.triton import linear_fixed, paged_fixed
from pagoda_server.kernels.triton.launches import record
from pagoda_server.settings.engine import EngineConfig
from tests.engine.test_device_runner import SETTINGS, Served, ask
from tests.engine.tiny_models import MODELS, random_prompt, save_model

CAPABILITY = 90
KINDS = (
    ("llama", {}),
    ("qwen3", {"quantization": "int8"}),
    ("mistral with a sliding window", {"kv_cache_dtype": "fp8"}),
    ("olmo2", {}),
    ("smollm", {"kv_cache_dtype": "int8"}),
    ("llama", {"quantization": "int8", "deterministic": True}),
)


def start(runner: DeviceRunner) -> None:
    """Do what a runner does on a GPU before the first request."""
    runner.warm_up(int(SETTINGS["token_budget"]))  # type: ignore[call-overload]
    with torch.inference_mode():
        for shape in runner._graphs.shapes:
            runner._pad(shape)
            runner._compute(shape)


def serve(runner: DeviceRunner) -> None:
    """Serve every kind of request, alone and together, and two that share a prompt's blocks."""
    served = Served(runner, 36)
    shared = random_prompt(11, seed=99)
    for _ in range(2):
        served.add(shared, SamplingParams(max_tokens=3))
        served.step()
    ask(served, 1, max_tokens=2)
    served.run()
    ask(served, 8, max_tokens=4)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]


def main() -> None:
    # With these some steps share their splits and parts out among programs, as on a GPU, and others do not.
    linear_fixed.SPLIT_INPUTS, linear_fixed.num_processors = 32, lambda _: 3  # type: ignore[assignment]
    paged_fixed.PART_TILES, paged_fixed.num_processors = 1, lambda _: 8  # type: ignore[assignment]
    for name, settings in KINDS:
        with TemporaryDirectory() as folder:
            save_model(MODELS[name], Path(folder))
            config = EngineConfig(folder, **({"dtype": "float32"} | SETTINGS | settings))  # type: ignore[arg-type]
            backend = choose_backend(torch.device("cuda"), torch.float32, config.quantization)
            runner = DeviceRunner(config, load_for_serving(config, torch.device("cpu"), backend=backend))
        started, needed = (
            {launch.identity: launch.name for launch in record(CAPABILITY, partial(phase, runner))}
            for phase in (start, serve)
        )
        told = {"needed": sorted(set(needed.values())), "new": [needed[one] for one in needed.keys() - started.keys()]}
        print(json.dumps({"model": name, "backend": runner.info.kernel_backend, **told}))


if __name__ == "__main__":
    main()
