"""Queues: creating, finding, listing, attributes, tags, permissions, purging, deleting."""

import json

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, entries

CREATE = "create and find"
ATTRIBUTES = "attributes"
TAGS = "tags"
PERMISSIONS = "permissions"
PURGE = "purge and delete"


@check(ATTRIBUTES)
def a_new_queue_has_the_documented_defaults(target: CheckedServer) -> None:
    """CreateQueue: visibility 30 s, delay 0, wait 0, retention 4 days, size 1 MiB."""
    shown = target.attributes(target.queue())
    defaults = {
        "VisibilityTimeout": "30",
        "DelaySeconds": "0",
        "ReceiveMessageWaitTimeSeconds": "0",
        "MessageRetentionPeriod": "345600",
        "MaximumMessageSize": "1048576",
    }
    expect({name: shown.get(name) for name in defaults}, defaults, "the attributes")


@check(ATTRIBUTES)
def a_new_queue_is_encrypted_with_keys_of_sqs(target: CheckedServer) -> None:
    """SqsManagedSseEnabled: true for a new queue without another choice."""
    found = target.attributes(target.queue(), "SqsManagedSseEnabled")
    expect(found, {"SqsManagedSseEnabled": "true"}, "the attribute")


@check(ATTRIBUTES)
def all_attributes_include_counts_times_and_the_arn(target: CheckedServer) -> None:
    """GetQueueAttributes: All has the three counts, two timestamps in seconds and the ARN."""
    name = target.name()
    shown = target.attributes(target.queue(name))
    for state in ("", "NotVisible", "Delayed"):
        expect(shown.get(f"ApproximateNumberOfMessages{state}"), "0", f"the count {state}")
    for time in ("CreatedTimestamp", "LastModifiedTimestamp"):
        require(len(shown.get(time, "")) == 10 and shown[time].isdigit(), f"{time} is no time in s")
    arn = shown["QueueArn"].split(":")
    expect(arn[:4] + arn[5:], ["arn", "aws", "sqs", target.region, name], "the ARN")
    require(len(arn[4]) == 12 and arn[4].isdigit(), "the account in the ARN has no twelve digits")


@check(ATTRIBUTES)
def only_the_attributes_that_were_asked_for_are_given(target: CheckedServer) -> None:
    """GetQueueAttributes: AttributeNames chooses; one that is not set is left out."""
    found = target.attributes(target.queue(), "DelaySeconds", "Policy")
    expect(found, {"DelaySeconds": "0"}, "the attributes")


@check(CREATE)
def a_queue_can_be_created_again_with_the_same_attributes(target: CheckedServer) -> None:
    """CreateQueue: the name and exact attributes of an existing queue give its URL."""
    name = target.name()
    url = target.queue(name, DelaySeconds="1")
    expect(target.queue(name, DelaySeconds="1"), url, "the URL")


@check(CREATE)
def a_queue_of_that_name_with_other_attributes_exists_already(target: CheckedServer) -> None:
    """CreateQueue: QueueNameExists if an attribute differs from that of the existing queue."""
    name = target.name()
    target.queue(name, DelaySeconds="1")
    target.refuses(
        target.client.create_queue,
        "QueueNameExists",
        "A queue already exists with the same name and a different value for attribute "
        "DelaySeconds",
        QueueName=name,
        Attributes={"DelaySeconds": "2"},
    )


@check(CREATE)
def a_queue_url_begins_with_the_address_that_the_client_used(target: CheckedServer) -> None:
    """Queue URLs are what a client sends later requests to, so it must reach them."""
    name = target.name()
    url = target.queue(name)
    require(url.startswith(target.endpoint_url + "/"), f"the URL is {url}")
    require(url.endswith(f"/{name}"), f"the URL is {url}")


@check(CREATE)
def a_url_is_found_by_name_and_owner(target: CheckedServer) -> None:
    """GetQueueUrl: QueueName, and QueueOwnerAWSAccountId of the account that made it."""
    name = target.name()
    url = target.queue(name)
    owner = target.arn(url).split(":")[4]
    ask = target.client.get_queue_url
    expect(ask(QueueName=name)["QueueUrl"], url, "the URL")
    expect(ask(QueueName=name, QueueOwnerAWSAccountId=owner)["QueueUrl"], url, "the URL")


@check(CREATE)
def a_queue_of_another_account_is_not_found(target: CheckedServer) -> None:
    """GetQueueUrl: QueueDoesNotExist if that account has no queue of the name."""
    name = target.name()
    target.queue(name)
    target.refuses(
        target.client.get_queue_url,
        "QueueDoesNotExist",
        QueueName=name,
        QueueOwnerAWSAccountId="111122223333",
    )


@check(CREATE)
def queues_of_two_regions_do_not_see_each_other(target: CheckedServer) -> None:
    """Queues are of one region; the region is that of the request's signature."""
    name = target.name()
    target.queue(name)
    elsewhere = target.another_client("eu-central-1")
    target.refuses(elsewhere.get_queue_url, "QueueDoesNotExist", QueueName=name)
    require(not elsewhere.list_queues(QueueNamePrefix=name).get("QueueUrls"), "it is listed there")


@check(CREATE)
def names_have_up_to_80_letters_digits_hyphens_and_underscores(target: CheckedServer) -> None:
    """CreateQueue: 1 to 80 characters: alphanumeric, hyphens and underscores."""
    longest = target.name().ljust(80, "_")
    require(target.queue(longest).endswith(f"/{longest}"), "a name of 80 characters is changed")
    for name in ("a" * 81, "a b", "ü", "../x", "a.b", "%2e%2e", "nul\x00", "@x", "a/b"):
        target.refuses(
            target.client.create_queue,
            "InvalidParameterValue",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
            QueueName=name,
        )


@check(CREATE)
def the_name_of_a_fifo_queue_ends_in_fifo(target: CheckedServer) -> None:
    """CreateQueue: the name of a FIFO queue ends in .fifo, which counts as part of the 80."""
    longest = target.name().ljust(75, "_") + ".fifo"
    require(target.fifo(longest).endswith(f"/{longest}"), "a name of 80 characters is changed")
    fifo = {"FifoQueue": "true"}
    for name in ("a" * 76 + ".fifo", target.name(), ".fifo"):
        target.refuses(
            target.client.create_queue, "InvalidParameterValue", QueueName=name, Attributes=fifo
        )
    target.refuses(
        target.client.create_queue, "InvalidParameterValue", QueueName=target.name(".fifo")
    )


@check(CREATE)
def queues_are_listed_by_prefix(target: CheckedServer) -> None:
    """ListQueues: only queues whose names begin with QueueNamePrefix."""
    prefix = target.name()
    urls = {target.queue(f"{prefix}-{number}") for number in range(3)}
    target.queue()
    listed = target.client.list_queues(QueueNamePrefix=f"{prefix}-")
    expect(sorted(listed.get("QueueUrls", [])), sorted(urls), "the list")
    none = target.client.list_queues(QueueNamePrefix=f"{prefix}-none")
    require(not none.get("QueueUrls"), "a prefix of no queue lists some")


@check(CREATE)
def queues_are_listed_in_pages(target: CheckedServer) -> None:
    """ListQueues: MaxResults limits a page; NextToken gives the next until there is none."""
    prefix = target.name()
    wanted = sorted(target.queue(f"{prefix}-{number}") for number in range(7))
    found: list[str] = []
    sizes: list[int] = []
    token: dict[str, str] = {}
    while len(sizes) < 7:
        page = target.client.list_queues(QueueNamePrefix=f"{prefix}-", MaxResults=3, **token)
        sizes.append(len(page.get("QueueUrls", [])))
        found += page.get("QueueUrls", [])
        if not page.get("NextToken"):
            break
        token = {"NextToken": page["NextToken"]}
    expect((sizes, sorted(found)), ([3, 3, 1], wanted), "the pages")


@check(CREATE)
def a_page_of_a_list_has_1_to_1000_queues(target: CheckedServer) -> None:
    """ListQueues: MaxResults is from 1 to 1,000."""
    for limit in (0, 1_001):
        target.refuses(target.client.list_queues, "InvalidParameterValue", MaxResults=limit)


@check(ATTRIBUTES)
def attributes_can_be_changed_and_read(target: CheckedServer) -> None:
    """SetQueueAttributes: what is set is what GetQueueAttributes gives; the rest stays."""
    url = target.queue(DelaySeconds="1")
    changes = {
        "VisibilityTimeout": "69",
        "MaximumMessageSize": "2048",
        "MessageRetentionPeriod": "604800",
        "ReceiveMessageWaitTimeSeconds": "20",
    }
    target.set(url, **changes)
    shown = target.attributes(url)
    expect({name: shown[name] for name in changes}, changes, "the attributes")
    expect(shown["DelaySeconds"], "1", "the attribute that was not set")


@check(ATTRIBUTES, wait_s=2)
def a_change_of_attributes_has_a_time(target: CheckedServer) -> None:
    """LastModifiedTimestamp: when the queue was last changed, in seconds."""
    url = target.queue()
    before = target.attributes(url)
    target.wait(2)
    target.set(url, VisibilityTimeout="69")
    after = target.attributes(url)
    expect(after["CreatedTimestamp"], before["CreatedTimestamp"], "CreatedTimestamp")
    later = int(after["LastModifiedTimestamp"]) - int(before["LastModifiedTimestamp"])
    require(2 <= later <= 10, f"LastModifiedTimestamp is {later} s later")


def _limits(target: CheckedServer, name: str, low: int, high: int, **attributes: str) -> None:
    url = target.queue(**attributes)
    for value in (low, high):
        target.set(url, **{name: str(value)})
        expect(target.attributes(url, name), {name: str(value)}, "the attribute")
    for bad in (str(low - 1), str(high + 1), "x", "1.5", "9" * 40):
        target.refuses(
            target.client.set_queue_attributes,
            "InvalidAttributeValue",
            f"Invalid value for the parameter {name}.",
            QueueUrl=url,
            Attributes={name: bad},
        )
    expect(target.attributes(url, name), {name: str(high)}, "the attribute after refusals")


@check(ATTRIBUTES)
def the_visibility_timeout_is_from_0_to_43200_seconds(target: CheckedServer) -> None:
    """SetQueueAttributes, VisibilityTimeout: an integer from 0 to 43,200 (12 hours)."""
    _limits(target, "VisibilityTimeout", 0, 43_200)


@check(ATTRIBUTES)
def the_delay_is_from_0_to_900_seconds(target: CheckedServer) -> None:
    """SetQueueAttributes, DelaySeconds: an integer from 0 to 900 (15 minutes)."""
    _limits(target, "DelaySeconds", 0, 900)


@check(ATTRIBUTES)
def the_wait_time_is_from_0_to_20_seconds(target: CheckedServer) -> None:
    """SetQueueAttributes, ReceiveMessageWaitTimeSeconds: an integer from 0 to 20."""
    _limits(target, "ReceiveMessageWaitTimeSeconds", 0, 20)


@check(ATTRIBUTES)
def the_retention_is_from_one_minute_to_14_days(target: CheckedServer) -> None:
    """SetQueueAttributes, MessageRetentionPeriod: an integer from 60 to 1,209,600."""
    _limits(target, "MessageRetentionPeriod", 60, 1_209_600)


@check(ATTRIBUTES)
def the_maximum_size_is_from_1_kib_to_1_mib(target: CheckedServer) -> None:
    """SetQueueAttributes, MaximumMessageSize: an integer from 1,024 to 1,048,576."""
    _limits(target, "MaximumMessageSize", 1_024, 1_048_576)


@check(ATTRIBUTES)
def the_reuse_of_a_data_key_is_from_60_to_86400_seconds(target: CheckedServer) -> None:
    """SetQueueAttributes, KmsDataKeyReusePeriodSeconds: an integer from 60 to 86,400."""
    key = {"KmsMasterKeyId": "alias/aws/sqs"}
    _limits(target, "KmsDataKeyReusePeriodSeconds", 60, 86_400, **key)


@check(ATTRIBUTES)
def attributes_that_the_server_counts_cannot_be_set(target: CheckedServer) -> None:
    """SetQueueAttributes: InvalidAttributeName for those that are not among the settable ones."""
    url = target.queue()
    for name in ("QueueArn", "CreatedTimestamp", "ApproximateNumberOfMessages", "NoSuchThing"):
        text = f"Unknown Attribute {name}."
        given = {name: "1"}
        call = target.client.set_queue_attributes
        target.refuses(call, "InvalidAttributeName", text, QueueUrl=url, Attributes=given)
        call = target.client.create_queue
        target.refuses(
            call, "InvalidAttributeName", text, QueueName=target.name(), Attributes=given
        )


@check(ATTRIBUTES)
def unknown_attributes_cannot_be_read(target: CheckedServer) -> None:
    """GetQueueAttributes: InvalidAttributeName for a name that there is not."""
    target.refuses(
        target.client.get_queue_attributes,
        "InvalidAttributeName",
        "Unknown Attribute Colour.",
        QueueUrl=target.queue(),
        AttributeNames=["Colour"],
    )


@check(ATTRIBUTES)
def an_empty_policy_removes_it(target: CheckedServer) -> None:
    """SetQueueAttributes: an empty string takes a policy away."""
    url = target.queue()
    policies = {
        "Policy": '{"Version": "2012-10-17", "Statement": []}',
        "RedriveAllowPolicy": '{"redrivePermission": "denyAll"}',
    }
    target.set(url, **policies)
    shown = target.attributes(url)
    found = {name: json.loads(shown.get(name, "null")) for name in policies}
    expect(found, {name: json.loads(text) for name, text in policies.items()}, "the policies")
    target.set(url, Policy="", RedriveAllowPolicy="")
    left = [name for name in policies if target.attributes(url).get(name)]
    expect(left, [], "what is left")


@check(ATTRIBUTES)
def a_value_that_is_not_a_policy_is_refused(target: CheckedServer) -> None:
    """Policy: a valid policy in the language of AWS, otherwise InvalidAttributeValue."""
    url = target.queue()
    for policy in ("x", "7", "[]", '{"Statement": 7}'):
        target.refuses(
            target.client.set_queue_attributes,
            "InvalidAttributeValue",
            "Invalid value for the parameter Policy.",
            QueueUrl=url,
            Attributes={"Policy": policy},
        )
    require("Policy" not in target.attributes(url), "a refused policy is kept")


@check(ATTRIBUTES)
def the_two_kinds_of_encryption_exclude_each_other(target: CheckedServer) -> None:
    """SqsManagedSseEnabled: only one kind of server-side encryption can be enabled."""
    url = target.queue(KmsMasterKeyId="testKeyId", KmsDataKeyReusePeriodSeconds="6000")
    names = ("KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds")
    kms = {"KmsMasterKeyId": "testKeyId", "KmsDataKeyReusePeriodSeconds": "6000"}
    expect(target.attributes(url, *names), kms, "the attributes")
    target.refuses(
        target.client.set_queue_attributes,
        "InvalidAttributeName",
        "You can use one type of server-side encryption (SSE) at one time. "
        "You can either enable KMS SSE or SQS SSE.",
        QueueUrl=url,
        Attributes={"KmsMasterKeyId": "another", "SqsManagedSseEnabled": "true"},
    )
    target.set(url, SqsManagedSseEnabled="true")
    require("KmsMasterKeyId" not in target.attributes(url), "both kinds are enabled")


@check(TAGS)
def tags_are_kept_changed_and_removed(target: CheckedServer) -> None:
    """TagQueue, UntagQueue, ListQueueTags: a new value replaces that of the same key."""
    made = target.client.create_queue(QueueName=target.name(), tags={"tag1": "value1"})
    url = made["QueueUrl"]

    def tags() -> object:
        return target.client.list_queue_tags(QueueUrl=url).get("Tags")

    target.client.tag_queue(QueueUrl=url, Tags={"tag2": "value2", "tag3": ""})
    expect(tags(), {"tag1": "value1", "tag2": "value2", "tag3": ""}, "the tags")
    target.client.tag_queue(QueueUrl=url, Tags={"tag2": "new"})
    target.client.untag_queue(QueueUrl=url, TagKeys=["tag1", "tag3", "none"])
    expect(tags(), {"tag2": "new"}, "the tags")
    target.client.untag_queue(QueueUrl=url, TagKeys=["tag2"])
    require(not tags(), "the last tag is not removed")


@check(TAGS)
def a_queue_has_at_most_50_tags(target: CheckedServer) -> None:
    """Quotas for queues: more than 50 tags are not recommended, and are refused."""
    url = target.queue()
    target.refuses(
        target.client.tag_queue,
        "InvalidParameterValue",
        f"Too many tags added for queue {url.rpartition('/')[2]}.",
        QueueUrl=url,
        Tags={f"t{number}": "x" for number in range(51)},
    )


@check(TAGS)
def a_tag_has_a_key_of_128_and_a_value_of_256_characters(target: CheckedServer) -> None:
    """Tagging: keys up to 128 characters, values up to 256."""
    url = target.queue()
    target.client.tag_queue(QueueUrl=url, Tags={"k" * 128: "v" * 256})
    for tags in ({"k" * 129: "v"}, {"k": "v" * 257}):
        target.refuses(target.client.tag_queue, "InvalidParameterValue", QueueUrl=url, Tags=tags)


@check(PERMISSIONS)
def permissions_become_a_policy(target: CheckedServer) -> None:
    """AddPermission: writes a statement of the queue's policy with the label as its Sid."""
    url = target.queue()
    accounts = ["111122223333", "444455556666"]
    target.client.add_permission(
        QueueUrl=url, Label="cross", AWSAccountIds=accounts, Actions=["ReceiveMessage"]
    )
    policy = json.loads(target.attributes(url, "Policy")["Policy"])
    statement = policy["Statement"][0]
    arn = target.arn(url)
    principals = [f"arn:aws:iam::{account}:root" for account in accounts]
    found = {name: statement.get(name) for name in ("Sid", "Effect", "Resource")}
    expect(found, {"Sid": "cross", "Effect": "Allow", "Resource": arn}, "the statement")
    expect(sorted(statement["Principal"]["AWS"]), principals, "the principals")
    actions = statement["Action"]
    action = actions if isinstance(actions, str) else ",".join(actions)
    expect(action.lower(), "sqs:receivemessage", "the action")
    expect(policy.get("Version"), "2008-10-17", "the version of the policy")


@check(PERMISSIONS)
def a_permission_is_removed_by_its_label(target: CheckedServer) -> None:
    """RemovePermission: takes the statement with this label away; another label is refused."""
    url = target.queue()
    target.client.add_permission(
        QueueUrl=url, Label="cross", AWSAccountIds=["111122223333"], Actions=["*"]
    )
    remove = target.client.remove_permission
    remove(QueueUrl=url, Label="cross")
    text = target.attributes(url).get("Policy")
    require(not text or not json.loads(text).get("Statement"), "the statement is still there")
    target.refuses(
        remove,
        "InvalidParameterValue",
        "Value cross for parameter Label is invalid. Reason: can't find label.",
        QueueUrl=url,
        Label="cross",
    )


@check(PERMISSIONS)
def a_label_of_a_permission_is_used_once(target: CheckedServer) -> None:
    """AddPermission: the label is the unique identification of the permission."""
    url = target.queue()
    asked = {"QueueUrl": url, "Label": "cross", "AWSAccountIds": ["111122223333"]}
    target.client.add_permission(Actions=["SendMessage"], **asked)
    target.refuses(
        target.client.add_permission,
        "InvalidParameterValue",
        "Value cross for parameter Label is invalid. Reason: Already exists.",
        Actions=["*"],
        **asked,
    )


@check(PERMISSIONS)
def a_permission_has_at_most_seven_actions(target: CheckedServer) -> None:
    """AddPermission: OverLimit for more than seven actions in a statement."""
    target.refuses(
        target.client.add_permission,
        "OverLimit",
        "8 Actions were found, maximum allowed is 7.",
        QueueUrl=target.queue(),
        Label="cross",
        AWSAccountIds=["111122223333"],
        Actions=["SendMessage"] * 8,
    )


@check(PURGE)
def a_purge_removes_every_message(target: CheckedServer) -> None:
    """PurgeQueue: deletes all messages, also those that are delayed or in flight."""
    url = target.queue()
    target.client.send_message_batch(QueueUrl=url, Entries=entries(3))
    target.send(url, "late", DelaySeconds=9)
    target.receive(url)
    target.client.purge_queue(QueueUrl=url)
    left = [target.count(url, state) for state in ("", "NotVisible", "Delayed")]
    expect((target.bodies(url), left), ([], [0, 0, 0]), "what is left")


@check(PURGE)
def a_second_purge_within_a_minute_is_refused(target: CheckedServer) -> None:
    """PurgeQueue: PurgeQueueInProgress within 60 seconds of the last purge."""
    url = target.queue()
    target.client.purge_queue(QueueUrl=url)
    name = url.rpartition("/")[2]
    target.refuses(
        target.client.purge_queue,
        "PurgeQueueInProgress",
        f"Only one PurgeQueue operation on {name} is allowed every 60 seconds.",
        QueueUrl=url,
    )


@check(PURGE, wait_s=61)
def a_queue_can_be_purged_again_after_a_minute(target: CheckedServer) -> None:
    """PurgeQueue: refused for 60 seconds, and no longer."""
    url = target.queue()
    minute = target.span(60)
    target.client.purge_queue(QueueUrl=url)
    minute.nearly()
    target.refuses(target.client.purge_queue, "PurgeQueueInProgress", QueueUrl=url)
    minute.over()
    target.send(url)
    target.client.purge_queue(QueueUrl=url)
    expect(target.bodies(url), [], "what is left")


@check(PURGE)
def a_deleted_queue_does_not_exist(target: CheckedServer) -> None:
    """DeleteQueue: messages of the queue are gone, and requests give QueueDoesNotExist."""
    url = target.queue()
    target.send(url)
    target.client.delete_queue(QueueUrl=url)
    for call, more in (
        (target.client.send_message, {"MessageBody": "x"}),
        (target.client.receive_message, {}),
        (target.client.get_queue_attributes, {}),
    ):
        target.refuses(call, "QueueDoesNotExist", QueueUrl=url, **more)


@check(PURGE)
def the_name_of_a_deleted_queue_cannot_be_used_at_once(target: CheckedServer) -> None:
    """CreateQueue: QueueDeletedRecently within 60 seconds of the deletion."""
    name = target.name()
    target.client.delete_queue(QueueUrl=target.queue(name))
    target.refuses(
        target.client.create_queue,
        "QueueDeletedRecently",
        "You must wait 60 seconds after deleting a queue before you can create another with the "
        "same name.",
        QueueName=name,
    )


@check(PURGE, wait_s=61)
def the_name_of_a_deleted_queue_can_be_used_after_a_minute(target: CheckedServer) -> None:
    """DeleteQueue: wait at least 60 seconds before a queue of that name; it has no messages."""
    name = target.name()
    url = target.queue(name)
    target.send(url)
    minute = target.span(60)
    target.client.delete_queue(QueueUrl=url)
    minute.nearly()
    target.refuses(target.client.create_queue, "QueueDeletedRecently", QueueName=name)
    minute.over()
    expect(target.queue(name), url, "the URL")
    expect(target.bodies(url), [], "the messages of the new queue")
