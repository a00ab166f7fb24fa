"""Generate the Go stubs: `python clients/go/generate.py [FOLDER]`, by default in place.

Needs protoc and its plugins protoc-gen-go and protoc-gen-go-grpc, in Debian's versions to get the committed bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = HERE.parents[1] / "protos"
MODULE = "pagoda/clients/go"


def generate(folder: Path) -> None:
    """Write pagoda/v1/*.go into the folder."""
    plugins = [
        f"--{plugin}_{option}" for plugin in ("go", "go-grpc") for option in (f"out={folder}", f"opt=module={MODULE}")
    ]
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "pagoda" / "v1").glob("*.proto"))
    subprocess.run(["protoc", f"-I{PROTOS}", *plugins, *files], check=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
