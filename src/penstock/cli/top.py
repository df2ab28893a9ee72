"""`penstock top`: every queue live in a terminal, with keys to go into a queue and a message."""

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from typing import Final

from penstock.cli.session import Session, UsageError
from penstock.errors import MissingExtra

THEMES: Final = ("dark", "light")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--theme", choices=THEMES, default="dark", help="(default: dark; the key t changes it)"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Shows the queues until q. Raises UsageError, MissingExtra and the errors of the store."""
    if session.in_shell:
        raise UsageError("top takes the whole terminal: run it outside of this shell")
    session.refuse_option(arguments, "json", "top is for people; penstock stats --json is not")
    # It is drawn on stderr, so that all three have to be the terminal.
    if not all(each and each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("top needs a terminal; penstock stats prints the queues once")
    url = session.live_url(arguments)
    try:
        from penstock.cli.live.app import TopApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "textual"):
            raise
        raise MissingExtra(
            f"top: needs the package {error.name!r}; "
            "install it with pip install 'PATH-OF-THE-CLONE[top]'"
        ) from None
    from penstock.cli.live.source import open_source

    async def show() -> None:
        source = await open_source(url)
        try:
            await TopApp(source, light=arguments.theme == "light").run_async()
        finally:
            await source.close()

    asyncio.run(show())
    return 0
