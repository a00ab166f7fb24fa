"""Takes README's pictures of the page: `make page-pictures`.

They show the default model at work on eight prompts. A palette makes them small.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.counterparts.test_page import browsed
from tests.servers import ROOT, running_server

FOLDER = ROOT / "docs" / "images"
COLOURS = 256


def main() -> None:
    for theme in ("light", "dark"):
        # Each theme has a server of its own, so that no steps of the other one are in sight.
        with running_server("--http", "127.0.0.1:0") as server, tempfile.TemporaryDirectory() as folder:
            found = browsed(server.http, Path(folder), theme)[theme]
            assert "failed" not in found, found["failed"]
            taken = Image.open(found["path"]).convert("RGB")
        picture = FOLDER / f"page-{theme}.png"
        taken.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
