"""Signatures made by botocore are accepted; with any change they are refused."""

from datetime import UTC, datetime

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from penstock.wire.sqs.sigv4 import BadSignature, Signed, Verifier, is_signed

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
BODY = b'{"QueueName": "orders"}'
VERIFIER = Verifier({"AKIDEXAMPLE": SECRET, "other": "another-secret"})


def now_s():
    return datetime.now(UTC).timestamp()


def by_header(
    body=BODY, key="AKIDEXAMPLE", secret=SECRET, region="us-east-1", service="sqs", query=""
):
    """A POST that botocore has signed in its headers."""
    url = "http://127.0.0.1:9324/" + (f"?{query}" if query else "")
    headers = {"Host": "127.0.0.1:9324", "X-Amz-Target": "AmazonSQS.CreateQueue"}
    request = AWSRequest("POST", url, headers=headers, data=body)
    SigV4Auth(Credentials(key, secret), service, region).add_auth(request)
    lowered = {name.lower(): value for name, value in request.headers.items()}
    return Signed("POST", "/", query, lowered, body)


def by_query(expires=60, path="/000000000000/orders", more=""):
    """A GET that botocore has presigned."""
    url = f"http://127.0.0.1:9324{path}?Action=SendMessage&MessageBody=a%20b%2Bc{more}"
    request = AWSRequest("GET", url, headers={"Host": "127.0.0.1:9324"})
    credentials = Credentials("AKIDEXAMPLE", SECRET)
    SigV4QueryAuth(credentials, "sqs", "us-east-1", expires=expires).add_auth(request)
    query = request.url.split("?", 1)[1]
    return Signed("GET", path, query, {"host": "127.0.0.1:9324"}, b"")


def with_header(request, name, value):
    return request._replace(headers={**request.headers, name: value})


def test_botocores_signatures_are_accepted():
    assert VERIFIER.verify(by_header(), now_s()) == ("AKIDEXAMPLE", "us-east-1")
    assert VERIFIER.verify(by_header(region="eu-west-1"), now_s()) == ("AKIDEXAMPLE", "eu-west-1")
    assert VERIFIER.verify(by_header(body=b""), now_s())[0] == "AKIDEXAMPLE"
    assert VERIFIER.verify(by_query(), now_s()) == ("AKIDEXAMPLE", "us-east-1")
    assert VERIFIER.verify(by_header(query="a=1&b=%20"), now_s())[0] == "AKIDEXAMPLE"


def test_a_token_in_a_signed_header_is_under_the_signature():
    request = AWSRequest(
        "POST", "http://127.0.0.1:9324/", headers={"Host": "127.0.0.1:9324"}, data=BODY
    )
    SigV4Auth(Credentials("AKIDEXAMPLE", SECRET, "token"), "sqs", "us-east-1").add_auth(request)
    lowered = {name.lower(): value for name, value in request.headers.items()}
    signed = Signed("POST", "/", "", lowered, BODY)
    assert VERIFIER.verify(signed, now_s())[0] == "AKIDEXAMPLE"
    with pytest.raises(BadSignature):
        VERIFIER.verify(with_header(signed, "x-amz-security-token", "other"), now_s())


HEADER_TAMPERINGS = {
    "swapped payload": lambda r: r._replace(body=b'{"QueueName": "others"}'),
    "empty payload": lambda r: r._replace(body=b""),
    "other method": lambda r: r._replace(method="PUT"),
    "other path": lambda r: r._replace(path="/000000000000/x"),
    "added query": lambda r: r._replace(query="Action=DeleteQueue"),
    "other host": lambda r: with_header(r, "host", "evil.example"),
    "other target": lambda r: with_header(r, "x-amz-target", "AmazonSQS.DeleteQueue"),
    "unsigned amz header": lambda r: with_header(r, "x-amz-extra", "1"),
    "wrong payload hash": lambda r: with_header(r, "x-amz-content-sha256", "0" * 64),
    "unsigned payload": lambda r: with_header(r, "x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
    "other date": lambda r: with_header(r, "x-amz-date", "20260101T000000Z"),
    "date that is none": lambda r: with_header(r, "x-amz-date", "99999999T999999Z"),
    "no date": lambda r: r._replace(
        headers={n: v for n, v in r.headers.items() if n != "x-amz-date"}
    ),
    "dotted path": lambda r: r._replace(path="/./"),
    "doubled slash": lambda r: r._replace(path="//"),
    "both ways": lambda r: r._replace(query=by_query().query),
}


@pytest.mark.parametrize("tampering", HEADER_TAMPERINGS)
def test_a_changed_request_is_refused(tampering):
    with pytest.raises(BadSignature):
        VERIFIER.verify(HEADER_TAMPERINGS[tampering](by_header()), now_s())


def authorization(change):
    request = by_header()
    return with_header(request, "authorization", change(request.headers["authorization"]))


AUTHORIZATION_TAMPERINGS = {
    "no signature": lambda a: a.split(", Signature")[0],
    "short signature": lambda a: a[:-1],
    "long signature": lambda a: a + "0",
    "upper case": lambda a: a[:-64] + a[-64:].upper(),
    "other algorithm": lambda a: a.replace("SHA256", "SHA1"),
    "none algorithm": lambda a: a.replace("AWS4-HMAC-SHA256", "none"),
    "other service": lambda a: a.replace("/sqs/", "/s3/"),
    "other region": lambda a: a.replace("/us-east-1/", "/eu-west-1/"),
    "other day": lambda a: a.replace("Credential=AKIDEXAMPLE/20", "Credential=AKIDEXAMPLE/19"),
    "other terminator": lambda a: a.replace("aws4_request", "aws4_requesu"),
    "other key": lambda a: a.replace("AKIDEXAMPLE", "other"),
    "unknown key": lambda a: a.replace("AKIDEXAMPLE", "unknown"),
    "empty key": lambda a: a.replace("AKIDEXAMPLE", ""),
    "unsigned host": lambda a: a.replace("SignedHeaders=host;", "SignedHeaders="),
    "unsigned date": lambda a: a.replace("x-amz-date;", ""),
    "doubled header": lambda a: a.replace("host;", "host;host;"),
    "unsorted headers": lambda a: a.replace("host;x-amz-date", "x-amz-date;host"),
    "absent header": lambda a: a.replace("host;", "accept;host;"),
    "no headers": lambda a: a.split("SignedHeaders=")[0] + "SignedHeaders=, " + a[-74:],
    "trailing text": lambda a: a + ", more",
    "empty": lambda a: "",
    "basic": lambda a: "Basic AAAA",
}


@pytest.mark.parametrize("tampering", AUTHORIZATION_TAMPERINGS)
def test_a_changed_authorization_is_refused(tampering):
    with pytest.raises(BadSignature):
        VERIFIER.verify(authorization(AUTHORIZATION_TAMPERINGS[tampering]), now_s())


def test_every_flipped_digit_of_a_signature_is_noticed():
    for at in range(64):

        def flip(text, at=at):
            digit = text[-64 + at]
            return f"{text[: -64 + at]}{'0' if digit != '0' else '1'}{text[len(text) - 63 + at :]}"

        with pytest.raises(BadSignature):
            VERIFIER.verify(authorization(flip), now_s())


def test_every_cut_of_an_authorization_is_noticed():
    length = len(by_header().headers["authorization"])
    for at in range(0, length, 3):
        with pytest.raises(BadSignature):
            VERIFIER.verify(authorization(lambda a, at=at: a[:at]), now_s())


def test_a_wrong_secret_a_wrong_service_and_an_unknown_key_give_the_same_error():
    for request in (
        by_header(secret="wrong"),
        by_header(service="s3"),
        by_header(key="unknown"),
        by_header(key="unknown", secret=""),
    ):
        with pytest.raises(BadSignature) as caught:
            VERIFIER.verify(request, now_s())
        assert str(caught.value) == ""


@pytest.mark.parametrize(
    ("age_s", "good"), [(-901, False), (-890, True), (890, True), (905, False)]
)
def test_a_signature_is_valid_for_fifteen_minutes_before_and_after(age_s, good):
    request = by_header()
    if good:
        assert VERIFIER.verify(request, now_s() + age_s)
    else:
        with pytest.raises(BadSignature):
            VERIFIER.verify(request, now_s() + age_s)


def test_a_presigned_request_is_valid_until_it_expires():
    request = by_query(expires=3_600)
    assert VERIFIER.verify(request, now_s() + 3_500)
    for age_s in (3_605, -905):
        with pytest.raises(BadSignature):
            VERIFIER.verify(request, now_s() + age_s)
    for expires in (0, 604_801, 9_999_999):
        with pytest.raises(BadSignature):
            VERIFIER.verify(by_query(expires=expires), now_s())


QUERY_TAMPERINGS = {
    "other action": lambda q: q.replace("SendMessage", "PurgeQueue"),
    "other body": lambda q: q.replace("a%20b", "a%20c"),
    "added parameter": lambda q: q + "&DelaySeconds=900",
    "a plus for a space": lambda q: q.replace("%20", "+"),
    "a plus as it is": lambda q: q.replace("%2B", "+"),
    "twice the action": lambda q: "Action=PurgeQueue&" + q,
    "twice the signature": lambda q: q + "&X-Amz-Signature=" + "0" * 64,
    "longer life": lambda q: q.replace("X-Amz-Expires=60", "X-Amz-Expires=600"),
    "no life": lambda q: q.replace("X-Amz-Expires=60", "X-Amz-Expires="),
    "endless life": lambda q: q.replace("X-Amz-Expires=60", "X-Amz-Expires=-1"),
    "no algorithm": lambda q: q.replace("X-Amz-Algorithm=AWS4-HMAC-SHA256&", ""),
    "unsigned host": lambda q: q.replace("X-Amz-SignedHeaders=host", "X-Amz-SignedHeaders="),
    "broken text": lambda q: q + "&x=%ff",
    "no signature": lambda q: q.split("&X-Amz-Signature")[0],
    "odd signature": lambda q: q[:-1] + "Z",
}


@pytest.mark.parametrize("tampering", QUERY_TAMPERINGS)
def test_a_changed_presigned_request_is_refused(tampering):
    request = by_query()
    with pytest.raises(BadSignature):
        VERIFIER.verify(request._replace(query=QUERY_TAMPERINGS[tampering](request.query)), now_s())


def test_the_order_of_a_presigned_query_does_not_matter():
    request = by_query()
    turned = "&".join(reversed(request.query.split("&")))
    assert VERIFIER.verify(request._replace(query=turned), now_s())


def test_a_presigned_request_is_for_its_host_and_its_empty_body():
    request = by_query()
    for changed in (
        request._replace(body=b"Action=PurgeQueue"),
        with_header(request, "host", "evil.example"),
        with_header(request, "x-amz-target", "AmazonSQS.PurgeQueue"),
        request._replace(headers={}),
    ):
        with pytest.raises(BadSignature):
            VERIFIER.verify(changed, now_s())


def test_a_request_that_claims_to_be_signed_is_recognised():
    assert is_signed(by_header())
    assert is_signed(by_query())
    assert not is_signed(Signed("POST", "/", "", {"authorization": "AWS AKID:abc"}, b""))
    assert not is_signed(Signed("GET", "/", "Action=ListQueues", {}, b""))
