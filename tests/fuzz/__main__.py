"""Fuzz one target or all: `make fuzz`, `make fuzz TARGET=gguf SECONDS=3600`.

Inputs that reach new code gather in build/fuzz/TARGET, where the next run starts from them. One that fails is written
to build/fuzz/TARGET-failures: mend what it shows, and move it to tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import targets
from tests.fuzz.json_mutator import mutated

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("build/fuzz")
# Of the libraries, those in Python that read the input.
INSTRUMENTED = ["pagoda_server", "gguf", "jinja2"]
OF_JSON = ("config", "openai", "tokenizer")
MEMORY_MB = 2048
SLOW_S = 20  # for one input
TARGETS = tuple(sorted(module.name for module in pkgutil.iter_modules(targets.__path__)))


def check_of(target: str) -> Callable[[bytes], bool]:
    check: Callable[[bytes], bool] = importlib.import_module(f"tests.fuzz.targets.{target}").check
    return check


def fuzz(target: str, seconds: int) -> None:
    """Fuzz in this process, which then ends: with exit code 0 unless an input fails."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        check = check_of(target)
        for file in (CORPUS / target).iterdir():
            check(file.read_bytes())  # some modules are imported where they are used
    found, failures = FOUND / target, FOUND / f"{target}-failures"
    for folder in (found, failures):
        folder.mkdir(parents=True, exist_ok=True)
    atheris.Setup(
        [
            sys.argv[0], str(found), str(CORPUS / target), f"-max_total_time={seconds}", f"-timeout={SLOW_S}",
            f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={failures}/", f"-dict={_dictionary(target)}",
            "-max_len=16384", "-print_final_stats=1",
        ],
        check,
        **({"custom_mutator": mutated} if target in OF_JSON else {}),
    )  # fmt: skip
    atheris.Fuzz()


def _dictionary(target: str) -> Path:
    """A file of the words in the corpus, which the fuzzer puts into inputs."""
    words = {
        word
        for file in (CORPUS / target).iterdir()
        for word in re.findall(rb"[A-Za-z0-9_.<|>-]{3,40}", file.read_bytes())
    }
    path = FOUND / f"{target}.dict"
    path.write_bytes(b"".join(b'"%s"\n' % word for word in sorted(words)))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="default: each of them, one after another")
    parser.add_argument("--seconds", type=int, default=10, help="for each target")
    given = parser.parse_args()
    if given.target:
        fuzz(given.target, given.seconds)
    codes = []
    for target in TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", target, "--seconds", str(given.seconds)]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
