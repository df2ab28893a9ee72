"""Queue URLs and ARNs, their owners, and the internal names of their queues.

Two accounts, or two regions of one account, each have their own queues. The internal name of a
queue, in the engine, is its bare name for the default account and region; for any other, both are
appended after an `@`:

    http://HOST/000000000000/orders     in us-east-1    orders
    http://HOST/111122223333/orders     in eu-west-1    orders@eu-west-1.111122223333
"""

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

# No URL of a queue is nearly as long, whatever the host and the path before the account.
_URL_CHARS_MAX: Final = 4_096
_ARN_PARTS: Final = 6
_ACCOUNT: Final = re.compile(r"[0-9]{12}", re.ASCII)
_REGION: Final = re.compile(r"[a-z0-9-]{1,40}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}", re.ASCII)
_FIFO_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,75}\.fifo", re.ASCII)
_PARTITIONS: Final = (
    ("cn-", "aws-cn"),
    ("us-gov-", "aws-us-gov"),
    ("us-isob-", "aws-iso-b"),
    ("us-iso-", "aws-iso"),
)


class Owner(NamedTuple):
    """An account in a region: the owner of a queue, or the identity of a caller."""

    account: str
    region: str


class QueueAddress(NamedTuple):
    """One queue of one owner."""

    owner: Owner
    name: str


class QueueDirectory:
    """Converts addresses to engine names and back, for a given default owner."""

    def __init__(self, default: Owner) -> None:
        self.default = default

    def suffix(self, owner: Owner) -> str:
        """The text that is appended to the names of the owner's queues."""
        return "" if owner == self.default else f"@{owner.region}.{owner.account}"

    def internal_name(self, address: QueueAddress) -> str:
        """The name of a queue in the engine."""
        return address.name + self.suffix(address.owner)

    def address(self, internal: str) -> QueueAddress:
        """The address of a queue, by its name in the engine."""
        name, _, scope = internal.partition("@")
        region, _, account = scope.rpartition(".")
        if not scope or not is_account(account):
            return QueueAddress(self.default, name)
        return QueueAddress(Owner(account, region), name)

    def arn(self, internal: str) -> str:
        """The ARN of a queue, by its name in the engine."""
        (account, region), name = self.address(internal)
        return f"arn:{partition(region)}:sqs:{region}:{account}:{name}"


def partition(region: str) -> str:
    """The partition of AWS that a region belongs to."""
    return next((name for prefix, name in _PARTITIONS if region.startswith(prefix)), "aws")


def is_account(text: str) -> bool:
    """Whether this is an account number: twelve digits."""
    return _ACCOUNT.fullmatch(text) is not None


def is_region(text: str) -> bool:
    """Whether this could be a region's name."""
    return _REGION.fullmatch(text) is not None


def is_standard_name(name: str) -> bool:
    """Whether a standard queue may have this name."""
    return _NAME.fullmatch(name) is not None


def is_fifo_name(name: str) -> bool:
    """Whether a FIFO queue may have this name."""
    return _FIFO_NAME.fullmatch(name) is not None


def read_path(path: str) -> tuple[str | None, str] | None:
    """The account and the queue that a URL's path names, or None if it names none.

    `/queue/NAME`, as other local endpoints have it, is a queue of the caller's own account.
    """
    parts = path.rsplit("/", 2)
    if len(parts) < 3 or not (is_account(parts[-2]) or parts[-2] == "queue"):
        return None
    name = parts[-1]
    if not (is_standard_name(name) or is_fifo_name(name)):
        return None
    return None if parts[-2] == "queue" else parts[-2], name


def read_url(url: str) -> tuple[str | None, str] | None:
    """The account and the queue that a queue URL names, or None if it names none.

    A name alone is a queue of the caller's own account; Amazon accepts a host without a path, too.
    """
    if len(url) > _URL_CHARS_MAX:
        # `urlsplit` keeps the last URLs that it was given, whatever their size.
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    name = parts.netloc if parts.netloc and not parts.path else url
    if is_standard_name(name) or is_fifo_name(name):
        return None, name
    return read_path(parts.path)


def read_arn(arn: object) -> QueueAddress | None:
    """The queue that an ARN names, or None if it is not the ARN of a queue."""
    if not isinstance(arn, str):
        return None
    parts = arn.split(":", _ARN_PARTS)
    if len(parts) != _ARN_PARTS or (parts[0], parts[2]) != ("arn", "sqs"):
        return None
    region, account, name = parts[3:]
    if not (is_region(region) and is_account(account)):
        return None
    if not (is_standard_name(name) or is_fifo_name(name)):
        return None
    return QueueAddress(Owner(account, region), name)
