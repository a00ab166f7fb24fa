"""Starts the `pagoda` command."""

from __future__ import annotations

import sys

from pagoda_server.cli import INTERRUPTED


def main() -> None:
    try:  # around the imports, too: they take most of a short command's time
        from pagoda_server.cli.app import app

        app(prog_name="pagoda")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # of standard output, such as a full disk: commands report their own
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
