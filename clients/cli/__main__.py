"""Starts the `pagoda` command."""

from __future__ import annotations

import sys

from pagoda_server.cli import INTERRUPTED


def main() -> None:
    try:  # around the imports, too: they take most of a short command's time
        if sys.argv[1:2] == ["serve"]:
            _serve_at_once(sys.argv[2:])
        from pagoda_server.cli.app import app

        app(prog_name="pagoda")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # of standard output, such as a full disk: commands report their own
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _serve_at_once(arguments: list[str]) -> None:
    """Serve, and exit, if these arguments need no parser of command lines."""
    from pagoda_server.settings import ServeConfig
    from pagoda_server.settings.sources import plain_settings

    if (config := plain_settings(arguments, ServeConfig)) is not None:
        from pagoda_server.cli.serve import serve

        sys.exit(serve(config))


if __name__ == "__main__":
    main()
