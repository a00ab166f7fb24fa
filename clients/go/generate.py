"""Generate the Go stubs: `python clients/go/generate.py [FOLDER]`, by default in place.

Needs protoc and its plugins protoc-gen-go and protoc-gen-go-grpc, in Debian's versions to get the committed bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROTOS = HERE.parents[1] / "protos"
MODULE = "pagoda/clients/go"

# EngineLoad has the fields `step_s` and `steps`. Debian's protoc and protoc-gen-go refuse names that differ only by an
# underscore; newer ones accept them. The stubs are made with other names of the same length, which are then put right,
# so that they are what newer programs generate.
PUT_RIGHT = {"step_z": "step_s", "stepZ": "stepS", "StepZ": "StepS"}


def generate(folder: Path) -> None:
    """Write pagoda/v1/*.go into the folder."""
    with tempfile.TemporaryDirectory() as name:
        accepted = Path(name)
        for proto in sorted((PROTOS / "pagoda" / "v1").glob("*.proto")):
            copy = accepted / proto.relative_to(PROTOS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(proto.read_text().replace(" step_s = ", " step_z = "))
        files = sorted(str(path.relative_to(accepted)) for path in accepted.rglob("*.proto"))
        plugins = [
            f"--{plugin}_{option}"
            for plugin in ("go", "go-grpc")
            for option in (f"out={folder}", f"opt=module={MODULE}")
        ]
        subprocess.run(["protoc", f"-I{accepted}", *plugins, *files], check=True)
    stub = folder / "pagoda" / "v1" / "control.pb.go"
    text = stub.read_text()
    for wrong, right in PUT_RIGHT.items():
        text = text.replace(wrong, right)
        # In the descriptor, which is an array of bytes over many lines.
        *same, last = [f"0x{byte:02x}" for byte in wrong.encode()]
        text = re.sub(
            "(" + "".join(byte + r",\s*" for byte in same) + ")" + last, rf"\g<1>0x{ord(right[-1]):02x}", text
        )
    stub.write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
