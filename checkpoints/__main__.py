"""`python -m pagoda_server.checkpoints MODEL` imports a model if necessary and prints its folder."""

from __future__ import annotations

import argparse
import sys

from . import DEFAULT_MODEL, CheckpointError, PrintedProgress, resolve, verify


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pagoda_server.checkpoints", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="a name, folder, .gguf file or hub name")
    parser.add_argument("--verify", action="store_true", help="read an imported model's files and compare checksums")
    arguments = parser.parse_args()
    progress = PrintedProgress()
    try:
        folder = resolve(arguments.model, progress)
        if arguments.verify:
            verify(folder, progress)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
