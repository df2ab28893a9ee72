"""The session that the commands of one process share: open stores, output and input.

A command prints results to stdout only through `Session`, so that `--json` means the same for all
of them, and reads stdin only through it, so that the commands of a shell are never read as bodies.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from penstock import Queues, connect
from penstock.errors import InvalidField, StoreUnusable
from penstock.output import print_json, print_text
from penstock.settings import URL_VARIABLE, url_in
from penstock.url import is_address, read_url, store_url, without_password

NO_URL: Final = (
    f"no store was given: give --url with a path or a URL, or set {URL_VARIABLE} "
    "(memory: lasts only as long as the process: try it with penstock shell --url memory:)"
)
NO_STORE: Final = "url: no store at {}; penstock create makes one"


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

    def queues(self, arguments: Namespace, *, makes: bool = False) -> Queues:
        """The store that the command names; with `makes` it is made if there is none.

        Raises UsageError and the errors of the backend.
        """
        return self._queues_at(self.url(arguments), makes=makes)

    def _queues_at(self, url: str, *, makes: bool = False) -> Queues:
        if url not in self._stores:
            if not makes:
                check_exists(url)
            self._stores[url] = self._open_store(url)
        return self._stores[url]

    def looking(self, arguments: Namespace) -> AbstractContextManager[Queues]:
        """The store for a command that only looks: no daemon is started.

        Raises what `queues` raises.
        """
        return self.looking_at(self.url(arguments))

    @contextmanager
    def looking_at(self, url: str) -> Iterator[Queues]:
        """The same for the store of a URL."""
        found = read_url(url)
        if url in self._stores or found.scheme != "file" or found.is_in_this_process:
            yield self._queues_at(url)
            return
        check_exists(url)
        # Imported here: a store elsewhere needs none of it.
        from penstock.backends.engine.open import look_at

        with look_at(found) as service:
            yield Queues(service)

    def url(self, arguments: Namespace) -> str:
        """The URL of the store that the command names. Raises UsageError or InvalidField."""
        url: str | None = arguments.url or self.default_url()
        if not url:
            raise UsageError(NO_URL)
        return store_url(url)

    def default_url(self) -> str | None:
        """The URL of commands that are given none, if there is one. Raises InvalidField."""
        return self.shell_url or url_in(os.environ)

    def live_url(self, arguments: Namespace) -> str:
        """The URL of what `top` and `tail` look at: a store, or the http(s) URL of a server.

        Raises UsageError or InvalidField.
        """
        url = self.url(arguments)
        if is_address(url):
            return f"http://{url}"
        if not url.startswith(("http:", "https:")):
            check_exists(url)
            if read_url(url).is_in_this_process:
                raise UsageError(
                    f"--url {without_password(url)}: is opened for one process alone, in which "
                    "nothing happens; give a store that others use, or http://HOST:PORT of a server"
                )
        return url

    def path(self, arguments: Namespace, *, must_exist: bool = True) -> str:
        """The directory that a command of a store's files is about: its PATH, or a `file:` URL.

        Raises UsageError, or InvalidField, also if it is missing or empty and must exist.
        """
        if arguments.path is not None and arguments.url is not None:
            raise UsageError(
                f"--url {without_password(arguments.url)}: there is a PATH, too; give one of them"
            )
        url = self.url(arguments) if arguments.path is None else store_url(arguments.path)
        found = read_url(url)
        if found.directory is None:
            raise UsageError(
                f"{found.shown} has no files here: this command is for the directory of a store; "
                "give PATH or file:PATH"
            )
        if must_exist:
            check_files(found.directory)
        return found.directory

    def refuse_option(self, arguments: Namespace, option: str, why: str) -> None:
        """Raises UsageError if a command was given an option that would have no effect."""
        if getattr(arguments, option, None):
            raise UsageError(f"--{option}: {why}")

    def print_result(self, arguments: Namespace, result: dict[str, Any], text: str) -> None:
        """Prints one result: as a line of JSON with --json, else as the text."""
        if arguments.json:
            self.print_json(result)
        else:
            print_text(text)

    def print_json(self, result: dict[str, Any]) -> None:
        """Prints one result as a line of JSON."""
        try:
            text = msgspec.json.encode(result).decode()
        except UnicodeEncodeError:
            # A path with bytes that are not UTF-8: they become the escapes of lone surrogates.
            text = json.dumps(msgspec.to_builtins(result), separators=(",", ":"))
        print_json(text)

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


def check_files(directory: str) -> None:
    """Raises InvalidField if there is nothing at the path, or StoreUnusable.

    What is there need not be a store: it may be an archive, or a stream of another kind.
    """
    path = Path(directory)
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            raise InvalidField(NO_STORE.format(directory))
    except OSError as error:
        raise StoreUnusable(f"{directory}: cannot be used: {error.strerror}") from None


def check_exists(url: str) -> None:
    """Raises InvalidField if the URL names a directory without a store, or StoreUnusable."""
    directory = read_url(url).directory
    if directory is None:
        return
    # Imported here: other stores need none of it.
    from penstock.journal.store import check_format

    if not check_format(Path(directory)):
        raise InvalidField(NO_STORE.format(directory))


def read_body_file(path: str) -> bytes:
    """The bytes of a file. Raises UsageError."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path!r}: {reason}") from None
