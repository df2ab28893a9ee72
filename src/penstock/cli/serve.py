"""`penstock serve`: an SQS endpoint on this machine, with its messages in a directory."""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.session import Session, UsageError
from penstock.cli.values import read_duration
from penstock.output import flush, print_text, use_json_lines
from penstock.settings import read_keys, read_settings
from penstock.url import store_url, without_password

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
    ("--ready-dir", "DIR", "programs, .sh and .py files to run in order once the server answers"),
    ("--log-format", "FORMAT", "of the lines on stderr: text (default) or json"),
    ("--token-file", "FILE", "holds the token that Carrot clients must send"),
)

_SWITCHES: Final = (
    ("--insecure-without-keys", "listen beyond this machine without checking signatures"),
    ("--insecure-without-tls", "listen beyond this machine without encryption"),
    ("--insecure-other-owner", "serve a data directory of another user (root can)"),
    ("--accept-loss", "open a data directory with missing journal files, without their content"),
    ("--mask-messages", "keep the bodies and attributes of messages out of the console"),
    (
        "--aws-limits",
        (
            "as in Amazon SQS, 60 s between two purges of a queue, and before the name of a "
            "deleted one can be used again (default: 0 s)"
        ),
    ),
    (
        "--strict-receipts",
        (
            "refuse a receipt whose visibility timeout has ended, as FIFO queues do (default: "
            "accepted until the message is received again, as in Amazon SQS)"
        ),
    ),
    (
        "--create-on-use",
        "create a queue when a client first asks for its URL, sends to it or receives from it",
    ),
    ("--ready-strict", "end with status 3 if a program of --ready-dir fails"),
    # For `penstock demo`: the console gets a button that ends this process by SIGKILL.
    ("--kill-button", SUPPRESS),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    for flag, metavar, text in _PLAIN:
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--port", type=int, metavar="NUMBER", help="(default: 9324; 0 for any free one)"
    )
    parser.add_argument(
        "--slow-request",
        type=read_duration,
        metavar="DURATION",
        help="a request that takes this long gets a line on stderr (default: 1)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file with these settings; FILE.conf is a configuration file of ElasticMQ",
    )
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
    for flag, text in _SWITCHES:
        parser.add_argument(flag, action="store_true", default=None, help=text)
    _add_for_tests(parser)
    # The two limits of --aws-limits separately.
    for flag in ("--deleted-window", "--purged-window"):
        parser.add_argument(flag, type=read_duration, metavar="DURATION", help=SUPPRESS)


def _add_for_tests(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--clock",
        metavar="MODE",
        help="for tests, in memory: a clock that can be moved, and is manual, auto or system",
    )
    parser.add_argument(
        "--chaos",
        type=int,
        metavar="SEED",
        help="for tests, in memory: faults that queues may have, such as a second delivery",
    )


def run(session: Session, arguments: Namespace) -> int:
    """Serves until stopped."""
    if session.in_shell:
        raise UsageError("a server cannot be started within a shell")
    given: dict[str, Any] = {
        flag[2:].replace("-", "_"): getattr(arguments, flag[2:].replace("-", "_"))
        for flag, _, _ in _PLAIN
    }
    _read_url(arguments, given)
    for name in ("port", "clock", "chaos", "deleted_window", "purged_window", "slow_request"):
        given[name] = getattr(arguments, name)
    for flag, _ in _SWITCHES:
        name = flag[2:].replace("-", "_")
        given[name] = getattr(arguments, name)
    given["allow_hosts"] = arguments.allow_host
    if arguments.key:
        given["keys"] = read_keys(",".join(arguments.key))
    read = partial(read_settings, given, os.environ, arguments.config)
    settings = read()
    if settings.log_format == "json":
        use_json_lines()
    # Imported here: wrong settings are refused without loading the server.
    from penstock.server.run import run_until_stopped

    show: Callable[[Running], None]
    if arguments.json:
        show = partial(_show_json, session)
    else:
        # Lines for a program say where the server is; these texts are for people.
        show = _show_nothing if settings.log_format == "json" else _show_text
    run_until_stopped(settings, show, read)
    return 0


def _read_url(arguments: Namespace, given: dict[str, Any]) -> None:
    """Uses --url as the store. Raises UsageError if the store is given twice."""
    named = [name for name in ("data", "store", "url") if getattr(arguments, name) is not None]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        raise UsageError(f"{flags} each say where the store is; give one of them")
    if arguments.url is not None:
        given["store"] = store_url(arguments.url)
    elif arguments.store is not None:
        given["store"] = store_url(arguments.store)


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
    flush()


def _show_nothing(running: "Running") -> None:
    """For `--log-format json`: the line of the start has it."""


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
    print_text(f"penstock: Amazon SQS at {url}")
    print_text(f"  messages    {kept}")
    print_text(f"  signatures  {checked}")
    print_text(f"  console     {url}/console, in a browser")
    if running.carrot_address is not None:
        print_text(f"  carrot      {running.carrot_address}")
    if settings.is_for_tests:
        print_text(f"  for tests   {_for_tests(running)}")
    print_text(f"  docs        {_docs()}")
    print_text("try it:")
    key = next(iter(settings.keys), "any")
    secret = "…" if settings.keys else "any"
    print_text(f"  export AWS_ACCESS_KEY_ID={key} AWS_SECRET_ACCESS_KEY={secret}")
    # SDKs and aws-cli 2 read the first of these, aws-cli 1 only the second.
    print_text(f"  export AWS_REGION={settings.region} AWS_DEFAULT_REGION={settings.region}")
    account = key if len(key) == 12 and key.isdigit() else settings.account
    queue = f"{url}/{account}/orders"
    for action in (
        "create-queue --queue-name orders",
        f"send-message --queue-url {queue} --message-body hello",
        f"receive-message --queue-url {queue}",
    ):
        print_text(f"  aws --endpoint-url {url} sqs {action}")
    print_text("stop it with Ctrl-C")
    flush()


def _for_tests(running: "Running") -> str:
    """What differs from other servers: the clock, and the faults."""
    settings = running.settings
    clock = settings.clock or "system"
    faults = "" if settings.chaos is None else f"; faults of seed {settings.chaos}"
    return f"the clock is {clock}{faults}; see {running.url}/_penstock/clock"


def _docs() -> str:
    """Where the endpoint is documented: the page in a clone of the repository, else the help."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "sqs.md"
    return str(page) if page.is_file() else "penstock serve --help"
