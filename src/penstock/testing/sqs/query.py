"""The Query protocol for today's botocore: its model of SQS, changed to what older SDKs send."""

import gzip
import json
from pathlib import Path
from typing import Any

import botocore

MODEL = Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz"
_NAMES = {
    "Attributes": "Attribute",
    "MessageAttributes": "MessageAttribute",
    "MessageSystemAttributes": "MessageSystemAttribute",
    "tags": "Tag",
    "Tags": "Tag",
}
_MEMBERS = {
    "AttributeNameList": "AttributeName",
    "MessageSystemAttributeList": "MessageSystemAttributeName",
    "MessageAttributeNameList": "MessageAttributeName",
    "TagKeyList": "TagKey",
    "AWSAccountIdList": "AWSAccountId",
    "ActionNameList": "ActionName",
    "QueueUrlList": "QueueUrl",
    "MessageList": "Message",
    "BatchResultErrorEntryList": "BatchResultErrorEntry",
    "ListMessageMoveTasksResultEntryList": "ListMessageMoveTasksResultEntry",
}


def sqs_model() -> Any:
    """The model of SQS that botocore has: the JSON protocol."""
    with gzip.open(MODEL) as file:
        return json.load(file)


def query_model() -> Any:
    """The model of the older SDKs: the Query protocol, with flat lists and maps."""
    model = sqs_model()
    metadata = model["metadata"]
    metadata.pop("awsQueryCompatible")
    metadata.update(
        protocol="query",
        protocols=["query"],
        xmlNamespace="http://queue.amazonaws.com/doc/2012-11-05/",
    )
    for name, operation in model["operations"].items():
        operation["http"] = {"method": "POST", "requestUri": "/"}
        if "output" in operation:
            operation["output"]["resultWrapper"] = f"{name}Result"
    for name, shape in model["shapes"].items():
        for member, reference in shape.get("members", {}).items():
            if member in _NAMES:
                reference["locationName"] = _NAMES[member]
        if shape["type"] == "map":
            tags = name == "TagMap"
            shape["key"]["locationName"] = "Key" if tags else "Name"
            shape["value"]["locationName"] = "Value"
        if shape["type"] == "list" and shape.get("flattened"):
            shape["member"]["locationName"] = _MEMBERS.get(name) or shape["member"]["shape"]
    return model


def write_query_model(directory: Path) -> None:
    """Writes the older model to where a botocore session with this search path finds it."""
    path = directory / "sqs/2012-11-05"
    path.mkdir(parents=True, exist_ok=True)
    (path / "service-2.json").write_text(json.dumps(query_model()))
    rules = MODEL.with_name("endpoint-rule-set-1.json.gz")
    (path / "endpoint-rule-set-1.json").write_bytes(gzip.decompress(rules.read_bytes()))
