"""Write what an image holds as CycloneDX 1.6: the installed distributions of Python, and Debian's packages.

    python sbom.py NAME [FILE]    /usr/local/share/pagoda/sbom.cdx.json unless a file is given

Runs in the image that it describes, so the standard library is all it needs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from platform import freedesktop_os_release
from urllib.parse import quote

DEFAULT = Path("/usr/local/share/pagoda/sbom.cdx.json")
LONGEST_LICENSE = 100  # characters: some distributions give the whole text in that field


def component(name: str, version: str, purl: str, license: dict[str, object] | None = None) -> dict[str, object]:
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return found | ({"licenses": [license]} if license else {})


def license_of(distribution: Distribution) -> dict[str, object] | None:
    """The licence as the distribution states it: an SPDX expression (PEP 639), or else a name."""
    if expression := distribution.metadata.get("License-Expression"):
        return {"expression": expression}
    named = distribution.metadata.get("License", "").strip()
    return {"license": {"name": named}} if 0 < len(named) <= LONGEST_LICENSE else None


def of_python() -> Iterator[dict[str, object]]:
    for each in distributions():
        name, release = each.metadata["Name"], each.version
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        yield component(name, release, f"pkg:pypi/{normalized}@{quote(release)}", license_of(each))


def of_debian() -> Iterator[dict[str, object]]:
    if shutil.which("dpkg-query") is None:
        return
    system = freedesktop_os_release()
    query = ["dpkg-query", "--show", "--showformat=${Package}\t${Version}\t${Architecture}\n"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        name, release, architecture = line.split("\t")
        where = f"arch={architecture}&distro={system['ID']}-{system.get('VERSION_ID', '')}"
        yield component(name, release, f"pkg:deb/{system['ID']}/{quote(name)}@{quote(release)}?{where}")


def main(name: str, out: str = "") -> None:
    components = {each["purl"]: each for each in (*of_python(), *of_debian())}
    path = Path(out or DEFAULT)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version("pagoda-server")}},
        "components": [components[purl] for purl in sorted(components, key=str)],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
