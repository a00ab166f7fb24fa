"""Run the vectors' servers for a test in another language: `python -m tests.vectors`.

The one line on standard output says how to connect, as JSON: {"plain": {"address": …}, …}. The servers end with
standard input, so a test that dies takes them along.
"""

from __future__ import annotations

import json
import sys

from tests.vectors import servers

if __name__ == "__main__":
    with servers.running() as connections:
        print(json.dumps(connections), flush=True)
        sys.stdin.read()
