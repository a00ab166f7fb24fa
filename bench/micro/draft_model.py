"""`python -m bench.micro.draft_model`: what a draft model gains at most, and what one costs that cannot pay.

The default model drafts, and is right as often as a draft model can be: its target is the same model with layers added
that change nothing. They cost what any layer costs, and add zeros to what they are given. So all drafts are accepted
that are drawn with the same noise, and the figure is the most that a draft model of this size can gain for one of that
size. With --times 1 both models are the same size, drafts cannot pay, and the rule has to see that.

Each message is sent twice to one server, with drafts and with `max_draft_tokens` 0, in turns.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from bench import driver, workloads
from bench.micro.speculation import kinds, one_by_one
from bench.systems import served
from pagoda_server.checkpoints import DEFAULT_MODEL, resolve

LAST_OF_LAYER = ("self_attn.o_proj.", "mlp.down_proj.")  # what they compute is added to what the layer was given


def deepen(source: Path, target: Path, times: int) -> None:
    """Write a model that computes the same with so many times the layers. Both are folders; weights are in one file."""
    for path in source.iterdir():
        if path.suffix in {".json", ".jinja"} and path.name != "manifest.json":
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = times * num_layers
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        adds_nothing = rest.startswith(LAST_OF_LAYER) and not rest.endswith(".values")
        for at in range(int(layer) + num_layers, times * num_layers, num_layers):
            copied = torch.zeros_like(tensors[name]) if adds_nothing else tensors[name].clone()
            tensors[f"model.layers.{at}.{rest}"] = copied
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def main(
    times: Annotated[list[int] | None, typer.Option(min=1, help="The target's layers ÷ the draft model's.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How often each message is sent.")] = 3,
) -> None:
    draft_model = resolve(DEFAULT_MODEL)
    table = Table(title="A draft model that is always right, with ÷ without")
    for heading in ("target ÷ draft", "", "without, tok/s", "with", "ratio", "drafts accepted"):
        table.add_column(heading, justify="right")
    for each in times or [1, 4, 8]:
        with tempfile.TemporaryDirectory() as folder:
            deepen(draft_model, Path(folder), each)
            with served(["--model", folder, "--draft-model", str(draft_model)]) as server:
                driver.run(server.address, workloads.single(1000), lambda count: None)
                for name, kind in kinds().items():
                    pairs, drafted, accepted = one_by_one(server.address, kind, turns)
                    with_it, without = (median(rates) for rates in zip(*pairs, strict=True))
                    ratio = median(mine / other for mine, other in pairs)
                    table.add_row(
                        f"{each}", name, f"{without:.1f}", f"{with_it:.1f}", f"{ratio:.2f}", f"{accepted} of {drafted}"
                    )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
