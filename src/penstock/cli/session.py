"""The session that the commands of one process share: open stores, output and input.

A command prints results to stdout only through `Session`, so that `--json` means the same for all
of them, and reads stdin only through it, so that the commands of a shell are never read as bodies.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from penstock import Queues, connect
from penstock.settings import URL_VARIABLE, url_in
from penstock.url import read_url, without_password

NO_URL: Final = (
    f"no store was given: give --url URL or set {URL_VARIABLE} "
    "(memory: lasts only as long as the process: try it with penstock shell --url memory:)"
)


class UsageError(Exception):
    """The command cannot be run: wrong arguments, or a file that cannot be read."""


class Session:
    """The open stores of one process, by URL; leaving the context closes them."""

    def __init__(self, open_store: Callable[[str], Queues] = connect) -> None:
        self._open_store = open_store
        self._stores: dict[str, Queues] = {}
        # Within a shell: its --url. Its stdin holds commands, not bodies.
        self.shell_url: str | None = None
        self.in_shell = False

    def queues(self, arguments: Namespace) -> Queues:
        """The store that the command names. Raises UsageError and the errors of the backend."""
        url = self.url(arguments)
        if url not in self._stores:
            self._stores[url] = self._open_store(url)
        return self._stores[url]

    def url(self, arguments: Namespace) -> str:
        """The URL of the store that the command names. Raises UsageError or InvalidField."""
        url: str | None = arguments.url or self.shell_url or url_in(os.environ)
        if not url:
            raise UsageError(NO_URL)
        return url

    def path(self, arguments: Namespace) -> str:
        """The directory that the command's PATH names, a path or a `file:` URL.

        Raises UsageError if the command has --url, too, or InvalidField.
        """
        if arguments.url is not None:
            raise UsageError(
                f"--url {without_password(arguments.url)}: this command has a PATH instead; give "
                "the directory or its file: URL there"
            )
        given: str = arguments.path
        return read_url(given).path if given.startswith("file:") else given

    def print_result(self, arguments: Namespace, result: dict[str, Any], text: str) -> None:
        """Prints one result: as a line of JSON with --json, else as the text."""
        if arguments.json:
            self.print_json(result)
        else:
            print(text)

    def print_json(self, result: dict[str, Any]) -> None:
        """Prints one result as a line of JSON."""
        try:
            print(msgspec.json.encode(result).decode())
        except UnicodeEncodeError:
            # A path with bytes that are not UTF-8: they become the escapes of lone surrogates.
            print(json.dumps(msgspec.to_builtins(result), separators=(",", ":")))

    def stdin(self) -> BinaryIO:
        """The bytes of stdin. Raises UsageError if a body cannot be read from it."""
        if self.in_shell:
            raise UsageError("stdin holds the commands of this shell; give the body as an argument")
        if sys.stdin is None:
            raise UsageError("stdin is closed")
        return sys.stdin.buffer

    def close(self) -> None:
        """Closes every store."""
        while self._stores:
            self._stores.popitem()[1].close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_body_file(path: str) -> bytes:
    """The bytes of a file. Raises UsageError."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path!r}: {reason}") from None
