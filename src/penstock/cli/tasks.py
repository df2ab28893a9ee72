"""`penstock tasks list|failed|retry|cancel|inspect MODULE:APP`: manage the tasks of an app."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.parser import add_action
from penstock.cli.session import Session, UsageError, check_exists
from penstock.cli.show import labelled, table
from penstock.cli.values import show_duration
from penstock.cli.worker import add_app, use_url
from penstock.errors import MessageNotFound, QueueNotFound, UnsupportedOperation
from penstock.life import life
from penstock.output import print_text, report
from penstock.service import History, QueueStats, Stats, check_name

if TYPE_CHECKING:
    from penstock.tasks.app import TaskApp
    from penstock.tasks.control import FoundTask
    from penstock.tasks.task import Task

NOTHING: Final = 1
_ACTIONS: Final = {
    "list": "list the tasks, schedules and queues of an app",
    "failed": "list the tasks that have failed for the last time",
    "retry": "push failed tasks again",
    "cancel": "cancel tasks: workers drop them, or end them while they run",
    "inspect": "show one task: its arguments, attempts, result and traceback",
}
_LOOKING: Final = ("list", "failed", "inspect")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in _ACTIONS.items():
        action = add_action(actions, name, summary)
        add_app(action)
        if name != "list":
            action.add_argument("--queue", help="look in this queue only")
        if name == "retry":
            action.add_argument("id", metavar="ID", nargs="*")
            action.add_argument("--all", action="store_true", help="every failed task")
        elif name in ("cancel", "inspect"):
            action.add_argument("id", metavar="ID", nargs="+" if name == "cancel" else None)


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises UsageError, TaskError and the errors of the store."""
    from penstock.tasks.worker.options import check_reachable, load_app

    app = load_app(arguments.app)
    use_url(app, arguments)
    check_reachable(app)
    action: Callable[[Session, Namespace, TaskApp], int] = {
        "list": _list,
        "failed": _failed,
        "retry": _retry,
        "cancel": _cancel,
        "inspect": _inspect,
    }[arguments.action]
    if arguments.action in _LOOKING:
        with session.looking_at(app.url) as queues, app.using(queues.service):
            return action(session, arguments, app)
    check_exists(app.url)
    try:
        return action(session, arguments, app)
    finally:
        app.close()


def _queues(arguments: Namespace, app: "TaskApp") -> list[str]:
    return [check_name(arguments.queue)] if arguments.queue is not None else app.queues


def _list(session: Session, arguments: Namespace, app: "TaskApp") -> int:
    from penstock.tasks.names import failed_queue, separator_of

    stats = {name: _stats(app, name) for name in app.queues}
    separator = separator_of(app.url)
    failed = {name: _stats(app, failed_queue(name, separator)) for name in app.queues}
    now_ms = app.now_ms()
    due = {name: each.next_due_ms(now_ms) for name, each in app.schedules.items()}
    if arguments.json:
        for task in app.tasks.values():
            session.print_json({"task": task.name, **msgspec.to_builtins(task.options)})
        for name in app.queues:
            counts = stats[name]
            session.print_json(
                {
                    "queue": name,
                    "waiting": counts.visible,
                    "delayed": counts.delayed,
                    "running": counts.in_flight,
                    "failed": failed[name].messages,
                }
            )
        for schedule in app.schedules.values():
            session.print_json(
                {
                    "schedule": schedule.name,
                    "task": schedule.call.task.name,
                    "when": schedule.shown,
                    "next_due_ms": due[schedule.name],
                }
            )
        return 0
    rows = [_task_row(task) for task in app.tasks.values()]
    print_text(table(("task", "queue", "options"), rows, left=3))
    print_text("")
    head = ("queue", "waiting", "delayed", "running", "failed")
    print_text(table(head, [_queue_row(stats[name], failed[name]) for name in app.queues]))
    if app.schedules:
        shown = [
            (each.name, each.call.task.name, each.shown, _instant(due[each.name]))
            for each in app.schedules.values()
        ]
        print_text("")
        print_text(table(("schedule", "task", "when", "next"), shown, left=4))
    return 0


def _task_row(task: "Task[..., Any]") -> tuple[str, str, str]:
    options = task.options
    shown_options = [f"retries {options.retries}"]
    if options.priority:
        shown_options.append(f"priority {options.priority}")
    for name in ("timeout", "ttl", "result_ttl"):
        ms = getattr(options, f"{name}_ms")
        if ms is not None:
            shown_options.append(f"{name} {show_duration(ms)}")
    if options.rate is not None:
        shown_options.append(f"rate {options.rate.count}/{show_duration(options.rate.period_ms)}")
    if options.concurrency is not None:
        shown_options.append(f"concurrency {options.concurrency}")
    if options.unique:
        shown_options.append("unique")
    return task.name, options.queue, ", ".join(shown_options)


def _queue_row(stats: QueueStats, failed: QueueStats) -> tuple[str, ...]:
    counts = (stats.visible, stats.delayed, stats.in_flight, failed.messages)
    return stats.queue, *(f"{count:,}" for count in counts)


def _stats(app: "TaskApp", queue: str) -> QueueStats:
    try:
        return app.service.execute(Stats(queue))
    except QueueNotFound:
        return QueueStats(queue, 0, 0, 0, 0, None, 0)


def _failed(session: Session, arguments: Namespace, app: "TaskApp") -> int:
    from penstock.tasks.control import failed_tasks

    found = app.run_steps(failed_tasks(_queues(arguments, app)))
    if arguments.json:
        for task in found:
            session.print_json(_as_json(task))
    elif found:
        rows = [
            (task.id, _name(task), task.queue, _when(task), _error(task)[:100]) for task in found
        ]
        print_text(table(("id", "task", "queue", "failed", "error"), rows, left=5))
    else:
        queues = ", ".join(_queues(arguments, app))
        report(f"no task of {queues} has failed for the last time")
    return 0 if found else NOTHING


def _retry(session: Session, arguments: Namespace, app: "TaskApp") -> int:
    from penstock.tasks.control import retry_failed
    from penstock.tasks.names import separator_of

    if bool(arguments.id) == arguments.all:
        raise UsageError("give the ids of failed tasks, or --all for all of them")
    ids = None if arguments.all else set(arguments.id)
    steps = retry_failed(_queues(arguments, app), ids, separator_of(app.url))
    retried = app.run_steps(steps)
    for task_id in retried:
        session.print_result(arguments, {"id": task_id, "retried": True}, f"retried {task_id}")
    missing = (ids or set()).difference(retried)
    if missing:
        raise UsageError(f"no failed task has the id {', '.join(sorted(missing))}")
    return 0 if retried else NOTHING


def _cancel(session: Session, arguments: Namespace, app: "TaskApp") -> int:
    from penstock.tasks.control import cancel

    for task_id in arguments.id:
        app.run_steps(cancel(app, task_id))
        text = f"{task_id} is dropped when a worker gets it"
        session.print_result(arguments, {"id": task_id, "cancelled": True}, text)
    return 0


def _inspect(session: Session, arguments: Namespace, app: "TaskApp") -> int:
    from penstock.tasks.control import find_task

    task = app.run_steps(find_task(app, _queues(arguments, app), arguments.id))
    if task is None:
        queues = ", ".join(_queues(arguments, app))
        text = f"no task in {queues} has the id {arguments.id}, and no result is kept for it"
        report(text)
        return NOTHING
    told = _life_of(app, task)
    if arguments.json:
        session.print_json({**_as_json(task), "life": told})
    else:
        print_text(labelled([*_as_rows(task), *(("life", sentence) for sentence in told)]))
    return 0


def _life_of(app: "TaskApp", task: "FoundTask") -> list[str]:
    """What happened to the task's message, if this store has a history of it."""
    if task.message is None:
        return []
    try:
        events = app.service.execute(History(task.message.id))
    except (UnsupportedOperation, MessageNotFound):
        return []
    return life(events, app.now_ms()).sentences


def _as_rows(task: "FoundTask") -> list[tuple[str, str]]:
    rows = [("id", task.id), ("state", task.state), ("task", _name(task))]
    if task.queue:
        rows.append(("queue", task.queue))
    if task.message is not None:
        rows.append(("pushed", _instant(task.message.pushed_at_ms)))
    if task.envelope is not None:
        rows.append(("arguments", bytes(task.envelope.args).decode(errors="replace")))
        rows.append(("failures", str(task.envelope.failures)))
    if task.result is not None and task.result.failure is None:
        rows.append(("result", bytes(task.result.value).decode(errors="replace")))
    if _error(task):
        rows.append(("error", _error(task)))
    text = _traceback(task)
    if text:
        rows.append(("traceback", text.rstrip()))
    return rows


def _as_json(task: "FoundTask") -> dict[str, Any]:
    shown: dict[str, Any] = {"id": task.id, "state": task.state, "task": _name(task)}
    shown["queue"] = task.queue
    if task.message is not None:
        shown["pushed_at_ms"] = task.message.pushed_at_ms
        shown["receives"] = task.message.receives
    if task.envelope is not None:
        shown["arguments"] = task.envelope.args
        shown["failures"] = task.envelope.failures
        if task.envelope.failure is not None:
            shown["failed_at_ms"] = task.envelope.failure.at_ms
    if task.result is not None and task.result.failure is None:
        shown["result"] = task.result.value
    return shown | {"error": _error(task) or None, "traceback": _traceback(task) or None}


def _name(task: "FoundTask") -> str:
    return (task.envelope.task if task.envelope is not None else "") or "-"


def _failure(task: "FoundTask") -> Any:
    if task.envelope is not None and task.envelope.failure is not None:
        return task.envelope.failure
    return task.result.failure if task.result is not None else None


def _error(task: "FoundTask") -> str:
    failure = _failure(task)
    return failure.error if failure is not None else ""


def _traceback(task: "FoundTask") -> str:
    failure = _failure(task)
    return failure.traceback if failure is not None else ""


def _when(task: "FoundTask") -> str:
    failure = _failure(task)
    return _instant(failure.at_ms) if failure is not None else "-"


def _instant(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
