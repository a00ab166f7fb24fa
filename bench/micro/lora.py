"""What LoRA adapters cost the steps of an engine on a CPU, in this process.

    python -m bench.micro.lora steps [--model FOLDER] [--quantization int4 …]
    python -m bench.micro.lora slots
    python -m bench.micro.lora load
    python -m bench.micro.lora peer

`steps`: a step with adapters, and one of an engine with slots that no row uses, ÷ one of an engine without slots.
`slots`: the throughput with 8 slots ÷ that with 64, of 64 clients that ask for 64 adapters by Zipf's law. `load`: how
long an adapter takes to be read while eight sequences decode, and how long their steps then take. `peer`: sixteen
streams over four adapters, and without adapters, beside llama.cpp's server. The adapters have random weights, of rank
16 for every product.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from safetensors.torch import save_file

from bench.gpu.random_model import write_model
from bench.micro.step import steps
from bench.options import vocab_size
from bench.peers.gguf_files import quantized_gguf
from bench.peers.peer import PeerSettings
from bench.systems import pagoda_server, peer
from bench.turns import run_turns
from bench.workloads import Request, Workload
from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core import sequence
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.models.adapted import AdapterBanks
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels.triton.inputs import LLAMA_1B
from pagoda_server.settings.engine import EngineConfig

RANK = 16
ROUNDS, TOGETHER = 12, 8
CLIENTS, RUNNING, SLOTS, LOADED, ANSWERS = 64, 32, 8, 64, 200
LOADS = 8
STREAMS = 16

app = typer.Typer(add_completion=False, help=__doc__)


def runner_of(model: str, quantization: str, num_slots: int) -> ModelRunner:
    config = EngineConfig(model, dtype="bfloat16", device="cpu", quantization=quantization, max_adapters=num_slots)  # type: ignore[arg-type]
    return ModelRunner(config)


def write_adapter(folder: Path, banks: AdapterBanks, seed: int) -> Path:
    """Write an adapter of every product as PEFT does, with weights that change answers little.

    Adapters in neighbouring folders have the same tensors, but not the same scale, and so each its own identity.
    """
    folder.mkdir()
    tensors = folder.parent / "adapter_model.safetensors"
    if not tensors.exists():
        save_file(
            {
                f"base_model.model.{name}.lora_{half}.weight": (0.01 * torch.randn(shape)).bfloat16()
                for name, (in_size, out_size) in banks.modules.items()
                for half, shape in (("A", (RANK, in_size)), ("B", (out_size, RANK)))
            },
            tensors,
        )
    (folder / tensors.name).hardlink_to(tensors)
    targets = sorted({name.rpartition(".")[2] for name in banks.modules})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + seed, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapters_of(runner: ModelRunner, folder: Path, count: int) -> tuple[Adapter, ...]:
    banks = runner.adapters
    assert isinstance(banks, AdapterBanks)
    return tuple(banks.load(write_adapter(folder / str(seed), banks, seed)) for seed in range(count))


@app.command(name="steps")
def measure_steps(
    model: Annotated[str, typer.Option(help="A folder; 1b: random weights in the shape of Llama 3.2 1B.")] = "",
    quantization: Annotated[list[str], typer.Option()] = ["int4", "int8", "none"],  # noqa: B006 - typer copies it
) -> None:
    """Print milliseconds and the medians of ratios, each of steps that follow each other."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = str(write_1b(folder / "model") if model == "1b" else resolve(model or DEFAULT_MODEL))
        for each in quantization:
            without, within = runner_of(path, each, 0), runner_of(path, each, SLOTS)
            (folder / each).mkdir()
            adapters = adapters_of(within, folder / each, SLOTS)
            print(f"{within.info.kernels}: an adapter has {adapters[0].num_bytes / 1e6:.1f} MB")
            for rows in (1, SLOTS):
                used = {"no adapter": (None,), "one adapter": adapters[:1], "eight adapters": adapters[:rows]}
                cases = [decodes(without, rows, (None,)), *(decodes(within, rows, each) for each in used.values())]
                times = [[next(case) for case in cases] for _ in range(ROUNDS)]
                print(f"  {rows} rows: {median(base for base, *_ in times):.2f} ms without slots;", end="")
                for at, kind in enumerate(used, 1):
                    found = [turn[at] / turn[0] for turn in times]
                    print(f" {kind} {median(found):.3f} ({min(found):.3f} to {max(found):.3f})", end="")
                print(flush=True)


def decodes(runner: ModelRunner, rows: int, adapters: tuple[Adapter | None, ...]) -> Iterator[float]:
    """The median milliseconds of a few steps of sequences that decode, again and again."""
    running = steps(runner, rows, 64, ROUNDS * (TOGETHER + 1) + 10, adapters)
    decoding = (ms for plan, ms in running if len(plan.chunks) == plan.num_tokens == rows)
    next(decoding)  # is recorded
    while True:
        next(decoding)  # after steps of others its inputs are written anew
        yield median(itertools.islice(decoding, TOGETHER))


def write_1b(folder: Path) -> Path:
    return write_model(folder, LLAMA_1B, max_positions=2048)


def tokens_per_s(runner: ModelRunner, adapters: tuple[Adapter, ...], seed: int) -> float:
    """Output tokens a second. A client asks again once it is answered; the adapters it names follow Zipf's law."""
    banks = runner.adapters
    assert banks is not None
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=RUNNING,
        token_budget=512,
        max_model_len=runner.info.max_model_len,
        windows=runner.info.kv_cache.groups.windows,
        prefix_caching=False,
        clock=time.monotonic,
        num_adapter_slots=banks.num_slots,
    )
    draw = np.random.default_rng(seed)
    chances = 1 / np.arange(1, len(adapters) + 1)
    chosen = draw.choice(len(adapters), ANSWERS, p=chances / chances.sum())
    prompts, outputs = draw.integers(16, 64, ANSWERS), draw.integers(16, 48, ANSWERS)

    def ask(number: int) -> None:
        prompt = draw.integers(0, runner.info.vocab_size, prompts[number]).tolist()
        request = sequence.Request(len(prompt), bypass_cache=True, adapter=adapters[chosen[number]])
        scheduler.add(Sequence(number, prompt, request, SamplingParams(max_tokens=int(outputs[number]))))

    started = time.perf_counter()
    asked = 0
    while asked < CLIENTS:
        ask(asked)
        asked += 1
    while not (plan := scheduler.schedule()).is_empty:
        scheduler.commit(plan, runner.launch(plan).result())
        for _ in scheduler.take_output().ended:
            if asked < ANSWERS:
                ask(asked)
                asked += 1
    return float(outputs.sum()) / (time.perf_counter() - started)


@app.command(name="slots")
def measure_slots(quantization: Annotated[str, typer.Option()] = "int4", rounds: int = 3) -> None:
    """Print the throughput with few slots and with as many as there are adapters."""
    model = str(resolve(DEFAULT_MODEL))
    with tempfile.TemporaryDirectory() as temporary:
        few, many = runner_of(model, quantization, SLOTS), runner_of(model, quantization, LOADED)
        adapters = adapters_of(many, Path(temporary), LOADED)
        ratios = []
        for seed in range(rounds):
            rates = [tokens_per_s(each, adapters, seed) for each in ((few, many) if seed % 2 else (many, few))]
            found = rates if seed % 2 else rates[::-1]
            ratios.append(found[0] / found[1])
            print(f"{SLOTS} slots {found[0]:.0f}, {LOADED} slots {found[1]:.0f} tokens/s: {ratios[-1]:.3f}", flush=True)
        print(f"median {median(ratios):.3f}")


@app.command(name="load")
def measure_load(quantization: Annotated[str, typer.Option()] = "int4") -> None:
    """Print how long loads take while sequences decode, and the steps meanwhile ÷ those before."""
    runner = runner_of(str(resolve(DEFAULT_MODEL)), quantization, SLOTS)
    banks = runner.adapters
    assert isinstance(banks, AdapterBanks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = [write_adapter(folder / str(seed), banks, seed) for seed in range(LOADS + 1)]
        first = banks.load(paths.pop())
        list(steps(runner, SLOTS, 128, 20, (first,)))
        quiet = [ms for _, ms in steps(runner, SLOTS, 128, 80, (first,))][20:]
        loads: list[float] = []
        worked: list[float] = []

        def load_all() -> None:
            for path in paths:
                time.sleep(0.2)
                started, began = time.perf_counter(), time.thread_time()
                banks.load(path)
                loads.append(1e3 * (time.perf_counter() - started))
                worked.append(1e3 * (time.thread_time() - began))

        thread = threading.Thread(target=load_all)
        busy: list[float] = []
        for number, (_, ms) in enumerate(steps(runner, SLOTS, 128, 1000, (first,))):
            if number == 20:
                thread.start()
            if number > 20:
                busy.append(ms)
                if not thread.is_alive():
                    break
        thread.join()
        size = sum(path.stat().st_size for path in (folder / "0").iterdir())
        times = ", ".join(f"{ms:.0f}" for ms in sorted(loads))
        print(f"an adapter of {size / 1e6:.1f} MB: loads of {times} ms, {median(worked):.0f} ms of them at work")
        usual = median(quiet)
        print(f"steps: median {usual:.1f}, at most {max(quiet):.1f} ms before; {median(busy):.1f}, at most", end=" ")
        print(f"{max(busy):.1f} ms meanwhile: {max(busy) / usual:.2f} times the median before")


GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, banks: AdapterBanks, seed: int) -> Path:
    """Write an adapter as llama.cpp's conversion does. Which of its random rows are rotated together is no matter."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", RANK)
    for module, (in_size, out_size) in banks.modules.items():
        parts = module.split(".")
        for half, shape in (("a", (RANK, in_size)), ("b", (out_size, RANK))):
            values = 0.01 * draw.standard_normal(shape)
            writer.add_tensor(f"blk.{parts[2]}.{GGUF_NAMES[parts[-1]]}.weight.lora_{half}", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@app.command(name="peer")
def measure_peer(repeat: int = 3, threads: int = torch.get_num_threads()) -> None:
    """Print output tokens a second of Pagoda and of llama-server, with four adapters and without, in turns."""
    folder = resolve(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as temporary:
        banks = runner_of(str(folder), "int4", 1).adapters
        assert isinstance(banks, AdapterBanks)
        files = {f"a{seed}": str(write_gguf(Path(temporary) / f"a{seed}.gguf", banks, seed)) for seed in range(4)}
        del banks
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, vocab_size(DEFAULT_MODEL), 64).tolist() for _ in range(STREAMS)]
        workloads = [
            Workload(name, [Request(prompt, 96, adapter=adapters[at % 4]) for at, prompt in enumerate(prompts)])
            # In this order: a server may serve before it has loaded the adapters of --lora.
            for name, adapters in (("no adapters", [""] * 4), ("four adapters", [*files]))
        ]
        settings = PeerSettings(
            model=str(folder),
            gguf=str(quantized_gguf(DEFAULT_MODEL, no_progress)),
            threads=threads,
            max_num_seqs=STREAMS,
            longest=workloads[0].longest,
            count=STREAMS,
            prefix_caching=False,
            adapters=files,
        )
        loras = ",".join(f"{name}={path}" for name, path in files.items())
        arguments = ["--model", DEFAULT_MODEL, "--threads", str(threads), "--quantization", "int4", "--lora", loras]
        systems = [pagoda_server("pagoda", arguments), peer("llama.cpp", settings)]
        for workload, (ours, theirs) in zip(workloads, run_turns(systems, workloads, repeat), strict=True):
            ratios = [mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True)]
            found = (", ".join(f"{rate:.0f}" for rate in each.rates) for each in (ours, theirs))
            print(f"{workload.name}: {' and '.join(found)} tokens/s; ratio {median(ratios):.2f}", end=" ")
            print(f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    app()
