"""`python -m tests.kernels.triton.compile_gate` compiles every kernel for each GPU generation, without a GPU.

It compares registers, spills, shared memory, the widest accesses and waits for matrix instructions with compiled.json.
With another release of Triton than the one named there it only checks rules: no spills, shared memory within the limit,
matrix instructions that overlap with what follows, and accesses of 16 bytes unless the case says otherwise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.launches import SHARED_LIMITS, Compiled, Launch, compile_launch, record
from tests.kernels.triton.cases import Case, cases

TABLE = Path(__file__).with_name("compiled.json")
NUM_PROCESSES = 2
FIRST_WITH_FLOAT8 = 89  # compute capability from which Triton has float8_e4m3fn
WIDE = 16  # bytes

Rows = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Item:
    """One compilation. `narrow`: the kernel need not move 16 bytes at a time."""

    name: str
    launch: Launch
    narrow: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A compilation's result; `compiled` is None if it failed, and `error` says why."""

    item: Item
    compiled: Compiled | None
    error: str = ""


def collect(all_cases: Sequence[Case], capabilities: Sequence[int] = tuple(SHARED_LIMITS)) -> list[Item]:
    """The kernels that the cases launch, each specialization once, even if several cases share it."""
    items: list[Item] = []
    for capability in capabilities:
        seen: set[str] = set()
        for case in all_cases:
            for launch in record(capability, case.call):
                is_float8 = any("fp8e4nv" in kind for kind in launch.signature.values())
                if launch.identity in seen or (is_float8 and capability < FIRST_WITH_FLOAT8):
                    continue
                seen.add(launch.identity)
                name = f"sm_{capability} {case.name}: {launch.name}"
                number = sum(item.name.split(" #")[0] == name for item in items) + 1
                items.append(Item(name if number == 1 else f"{name} #{number}", launch, launch.name in case.narrow))
    return items


def compile_all(items: Sequence[Item]) -> list[Outcome]:
    global _items
    _items = items  # forked processes inherit it: kernels cannot be pickled
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("fork")) as pool:
        return [
            Outcome(item, compiled, error)
            for item, (compiled, error) in zip(items, pool.map(_compile, range(len(items))), strict=True)
        ]


_items: Sequence[Item] = ()


def _compile(at: int) -> tuple[Compiled | None, str]:
    try:
        return compile_launch(_items[at].launch), ""
    except Exception as error:  # a compiler may raise anything
        return None, f"{type(error).__name__}: {error}"


def violations(outcomes: Sequence[Outcome]) -> list[str]:
    """Violations of the rules that hold with every release of Triton and its assembler."""
    found = []
    for outcome in outcomes:
        name, compiled, limit = outcome.item.name, outcome.compiled, SHARED_LIMITS[outcome.item.launch.capability]
        if compiled is None:
            found.append(f"{name} does not compile: {outcome.error}")
            continue
        if compiled.spilled:
            found.append(f"{name} spills {compiled.spilled} bytes a thread")
        if compiled.shared > limit:
            found.append(f"{name} takes {compiled.shared} bytes of shared memory; the limit is {limit}")
        if compiled.waits >= compiled.products > 1:
            found.append(f"{name} waits for each of its {compiled.products} matrix instructions")
        if outcome.item.launch.options.get("launch_pdl") and not compiled.dependent:
            found.append(f"{name} does not let the kernel after it start")
        if compiled.unguarded:
            found.append(
                f"{name} accesses memory or leaves {compiled.unguarded} times before it waits for its predecessor"
            )
        if compiled.load < WIDE and not outcome.item.narrow:
            found.append(f"{name} loads at most {compiled.load} bytes at a time, not {WIDE}")
    return found


def differences(rows: Rows, expected: Rows) -> list[str]:
    return [
        f"{name}: was {expected.get(name, 'missing')}, is {rows.get(name, 'missing')}"
        for name in sorted(rows.keys() | expected.keys())
        if rows.get(name) != expected.get(name)
    ]


def write(rows: Rows, path: Path) -> None:
    """Write the table with one line for each kernel, for readable diffs."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    path.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(lines) + "\n}}\n")


def main(arguments: Sequence[str], all_cases: Sequence[Case] | None = None, table: Path = TABLE) -> int:
    """Run the gate and return its exit status: 0 if no rule is violated and nothing has changed."""
    parser = argparse.ArgumentParser(prog="compile_gate", description="Compile every kernel for each GPU generation.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--only", type=int, choices=SHARED_LIMITS, help="compile for this generation alone")
    choice.add_argument("--write", action="store_true", help=f"record the results in {TABLE.name}")
    given = parser.parse_args(arguments)
    if IS_INTERPRETED:
        print("error: TRITON_INTERPRET=1 is set, which disables compilation", file=sys.stderr)
        return 2
    capabilities = [given.only] if given.only else [*SHARED_LIMITS]
    outcomes = compile_all(collect(cases() if all_cases is None else all_cases, capabilities))
    rows = {outcome.item.name: asdict(outcome.compiled) for outcome in outcomes if outcome.compiled is not None}
    for name, row in rows.items():
        print(f"{name:<72} " + " ".join(f"{field} {value}" for field, value in row.items()))
    wrong = violations(outcomes)
    if given.write:
        write(rows, table)
    else:
        recorded = json.loads(table.read_text())
        if recorded["triton"] == triton.__version__:
            names = tuple(f"sm_{capability} " for capability in capabilities)
            expected = {name: row for name, row in recorded["kernels"].items() if name.startswith(names)}
            changed = differences(rows, expected)
            wrong += changed + (["if these changes are intended, record them with --write"] if changed else [])
        else:
            print(f"{table.name} was made with Triton {recorded['triton']}, this is {triton.__version__}: rules only")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
