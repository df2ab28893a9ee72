"""`penstock serve`: an SQS endpoint on this machine, with its messages in a directory."""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.session import Session, UsageError
from penstock.settings import read_keys, read_settings
from penstock.url import without_password

if TYPE_CHECKING:
    from penstock.server.run import Running

_PLAIN: Final = (
    ("--data", "DIR", "where messages are kept (default: ./penstock-data)"),
    ("--store", "URL", "another store, as --url: memory:, file:PATH, penstock://HOST:PORT …"),
    ("--durability", "MODE", "what an answer promises: sync (default), interval or os"),
    ("--host", "ADDRESS", "where to listen (default: 127.0.0.1)"),
    ("--region", "NAME", "the region whose queues have bare names (default: us-east-1)"),
    ("--account", "DIGITS", "the account whose queues have bare names (default: 000000000000)"),
    ("--tls-cert", "FILE", "the certificate, in PEM form"),
    ("--tls-key", "FILE", "its key"),
    ("--carrot", "[HOST:]PORT", "run a Carrot broker there, too (host: 127.0.0.1; 0: any port)"),
    ("--token-file", "FILE", "holds the token that Carrot clients must send"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    for flag, metavar, text in _PLAIN:
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--port", type=int, metavar="NUMBER", help="(default: 9324; 0 for any free one)"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these settings")
    parser.add_argument(
        "--key",
        action="append",
        metavar="ID:SECRET",
        help="check signatures against this key; may be repeated. Other users can see it in the "
        "list of processes; they cannot see PENSTOCK_KEYS or the config file",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="a further name by which clients address a server without keys",
    )
    parser.add_argument(
        "--insecure-without-keys",
        action="store_true",
        default=None,
        help="listen beyond this machine without checking signatures",
    )
    parser.add_argument(
        "--insecure-without-tls",
        action="store_true",
        default=None,
        help="listen beyond this machine without encryption",
    )
    parser.add_argument(
        "--insecure-other-owner",
        action="store_true",
        default=None,
        help="serve a data directory of another user (root can)",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        default=None,
        help="open a data directory with missing journal files, without their content",
    )
    parser.add_argument(
        "--aws-limits",
        action="store_true",
        default=None,
        help="as in Amazon SQS, 60 s between two purges of a queue, and before the name of a "
        "deleted one can be used again (default: 0 s)",
    )
    # The two limits of --aws-limits separately, in seconds.
    for flag in ("--deleted-window", "--purged-window"):
        parser.add_argument(flag, type=int, metavar="SECONDS", help=SUPPRESS)


def run(session: Session, arguments: Namespace) -> int:
    """Serves until stopped."""
    if session.in_shell:
        raise UsageError("a server cannot be started within a shell")
    given: dict[str, Any] = {
        flag[2:].replace("-", "_"): getattr(arguments, flag[2:].replace("-", "_"))
        for flag, _, _ in _PLAIN
    }
    _read_url(arguments, given)
    for name in ("port", "deleted_window", "purged_window"):
        given[name] = getattr(arguments, name)
    for name in (
        "aws_limits",
        "insecure_without_keys",
        "insecure_without_tls",
        "insecure_other_owner",
        "accept_loss",
    ):
        given[name] = getattr(arguments, name)
    given["allow_hosts"] = arguments.allow_host
    if arguments.key:
        given["keys"] = read_keys(",".join(arguments.key))
    settings = read_settings(given, os.environ, arguments.config)
    # Imported here: wrong settings are refused without loading the server.
    from penstock.server.run import run_until_stopped

    show = partial(_show_json, session) if arguments.json else _show_text
    run_until_stopped(settings, show)
    return 0


def _read_url(arguments: Namespace, given: dict[str, Any]) -> None:
    """Uses --url as the store. Raises UsageError if the store is given twice."""
    named = [name for name in ("data", "store", "url") if getattr(arguments, name) is not None]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        raise UsageError(f"{flags} each say where the store is; give one of them")
    if arguments.url is not None:
        given["store"] = arguments.url


def _show_json(session: Session, running: "Running") -> None:
    """Prints where the server is as one line of JSON."""
    session.print_json(
        {
            "url": running.url,
            "store": running.store.url,
            "pid": os.getpid(),
            "socket": running.store.socket_path,
            "carrot": running.carrot_address,
        }
    )
    sys.stdout.flush()


def _show_text(running: "Running") -> None:
    """Prints where the server is and what to type next; a test runs these lines unchanged."""
    settings = running.settings
    url = running.url
    kept = (
        "in memory, and lost when this ends"
        if settings.where.startswith("memory:")
        else (
            f"in {os.path.abspath(settings.data)}"
            if settings.store is None
            else f"in {without_password(running.store.url)}"
        )
    )
    if settings.keys:
        checked = f"checked against {len(settings.keys)} keys"
    elif settings.on_loopback:
        checked = "not checked: any access key is accepted, from this machine only"
    else:
        checked = "NOT CHECKED: anyone who can reach this address is accepted"
    print(f"penstock: Amazon SQS at {url}")
    print(f"  messages    {kept}")
    print(f"  signatures  {checked}")
    if running.carrot_address is not None:
        print(f"  carrot      {running.carrot_address}")
    print(f"  docs        {_docs()}")
    print("try it:")
    key = next(iter(settings.keys), "any")
    secret = "…" if settings.keys else "any"
    print(f"  export AWS_ACCESS_KEY_ID={key} AWS_SECRET_ACCESS_KEY={secret}")
    # SDKs and aws-cli 2 read the first of these, aws-cli 1 only the second.
    print(f"  export AWS_REGION={settings.region} AWS_DEFAULT_REGION={settings.region}")
    account = key if len(key) == 12 and key.isdigit() else settings.account
    queue = f"{url}/{account}/orders"
    for action in (
        "create-queue --queue-name orders",
        f"send-message --queue-url {queue} --message-body hello",
        f"receive-message --queue-url {queue}",
    ):
        print(f"  aws --endpoint-url {url} sqs {action}")
    print("stop it with Ctrl-C", flush=True)


def _docs() -> str:
    """Where the endpoint is documented: the page in a clone of the repository, else the help."""
    page = Path(__file__).parents[3] / "docs" / "sqs.md"
    return str(page) if page.is_file() else "penstock serve --help"
