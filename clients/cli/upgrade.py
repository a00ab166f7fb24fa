"""`pagoda upgrade`: let the installed version take the place of a running server's."""

from __future__ import annotations

from typing import Annotated

import typer

from pagoda_server.cli.terminal import print_error

EXIT_NOT_REPLACED, EXIT_NO_SERVER = 1, 2


def upgrade(
    pid: Annotated[int | None, typer.Argument(help="The server's process. Default: the only one that runs.")] = None,
    routers: Annotated[bool, typer.Option("--routers", help="Replace routers alone; the engine stays.")] = False,
) -> None:
    """Replace a running server's routers and its engine by those of the installed version; no stream breaks.

    Returns when the new ones serve. Exit codes: 0; 1 if the old ones go on, with the reason on standard error; 2 where
    no server is found.
    """
    from pagoda_server.router.process.upgrade import ALL, IS_SUPPORTED, ROUTERS, NoAnswerError, ask, servers

    if not IS_SUPPORTED:
        print_error("this command needs Linux; SIGUSR2 replaces a server's routers elsewhere")
        raise typer.Exit(EXIT_NO_SERVER)
    if pid is None:
        found = servers()
        if len(found) != 1:
            pids = ", ".join(map(str, found))
            which = f"several servers run here, say which: {pids}" if found else "no `pagoda serve` runs here"
            print_error(which)
            raise typer.Exit(EXIT_NO_SERVER)
        (pid,) = found
    try:
        why = ask(pid, ROUTERS if routers else ALL)
    except NoAnswerError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_NO_SERVER) from None
    if why:
        print_error(f"not replaced: {why}")
        raise typer.Exit(EXIT_NOT_REPLACED)
    typer.echo("replaced: calls go to new processes; the former ones end with their streams")
