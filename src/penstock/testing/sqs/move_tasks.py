"""Message move tasks: dead letters go back to their source, or to another queue."""

import time
from typing import Any

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer

TASKS = "message move tasks"
ENDED = ("COMPLETED", "CANCELLED", "FAILED")
_WAIT_S = 8.0


def _dead(target: CheckedServer, source: str, *bodies: str) -> None:
    """Makes dead letters of these messages, for a policy of one receive."""
    for body in bodies:
        target.send(source, body)
    for message in target.receive(source, MaxNumberOfMessages=10):
        target.hide(source, message, 0)
    expect(target.bodies(source), [], "a receive after the last that is allowed")


def _tasks(target: CheckedServer, arn: str) -> list[dict[str, Any]]:
    answer = target.client.list_message_move_tasks(SourceArn=arn, MaxResults=1)
    return list(answer.get("Results") or [])


def _ended(target: CheckedServer, arn: str) -> dict[str, Any]:
    """The task of a queue, once it has ended."""
    until_s = time.monotonic() + _WAIT_S
    while True:
        tasks = _tasks(target, arn)
        if tasks and tasks[0]["Status"] in ENDED:
            return tasks[0]
        require(time.monotonic() < until_s, f"the task has not ended: {tasks}")
        time.sleep(0.05)


@check(TASKS)
def dead_letters_move_back_to_their_source(target: CheckedServer) -> None:
    """StartMessageMoveTask: without a destination, to the queues that they come from."""
    one, dead = target.pair()
    two = target.queue(RedrivePolicy=target.attributes(one)["RedrivePolicy"])
    _dead(target, one, "a", "b")
    _dead(target, two, "c")
    arn = target.arn(dead)
    require(target.client.start_message_move_task(SourceArn=arn)["TaskHandle"], "no TaskHandle")
    task = _ended(target, arn)
    found = (
        task["Status"],
        task["SourceArn"],
        task["ApproximateNumberOfMessagesMoved"],
        task.get("ApproximateNumberOfMessagesToMove"),
    )
    expect(found, ("COMPLETED", arn, 3, 3), "the task")
    require("TaskHandle" not in task, "a task that has ended has a TaskHandle")
    expect((target.all_bodies(one, 2), target.bodies(two)), (["a", "b"], ["c"]), "the messages")
    expect(target.count(dead), 0, "the count of dead letters")


@check(TASKS)
def dead_letters_move_to_the_given_destination(target: CheckedServer) -> None:
    """StartMessageMoveTask, DestinationArn."""
    source, dead = target.pair()
    other = target.queue()
    _dead(target, source, "a", "b")
    target.client.start_message_move_task(
        SourceArn=target.arn(dead), DestinationArn=target.arn(other)
    )
    task = _ended(target, target.arn(dead))
    found = (task["Status"], task.get("DestinationArn"))
    expect(found, ("COMPLETED", target.arn(other)), "the task")
    expect(target.all_bodies(other, 2), ["a", "b"], "the messages")


@check(TASKS, wait_s=1)
def a_running_task_is_listed_and_can_be_cancelled(target: CheckedServer) -> None:
    """CancelMessageMoveTask: ends it; messages that were moved stay, the rest is not moved."""
    source, dead = target.pair()
    _dead(target, source, *"abcdefghij")
    arn = target.arn(dead)
    start = target.client.start_message_move_task
    started = start(SourceArn=arn, MaxNumberOfMessagesPerSecond=1)["TaskHandle"]
    (task,) = _tasks(target, arn)
    found = (task["Status"], task.get("TaskHandle"), task.get("MaxNumberOfMessagesPerSecond"))
    expect(found, ("RUNNING", started, 1), "the task")
    target.client.cancel_message_move_task(TaskHandle=started)
    task = _ended(target, arn)
    expect(task["Status"], "CANCELLED", "the status")
    left = target.count(dead)
    require(left > 0, "all messages were moved")
    expect(left + target.count(source), 10, "the number of messages in both queues")


@check(TASKS)
def one_task_of_a_queue_runs_at_a_time(target: CheckedServer) -> None:
    """StartMessageMoveTask: only one active task for a queue."""
    source, dead = target.pair()
    _dead(target, source, *"abcdefghij")
    arn = target.arn(dead)
    start = target.client.start_message_move_task
    started = start(SourceArn=arn, MaxNumberOfMessagesPerSecond=1)["TaskHandle"]
    try:
        target.refuses(
            start,
            "InvalidParameterValue",
            "There is already a task running. Only one active task is allowed for a source queue "
            "arn at a given time.",
            SourceArn=arn,
        )
    finally:
        target.client.cancel_message_move_task(TaskHandle=started)


@check(TASKS)
def the_source_of_a_task_is_a_dead_letter_queue(target: CheckedServer) -> None:
    """StartMessageMoveTask, SourceArn: of a queue that is a dead-letter queue of others."""
    arn = target.arn(target.queue())
    start = target.client.start_message_move_task
    target.refuses(
        start,
        "InvalidParameterValue",
        "Source queue must be configured as a Dead Letter Queue.",
        SourceArn=arn,
    )


@check(TASKS)
def the_queues_of_a_task_must_exist(target: CheckedServer) -> None:
    """StartMessageMoveTask, ListMessageMoveTasks: ResourceNotFoundException."""
    _, dead = target.pair()
    arn = target.arn(dead)
    missing = "The resource that you specified for the {} parameter doesn't exist."
    start = target.client.start_message_move_task
    for call in (start, target.client.list_message_move_tasks):
        text = missing.format("SourceArn")
        target.refuses(call, "ResourceNotFoundException", text, SourceArn=f"{arn}-none")
    target.refuses(
        start,
        "ResourceNotFoundException",
        missing.format("DestinationArn"),
        SourceArn=arn,
        DestinationArn=f"{arn}-none",
    )


@check(TASKS)
def a_task_moves_1_to_500_messages_a_second(target: CheckedServer) -> None:
    """StartMessageMoveTask, MaxNumberOfMessagesPerSecond: at most 500."""
    _, dead = target.pair()
    for rate in (0, 501):
        target.refuses(
            target.client.start_message_move_task,
            "InvalidParameterValue",
            SourceArn=target.arn(dead),
            MaxNumberOfMessagesPerSecond=rate,
        )


@check(TASKS)
def one_to_ten_tasks_are_listed(target: CheckedServer) -> None:
    """ListMessageMoveTasks, MaxResults: up to ten tasks."""
    _, dead = target.pair()
    arn = target.arn(dead)
    for limit in (0, 11):
        target.refuses(
            target.client.list_message_move_tasks,
            "InvalidParameterValue",
            SourceArn=arn,
            MaxResults=limit,
        )


@check(TASKS)
def an_unknown_task_cannot_be_cancelled(target: CheckedServer) -> None:
    """CancelMessageMoveTask, TaskHandle: as StartMessageMoveTask gave it."""
    target.refuses(
        target.client.cancel_message_move_task,
        "InvalidParameterValue",
        "Value for parameter TaskHandle is invalid.",
        TaskHandle="nonsense",
    )


@check(TASKS)
def messages_that_nobody_dead_lettered_have_no_source(target: CheckedServer) -> None:
    """Dead-letter redrive: a message that was sent to the queue itself cannot go back."""
    _, dead = target.pair()
    target.send(dead, "sent here")
    arn = target.arn(dead)
    target.client.start_message_move_task(SourceArn=arn)
    task = _ended(target, arn)
    found = (task["Status"], task.get("FailureReason"), task["ApproximateNumberOfMessagesMoved"])
    expect(found, ("FAILED", "CouldNotDetermineMessageSource", 0), "the task")
    expect(target.bodies(dead), ["sent here"], "what is left")
