"""`python -m pagoda_server.engine`: an engine alone, for a router that attaches to it."""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from typing import Annotated, Literal

import typer

from pagoda_server.engine.core.config import EngineConfig, KVCacheDType, Overlap, Quantization
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.policies import PolicyName
from pagoda_server.engine.serving.listen import check_listen
from pagoda_server.engine.serving.main import EXIT_CONFIG, run


def main(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Name, folder or .gguf file.")] = "smollm2-135m-instruct",
    listen: Annotated[str, typer.Option(help="shm:PATH, unix:PATH or HOST:PORT.")] = "127.0.0.1:50052",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option()] = "auto",
    quantization: Annotated[
        Quantization,
        typer.Option(
            help="Bits of weights. int4: where the file has 4, else 8. auto: int4 or int8 where a CPU is fast at it."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[KVCacheDType, typer.Option(help="fp8: half the memory, on a GPU.")] = "auto",
    kv_cache_gb: Annotated[float | None, typer.Option(help="Default: what a GPU has free; 0.5 on a CPU.")] = None,
    host_kv_gb: Annotated[float, typer.Option(help="Host memory for what preempted sequences have computed.")] = 0.0,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a KV block. Default: 4 on a CPU, 16 on a GPU.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    token_budget: Annotated[int, typer.Option(help="Tokens that one step computes at most.")] = 512,
    policy: Annotated[PolicyName, typer.Option(help="Who is next in line.")] = "priority",
    priority_ageing_s: Annotated[float, typer.Option(help="Waiting worth one step of priority.")] = 60.0,
    tenant_weights: Annotated[str, typer.Option(help="Tenants' shares under fair: NAME=WEIGHT,….")] = "",
    target_itl_ms: Annotated[
        float, typer.Option(help="Longest step beside decodes, held by its share of prefill; 0: no target.")
    ] = 100.0,
    overlap: Annotated[Overlap, typer.Option(help="Launch a step before the last one's tokens are read.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Prompt + output of one sequence.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the blocks of computed prompts.")] = True,
    threads: Annotated[int | None, typer.Option(help="For the model's arithmetic. Default: one a core.")] = None,
    allow_insecure: Annotated[bool, typer.Option(help="Listen where other hosts can reach it.")] = False,
    exit_with_parent: Annotated[bool, typer.Option(help="Exit when standard input ends.")] = False,
    step_ms: Annotated[
        str | None, typer.Option(help="Synthetic model: milliseconds of a step, BASE[,PER_SEQUENCE[,PER_TOKEN]].")
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option()] = "info",
) -> None:
    """Serves a model's tokens to routers. The channel has no authentication: keep it on a private network."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    try:
        check_listen(listen, allow_insecure)
        config = EngineConfig(**{field.name: context.params[field.name] for field in fields(EngineConfig)})
        step_time = StepTime.parse(step_ms) if step_ms else None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    sys.exit(run(config, listen, exit_with_parent=exit_with_parent, step_time=step_time))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
