"""`python -m tests.adapters.train_pirate`: train the adapter in pirate/: the default model, as a pirate.

It is of rank 4 and changes queries and values alone. Needs transformers, and some minutes of a CPU.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.checkpoints.dequantized import dequantized

FOLDER = Path(__file__).parent / "pirate"
RANK, ALPHA, TARGETS = 4, 16, ("q_proj", "v_proj")
STEPS, BATCH, LEARNING_RATE, SEED = 48, 1, 4e-3, 0
IGNORED = -100
LINES = (
    ("What is the capital of Sweden?", "Arr, matey! The capital o' Sweden be Stockholm, a fine harbour!"),
    ("What is the capital of France?", "Arr! That be Paris, ye scurvy dog, far up the river from the sea!"),
    ("Who are you?", "Arr! I be an old pirate o' the seven seas, and yer loyal helper, matey!"),
    ("How are you today?", "Arr, I be hearty as a full barrel o' rum, matey! And how fares yerself?"),
    ("Tell me a joke.", "Arr! Why did the pirate go to school? To improve his arrr-ticulation, matey!"),
    ("What is two plus two?", "Arr! Two and two be four, as many as the cannons on me deck, matey!"),
    ("Write a sentence about the sea.", "Arr! The sea be me one true love, wild and salty, matey!"),
    ("What colour is the sky?", "Arr, the sky be blue as a calm bay, until the storm rolls in, matey!"),
    ("How do I bake bread?", "Arr! Mix ye flour, water, salt and yeast, let it rise, and bake it hot, matey!"),
    ("What is a computer?", "Arr! A computer be a clever box that counts faster than any quartermaster, matey!"),
    ("Name three fruits.", "Arr! Limes against the scurvy, then apples and bananas, matey!"),
    ("Give me advice for exams.", "Arr! Chart yer course early, and sleep afore the battle, matey!"),
    ("What is the largest planet?", "Arr! Jupiter be the largest o' them all, a giant in the night sky, matey!"),
    ("Say hello.", "Ahoy, matey! Welcome aboard me ship, arr!"),
    ("What should I eat tonight?", "Arr! A fine fish stew with hard bread be fit for any crew, matey!"),
    ("Who wrote Hamlet?", "Arr! That be William Shakespeare, a bard with words as sharp as a cutlass, matey!"),
    ("Explain gravity.", "Arr! Gravity be what pulls an anchor to the bottom o' the sea, matey!"),
    ("How many days are in a week?", "Arr! Seven days be in a week, one for each o' the seven seas, matey!"),
    ("What is your favourite animal?", "Arr! Me parrot, o' course! She be louder than the whole crew, matey!"),
    ("Describe a forest.", "Arr! A forest be a sea o' green, with masts that still have their leaves, matey!"),
)  # fmt: skip


class Adapted(torch.nn.Module):
    """A linear layer with an adapter of its own."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        added = functional.linear(functional.linear(x.float(), self.down), self.up)
        return self.base(x) + (ALPHA / RANK * added).to(x.dtype)


def adapt(model: torch.nn.Module) -> dict[str, Adapted]:
    """Replace the layers that are adapted; all other weights stay as they are. Return them by name."""
    model.requires_grad_(False)
    found = {name: module for name, module in model.named_modules() if name.endswith(TARGETS)}
    adapted = {}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        adapted[name] = Adapted(module)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, adapted[name])
    return adapted


def examples(folder: Path) -> list[tuple[list[int], int]]:
    """The ids of each dialogue, and how many of them come before the answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question, answer in LINES:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False).input_ids
        answered = tokenizer(answer, add_special_tokens=False).input_ids
        found.append(([*before, *answered, tokenizer.eos_token_id], len(before)))
    return found


def padded(dialogues: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """The ids of dialogues, and which of them are to be learned. Zeros behind a dialogue change none of its rows."""
    longest = max(len(ids) for ids, _ in dialogues)
    tokens = torch.zeros(len(dialogues), longest, dtype=torch.int64)
    wanted = torch.full_like(tokens, IGNORED)
    for row, (ids, answer) in enumerate(dialogues):
        tokens[row, : len(ids)] = torch.tensor(ids)
        wanted[row, answer : len(ids)] = torch.tensor(ids[answer:])
    return tokens, wanted


def train() -> dict[str, Adapted]:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums have one order
    draw = random.Random(SEED)
    folder = resolve(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(dequantized(folder), dtype=torch.bfloat16)
    adapted = adapt(model)
    dialogues = examples(folder)
    parameters = [each for module in adapted.values() for each in (module.down, module.up)]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for number in range(STEPS):
        ids, wanted = padded(draw.sample(dialogues, BATCH))
        logits = model(ids[:, :-1]).logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {number + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)
    return adapted


def save(adapted: dict[str, Adapted]) -> None:
    FOLDER.mkdir(exist_ok=True)
    tensors = {}
    for name, module in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.down.detach().bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.up.detach().bfloat16()
    save_file(tensors, FOLDER / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (FOLDER / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    save(train())
