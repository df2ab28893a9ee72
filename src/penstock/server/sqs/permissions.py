"""The SQS actions on permissions: statements in the policy of a queue, one for each label."""

from typing import Any, Final

import msgspec

from penstock.backends.loop import Steps
from penstock.server.sqs.lookup import Caller, QueueLookup, annotated
from penstock.service import QueueInfo
from penstock.wire.sqs import attributes, model
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.address import is_account, is_standard_name, partition
from penstock.wire.sqs.errors import Refusal, invalid_value, missing

PERMITTED_ACTIONS_MAX: Final = 7
# Actions that cannot be permitted to others.
_OWNER_ACTIONS: Final = frozenset(
    {
        "AddPermission",
        "CancelMessageMoveTask",
        "CreateQueue",
        "DeleteQueue",
        "ListMessageMoveTasks",
        "ListQueueTags",
        "ListQueues",
        "RemovePermission",
        "SetQueueAttributes",
        "StartMessageMoveTask",
        "TagQueue",
        "UntagQueue",
    }
)


class PermissionActions:
    """The actions on permissions."""

    def __init__(self, lookup: QueueLookup) -> None:
        self._lookup = lookup
        self._describe = lookup.describe

    def add(self, request: model.AddPermissionRequest, caller: Caller) -> Steps[None]:
        """AddPermission."""
        queue = yield from self._describe(request.queue_url or "", caller)
        label = _check_label(request.label or "")
        accounts = request.aws_account_ids or []
        actions = request.actions or []
        if not actions:
            raise missing("Actions")
        _check_permitted(accounts, actions)
        policy = _policy(queue, self._lookup.arn(queue.queue))
        region = self._lookup.directory.address(queue.queue).owner.region
        principals = [f"arn:{partition(region)}:iam::{each}:root" for each in accounts]
        permitted = [f"SQS:{each}" for each in actions]
        statement = {
            "Sid": label,
            "Effect": "Allow",
            "Principal": {"AWS": principals[0] if len(principals) == 1 else principals},
            "Action": permitted[0] if len(permitted) == 1 else permitted,
            "Resource": self._lookup.arn(queue.queue),
        }
        if statement in policy["Statement"]:
            return
        if any(each.get("Sid") == label for each in policy["Statement"]):
            raise invalid_value(label, "Label", "Already exists.")
        policy["Statement"].append(statement)
        count = len(policy["Statement"])
        if count > attributes.STATEMENTS_MAX:
            raise Refusal(
                faults.OVER_LIMIT,
                f"{count} Statements were found, maximum allowed is {attributes.STATEMENTS_MAX}.",
            )
        yield annotated(queue, attributes.POLICY, msgspec.json.encode(policy).decode())

    def remove(self, request: model.RemovePermissionRequest, caller: Caller) -> Steps[None]:
        """RemovePermission."""
        queue = yield from self._describe(request.queue_url or "", caller)
        policy = _policy(queue, self._lookup.arn(queue.queue))
        kept = [each for each in policy["Statement"] if each.get("Sid") != request.label]
        if len(kept) == len(policy["Statement"]):
            raise invalid_value(request.label, "Label", "can't find label.")
        policy["Statement"] = kept
        text = msgspec.json.encode(policy).decode() if kept else None
        yield annotated(queue, attributes.POLICY, text)


def _check_label(label: str) -> str:
    if not is_standard_name(label):
        raise invalid_value(
            label,
            "Label",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length.",
        )
    return label


def _check_permitted(accounts: list[str], actions: list[str]) -> None:
    unknown = [account for account in accounts if not is_account(account)]
    if unknown or not accounts:
        raise invalid_value(f"[{', '.join(unknown)}]", "PrincipalId", "Unable to verify.")
    if len(actions) > PERMITTED_ACTIONS_MAX:
        raise Refusal(
            faults.OVER_LIMIT,
            f"{len(actions)} Actions were found, maximum allowed is {PERMITTED_ACTIONS_MAX}.",
        )
    for action in actions:
        if action in _OWNER_ACTIONS:
            raise invalid_value(
                f"SQS:{action}",
                "ActionName",
                "Only the queue owner is allowed to invoke this action.",
            )
        # A permission for an action covers its batch form, which has no name of its own here.
        if action != "*" and (action not in model.ACTIONS or action.endswith("Batch")):
            raise invalid_value(
                f"SQS:{action}",
                "ActionName",
                "Please refer to the appropriate WSDL for a list of valid actions.",
            )


def _policy(queue: QueueInfo, arn: str) -> dict[str, Any]:
    text = queue.settings.annotations.get(attributes.POLICY)
    found = attributes.read_json(text) if text else None
    policy: dict[str, Any] = found if isinstance(found, dict) else {}
    policy.setdefault("Version", "2008-10-17")
    policy.setdefault("Id", f"{arn}/SQSDefaultPolicy")
    policy["Statement"] = attributes.statements_of(policy) or []
    return policy
