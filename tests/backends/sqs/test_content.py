"""Content that SQS cannot store is encoded; other content stays readable for every client."""

import re
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.sqs.content import BODY, MORE, decode, encode, size_of
from penstock.errors import MessageTooLarge
from penstock.service import Attributes, Push

# The characters that Amazon SQS accepts.
LEGAL = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.one_of(
    st.sampled_from(["kind", "a.b", "a..b", ".a", "a.", "AWS.x", "amazon.x", BODY, MORE, "größe"]),
    texts.filter(bool),
)
attributes = st.dictionaries(names, st.one_of(texts, st.binary(max_size=12)), max_size=14)
bodies = st.one_of(st.binary(max_size=40), texts.map(str.encode))
contexts = st.one_of(st.none(), st.dictionaries(names, texts, min_size=1, max_size=2))


def received(sent):
    """The message as SQS returns it."""
    return {
        "MessageId": "id",
        "ReceiptHandle": "receipt",
        "Body": sent["MessageBody"],
        "MessageAttributes": sent.get("MessageAttributes", {}),
        "Attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": "5"},
    }


@given(bodies, attributes, contexts)
def test_every_message_is_pulled_as_it_was_pushed(body, given_attributes, context):
    sent = encode(Push("q", body, attributes=given_attributes, context=context))
    claim = decode("q", received(sent), None, 0)
    assert (claim.body, claim.attributes, claim.context) == (body, given_attributes, context)


@given(bodies, attributes, contexts)
def test_every_encoded_message_is_within_amazons_limits(body, given_attributes, context):
    sent = encode(Push("q", body, attributes=given_attributes, context=context))
    assert LEGAL.fullmatch(sent["MessageBody"])
    shown = sent.get("MessageAttributes", {})
    assert len(shown) <= 10
    for name, value in shown.items():
        assert NAME.fullmatch(name)
        assert not name.lower().startswith(("aws.", "amazon."))
        assert all(name.split("."))
        assert value.get("BinaryValue") or LEGAL.fullmatch(value["StringValue"])


def test_plain_text_and_plain_attributes_are_sent_unchanged():
    sent = encode(Push("q", "水門".encode(), attributes={"kind": "test", "raw": b"\x00"}))
    assert sent == {
        "MessageBody": "水門",
        "MessageAttributes": {
            "kind": {"DataType": "String", "StringValue": "test"},
            "raw": {"DataType": "Binary", "BinaryValue": b"\x00"},
        },
    }


def test_bytes_that_are_not_text_are_sent_as_base64_with_a_mark():
    sent = encode(Push("q", b"\xff\x00"))
    assert sent["MessageBody"] == b64encode(b"\xff\x00").decode()
    assert sent["MessageAttributes"] == {BODY: {"DataType": "String", "StringValue": "base64"}}


def test_as_many_attributes_as_fit_are_sent_unchanged():
    many: Attributes = {f"a{number}": "x" for number in range(12)}
    shown = encode(Push("q", b"x", attributes=many))["MessageAttributes"]
    assert list(shown) == [*(f"a{number}" for number in range(9)), MORE]
    assert len(encode(Push("q", b"x", attributes=dict(list(many.items())[:10])))) == 2


def test_a_message_over_amazons_limit_is_refused_before_it_is_sent():
    encode(Push("q", b"x" * 1_048_576))
    with pytest.raises(MessageTooLarge, match=r"body: 1048577 bytes .* at most 1048576"):
        encode(Push("q", b"x" * 1_048_577))
    with pytest.raises(MessageTooLarge, match="as base64 of 800000;"):
        encode(Push("q", b"\xff" * 800_000))


def test_the_size_of_a_message_is_counted_as_amazon_counts_it():
    sent = encode(Push("q", "ü".encode(), attributes={"four": "fünf"}))
    assert size_of(sent) == 2 + len("four") + len("String") + 5


@pytest.mark.parametrize("mark", ["base64", "zip", ""])
def test_a_mark_of_another_program_leaves_the_body_unchanged(mark):
    message = received({"MessageBody": "not base64!"})
    message["MessageAttributes"] = {BODY: {"DataType": "String", "StringValue": mark}}
    assert decode("q", message, None, 0).body == b"not base64!"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"text": {"a": 1}}', "[" * 5_000])
def test_a_damaged_penstock_more_attribute_loses_only_its_own_content(text):
    message = received({"MessageBody": "x"})
    message["MessageAttributes"] = {
        MORE: {"DataType": "String", "StringValue": text},
        "kind": {"DataType": "String", "StringValue": "test"},
    }
    assert decode("q", message, None, 0).attributes == {"kind": "test"}


def test_a_message_of_another_program_has_its_types_in_the_context():
    message = {
        "MessageId": "id",
        "ReceiptHandle": "receipt",
        "Body": "x",
        "MessageAttributes": {
            "count": {"DataType": "Number", "StringValue": "7"},
            "shot": {"DataType": "Binary.png", "BinaryValue": b"\x89"},
        },
    }
    claim = decode("q", message, None, 9)
    assert claim.attributes == {"count": "7", "shot": b"\x89"}
    assert claim.context == {"type:count": "Number", "type:shot": "Binary.png"}
    assert (claim.receives, claim.sequence, claim.group, claim.deadline_ms) == (1, 0, None, 9)
