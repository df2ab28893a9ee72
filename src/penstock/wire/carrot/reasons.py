"""Why a Carrot broker refuses a request: a word for programs, and a text for people.

A reason is `WORD: text`, as in `FULL: queue: 'orders' is full with 100 messages …`. The words are
part of the protocol; the texts are not. The client raises the error that the word stands for.
"""

from typing import Final

from penstock.errors import (
    InFlightLimit,
    InvalidField,
    JournalError,
    MessageGone,
    MessageTooLarge,
    Overloaded,
    PenstockError,
    ProtocolError,
    QueueDeleted,
    QueueFull,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    StoreFull,
    UnavailableError,
)

REASON_BYTES_MAX: Final = 1_000

EMPTY: Final = "EMPTY"
REMOVED: Final = "REMOVED"
TIMEOUT: Final = "TIMEOUT"
STOPPING: Final = "STOPPING"
DENIED: Final = "DENIED"

# The first class of which an error is an instance determines its word.
_WORD_OF: Final[tuple[tuple[type[PenstockError], str], ...]] = (
    (QueueDeleted, REMOVED),
    (QueueNotFound, "NOT_FOUND"),
    (QueueFull, "FULL"),
    (StoreFull, "FULL"),
    (MessageTooLarge, "TOO_LARGE"),
    (MessageGone, REMOVED),
    (StaleReceipt, TIMEOUT),
    (InFlightLimit, "BUSY"),
    (Overloaded, "BUSY"),
    (ProtocolError, "PROTOCOL"),
    (RequestError, "INVALID"),
    (JournalError, "FAILED"),
    (UnavailableError, "UNAVAILABLE"),
    (PenstockError, "FAILED"),
)
# A word that this release does not know becomes a RequestError.
_ERROR_OF: Final[dict[str, type[PenstockError]]] = {
    REMOVED: QueueDeleted,
    "NOT_FOUND": QueueNotFound,
    "FULL": QueueFull,
    "TOO_LARGE": MessageTooLarge,
    TIMEOUT: StaleReceipt,
    "BUSY": Overloaded,
    "PROTOCOL": ProtocolError,
    "INVALID": InvalidField,
    "FAILED": JournalError,
    "UNAVAILABLE": UnavailableError,
    STOPPING: UnavailableError,
    DENIED: ProtocolError,
}


def make_reason(word: str, text: str) -> bytes:
    """The bytes of a reason: UTF-8 without NUL, at most REASON_BYTES_MAX of them."""
    shown = f"{word}: {' '.join(text.replace(chr(0), ' ').split())}"
    reason = shown.encode(errors="replace")[:REASON_BYTES_MAX]
    # A character that was cut in two is left out.
    return reason.decode(errors="ignore").encode()


def reason_of(error: PenstockError) -> bytes:
    """The reason for the error by which a request was refused."""
    word = next(word for kind, word in _WORD_OF if isinstance(error, kind))
    return make_reason(word, str(error))


def read_reason(reason: bytes) -> tuple[str, str]:
    """The word and the text of a reason."""
    word, colon, text = reason.decode(errors="replace").partition(": ")
    return (word, text) if colon else ("", word)


def error_of(reason: bytes) -> PenstockError:
    """The error that a client raises for a reason."""
    word, text = read_reason(reason)
    return _ERROR_OF.get(word, RequestError)(text or "the broker gave no reason")
