"""The `pagoda` command."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pagoda_server import installed_version
from pagoda_server.cli.chat import chat
from pagoda_server.cli.generate import generate
from pagoda_server.cli.health import health
from pagoda_server.cli.inspect import models, status
from pagoda_server.cli.terminal import print_error
from pagoda_server.cli.trace import trace

app = typer.Typer(
    help="Pagoda: a gRPC streaming inference server for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_ENGINE = "The engine (passed on when it is spawned)"
_LIMITS = "Limits"
_EXPOSURE = "Exposure"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"pagoda {installed_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A name, a folder, a .gguf file or a hub name.")] = "smollm2-135m-instruct",
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="its name, or its folder's")
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT (port 0 takes a free one) or unix:PATH.")] = "127.0.0.1:50051",
    engine: Annotated[
        str, typer.Option(help="'spawn', or where engines run: shm:PATH, unix:PATH or HOST:PORT, comma-separated.")
    ] = "spawn",
    workers: Annotated[int, typer.Option(help="Router processes that share the port.", min=1)] = 1,
    channel: Annotated[
        Literal["auto", "shm", "grpc"],
        typer.Option(rich_help_panel=_ENGINE, help="To a spawned engine: shared memory (auto: on Linux) or gRPC."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(rich_help_panel=_ENGINE, help="What computes the model. auto: a GPU where torch finds one."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            rich_help_panel=_ENGINE, help="Numbers to compute in. auto: bfloat16, float32 for a checkpoint of float32."
        ),
    ] = "auto",
    quantization: Annotated[
        Literal["auto", "none", "int4", "int8", "fp8"],
        typer.Option(
            rich_help_panel=_ENGINE,
            help="Bits of weights. int4: where the file has 4, else 8. auto: int4 or int8 where a CPU is fast at it.",
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], typer.Option(rich_help_panel=_ENGINE, help="fp8: half the memory a token, on a GPU.")
    ] = "auto",
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_ENGINE, help="KV cache in GB.", show_default="0.5 on a CPU, what is free on a GPU"
        ),
    ] = None,
    host_kv_gb: Annotated[
        float,
        typer.Option(rich_help_panel=_ENGINE, help="Host memory in GB for what preempted sequences have computed."),
    ] = 0.0,
    block_size: Annotated[
        int | None,
        typer.Option(rich_help_panel=_ENGINE, help="Tokens in a KV block.", show_default="4 on a CPU, 16 on a GPU"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Sequences that run at once.")] = 64,
    token_budget: Annotated[int, typer.Option(rich_help_panel=_ENGINE, help="Tokens a step computes at most.")] = 512,
    policy: Annotated[
        Literal["fcfs", "priority", "fair", "deadline"],
        typer.Option(rich_help_panel=_ENGINE, help="Who is next in line. fair: tenants share; deadline: by targets."),
    ] = "priority",
    priority_ageing_s: Annotated[
        float, typer.Option(rich_help_panel=_ENGINE, help="Seconds of waiting that are worth one step of priority.")
    ] = 60.0,
    tenant_weights: Annotated[
        str, typer.Option(rich_help_panel=_ENGINE, help="Shares under fair: NAME=WEIGHT,…; 1 where not named.")
    ] = "",
    target_itl_ms: Annotated[
        float,
        typer.Option(rich_help_panel=_ENGINE, help="Longest step beside decodes: limits its prefill; 0: no target."),
    ] = 100.0,
    max_itl_growth: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_ENGINE, help="A step takes this many times its decodes' time at most.", show_default="none"
        ),
    ] = None,
    schedule: Annotated[
        Literal["sequential", "interleaved", "static", "continuous"],
        typer.Option(rich_help_panel=_ENGINE, help="How requests share the model; all but continuous to be compared."),
    ] = "continuous",
    overlap: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(rich_help_panel=_ENGINE, help="Launch a step before the last one's tokens are read: on a GPU."),
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(rich_help_panel=_ENGINE, help="Longest prompt + output.", show_default="the model's")
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(rich_help_panel=_ENGINE, help="Reuse what prompts have in common.")
    ] = True,
    threads: Annotated[
        int | None, typer.Option(rich_help_panel=_ENGINE, help="CPU threads.", show_default="one a physical core")
    ] = None,
    step_ms: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_ENGINE, help="Step time of the synthetic model: BASE[,PER_SEQUENCE[,PER_TOKEN]] in ms."
        ),
    ] = None,
    hang_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, help="An engine with work but no step for so long is dead.")
    ] = 60.0,
    stall_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, help="A client that reads nothing for so long is given up.")
    ] = 30.0,
    max_requests: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, help="Requests admitted at once; more are refused.")
    ] = 1024,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(rich_help_panel=_LIMITS, help="Tokens admitted at once.", show_default="eight KV caches full"),
    ] = None,
    max_text_bytes: Annotated[int, typer.Option(rich_help_panel=_LIMITS, help="Longest prompt text.")] = 1 << 20,
    reflection: Annotated[
        bool | None,
        typer.Option(
            "--reflection/--no-reflection",
            rich_help_panel=_EXPOSURE,
            help="Describe the services to clients without proto files, such as grpcurl.",
            show_default="on at a loopback address or a Unix socket",
        ),
    ] = None,
    auth_token_file: Annotated[
        str | None, typer.Option(rich_help_panel=_EXPOSURE, help="Clients must send this file's content as a token.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(rich_help_panel=_EXPOSURE, help="PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(rich_help_panel=_EXPOSURE, help="PEM file.")] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", rich_help_panel=_EXPOSURE, help="A public address without TLS or token.")
    ] = False,
    grace_s: Annotated[float, typer.Option(help="How long SIGTERM waits for running requests.")] = 30.0,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option()] = "info",
) -> None:
    """Serve a model: a router, with its engine spawned and supervised unless it runs elsewhere."""
    from pagoda_server.cli.progress_bars import shown_progress
    from pagoda_server.router.errors import ConfigError
    from pagoda_server.router.process.config import ServeConfig
    from pagoda_server.router.process.main import EXIT_CONFIG
    from pagoda_server.router.process.main import serve as serve_until_stopped

    try:
        config = ServeConfig(**context.params)  # the options are its fields, by name
    except ConfigError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_CONFIG) from None
    with shown_progress() as progress:
        exit_code = serve_until_stopped(config, progress)
    raise typer.Exit(exit_code)


app.command()(generate)
app.command()(chat)
app.command()(models)
app.command()(status)
app.command()(trace)
app.command()(health)


def main() -> None:
    app(prog_name="pagoda")


if __name__ == "__main__":
    main()
