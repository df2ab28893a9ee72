"""The options of a worker, which the supervisor passes to its processes."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Final

import msgspec

import penstock.errors
from penstock.errors import PenstockError
from penstock.public import to_ms
from penstock.service import check_name, check_number
from penstock.tasks.app import TaskApp
from penstock.tasks.errors import TaskError
from penstock.url import read_url

PROCESSES_MAX: Final = 256
THREADS_MAX: Final = 1_000
COROUTINES_MAX: Final = 100_000
_PACKAGE: Final = f"{Path(penstock.errors.__file__).parent}{os.sep}"
_TOKENS_NEED: Final = ("capacity by messages", "capacity in flight")


class WorkerOptions(msgspec.Struct, frozen=True):
    """The options of `penstock worker` for its processes."""

    app: str
    url: str | None = None
    queues: tuple[str, ...] = ()
    threads: int = 8
    coroutines: int = 100
    visibility_ms: int = 30_000
    max_tasks: int | None = None
    burst: bool = False
    status_fd: int | None = None

    def check(self) -> None:
        """Raises InvalidField or TaskError."""
        check_number("threads", self.threads, 1, THREADS_MAX)
        check_number("coroutines", self.coroutines, 1, COROUTINES_MAX)
        to_ms("visibility_timeout", self.visibility_ms / 1_000)
        if self.visibility_ms < 1_000:
            raise TaskError("visibility_timeout: a worker needs claims that last at least 1 s")
        if self.max_tasks is not None:
            check_number("max_tasks", self.max_tasks, 1, 2**63 - 1)
        for queue in self.queues:
            check_name(queue, "queues")


def load_app(target: str) -> TaskApp:
    """The app at MODULE:NAME, imported from the current directory or the installed packages.

    Raises TaskError with one sentence, whatever is wrong with the module.
    """
    module_name, _, attribute = target.partition(":")
    words = [*module_name.split("."), attribute]
    if not all(word.isidentifier() for word in words) or module_name.endswith(".py"):
        raise TaskError(
            f"app: {target!r} is not of the form MODULE:NAME, such as shop.tasks:app for the "
            "variable app in shop/tasks.py"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise TaskError(
                f"app: there is no module {error.name!r} in {directory} or among the installed "
                "packages"
            ) from None
        raise TaskError(f"app: {module_name!r} needs the module {error.name!r}") from None
    except (Exception, SystemExit) as error:
        raise TaskError(f"app: importing {module_name!r} failed: {_shown(error)}") from None
    found = getattr(module, attribute, None)
    if not isinstance(found, TaskApp):
        apps = [name for name, value in vars(module).items() if isinstance(value, TaskApp)]
        there = f"there is {', '.join(apps)}" if apps else "the module has none"
        raise TaskError(f"app: {attribute!r} in {module_name!r} is not a TaskApp; {there}")
    return found


def _shown(error: BaseException) -> str:
    """An exception in one line, with the last place that is not in Penstock itself."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [each for each in frames if not each.filename.startswith(_PACKAGE)]
    # The text of a SyntaxError has the place; it was raised within Python's own import.
    is_placed = bool(theirs) and not isinstance(error, SyntaxError)
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if is_placed else ""
    if isinstance(error, PenstockError):
        return f"{error}{place}"
    return f"{type(error).__name__}: {error}{place}"


def check_reachable(app: TaskApp) -> None:
    """Refuses a store that only the process which opens it can use. Raises TaskError."""
    if read_url(app.url).is_in_this_process:
        raise TaskError(
            f"url: {app.url!r} is a store within one process, which a worker cannot reach; "
            "use redis:, file:PATH or another store, or app.run_until_empty() in a test"
        )


def check_abilities(app: TaskApp) -> None:
    """Refuses limits on a store that cannot hold a number of tokens. Raises TaskError."""
    lacks = app.service.LACKS
    limited = [task.name for task in app.tasks.values() if task.options.is_limited]
    # Claimed tokens are in flight, and must count against the capacity.
    lacking = next((each for each in _TOKENS_NEED if each in lacks), None)
    if limited and lacking is not None:
        raise TaskError(
            f"task {limited[0]!r}: its rate or concurrency cannot be kept on this store: "
            f"{lacks[lacking]}"
        )


def queues_of(app: TaskApp, options: WorkerOptions) -> tuple[str, ...]:
    """The queues to pull from. Raises TaskError if there are none."""
    queues = options.queues or tuple(app.queues)
    if not queues:
        raise TaskError(f"app: {options.app!r} has no tasks, so there is no queue to work on")
    return queues
