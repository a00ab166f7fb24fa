"""Write pagoda/client.py, the blocking client, from pagoda/aio.py: `python clients/python/blocking.py`."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "pagoda"
DOCSTRING = '''\
    """A connection to a server. Safe to use from several threads; `close` it, or use it in a `with` block.

    address    HOST:PORT or unix:PATH
    token      sent as `authorization: Bearer …`
    tenant     the tenant that the calls are for, sent as `x-pagoda-tenant`. A server that knows tenants by their tokens
               needs no name, and refuses one that is not the token's unless the token may act for tenants
    tls        True: TLS with the system's authorities; a path: TLS with the authorities in that PEM file
    timeout_s  default deadline of a call, all its attempts included; None: no deadline
    retries    further attempts of a call that failed before its first message because the server was unavailable or
               overloaded; of a resumable stream, each time that it breaks

    A call that fails raises PagodaError. A wrong argument raises InvalidArgument, an unknown option TypeError. The
    constructor raises OSError if it cannot read the PEM file. A stream starts when it is first read. Closing its
    iterator (leaving the `for` loop is enough) cancels the call, and the server frees everything that the call held.
    """
'''
CHANGES = (
    (r'^""".*?"""', '"""The blocking client. blocking.py writes this file from aio.py: change that."""'),
    (r"(class )AsyncClient:\n    \"\"\".*?\"\"\"\n", lambda found: f"{found[1]}Client:\n{DOCSTRING}"),
    (r"\bAsyncClient\b", "Client"),
    (r"import asyncio\n", "import time\n"),
    (r"import AsyncGenerator, Callable, Sequence", "import Callable, Generator, Sequence"),
    (r"AsyncGenerator\[(.*?), None\]", r"Generator[\1, None, None]"),
    (r"await asyncio\.gather\(\*(\w+)\)", r"\1"),
    (r"a step asks for all beams at once", "AsyncClient asks for all beams at once"),
    (r"await asyncio\.sleep", "time.sleep"),
    (r"grpc\.aio\.UsageError:  # another task", "ValueError:  # another thread"),
    (r"grpc\.aio\.", "grpc."),
    (r"__a(enter|exit)__", r"__\1__"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\[(\w+) for \1 in (\w+)\]", r"\2"),
)  # fmt: skip


def blocking(source: str) -> str:
    for pattern, replacement in CHANGES:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL | re.MULTILINE)
    return source


if __name__ == "__main__":
    (FOLDER / "client.py").write_text(blocking((FOLDER / "aio.py").read_text()))
