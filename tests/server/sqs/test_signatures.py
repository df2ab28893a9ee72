"""Row 23 of the scorecard: 300 requests with nearly correct signatures are all refused."""

import hmac
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.client import HTTPConnection
from urllib.parse import quote

import pytest

from tests.server.sqs.conftest import Local

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
OTHER_KEY, OTHER_SECRET = "AKIDOTHER", "another-secret"
CASES = 300
TEXTS = ("The request signature we calculated does not match", "did not use SigV4 for signing")
CREATE = b'{"QueueName": "made"}'


class Signing:
    """A request and how it is signed: every field can be changed before or after signing.

    The steps are written from the specification and share no code with the server.
    """

    def __init__(self, host, presigned):
        self.host = self.signed_host = host
        self.presigned = presigned
        self.method, self.path = ("GET", "/") if presigned else ("POST", "/")
        self.body = b"" if presigned else CREATE
        self.headers = {} if presigned else {"x-amz-target": "AmazonSQS.CreateQueue"}
        self.query = {"Action": "CreateQueue", "QueueName": "made"} if presigned else {}
        self.key, self.secret = KEY, SECRET
        self.region, self.service, self.end = "us-east-1", "sqs", "aws4_request"
        self.algorithm = "AWS4-HMAC-SHA256"
        self.at = datetime.now(UTC)
        self.scope_at = None
        self.expires = "60"
        self.unsigned = set()
        self.claimed_names = None
        self.signed_body = None
        self.after = []

    def send(self, connection):
        """Signs it, makes the changes of `after`, and sends it; returns status and body."""
        date = self.at.strftime("%Y%m%dT%H%M%SZ")
        day = (self.scope_at or self.at).strftime("%Y%m%d")
        scope = f"{day}/{self.region}/{self.service}/{self.end}"
        self.headers["host"] = self.signed_host
        if not self.presigned:
            self.headers["x-amz-date"] = date
        names = sorted(set(self.headers) - self.unsigned)
        listed = ";".join(names) if self.claimed_names is None else self.claimed_names
        if self.presigned:
            self.query |= {
                "X-Amz-Algorithm": self.algorithm,
                "X-Amz-Credential": f"{self.key}/{scope}",
                "X-Amz-Date": date,
                "X-Amz-Expires": self.expires,
                "X-Amz-SignedHeaders": listed,
            }
        body = self.body if self.signed_body is None else self.signed_body
        canonical = "\n".join(
            [
                self.method,
                self.path,
                "&".join(f"{quoted(n)}={quoted(v)}" for n, v in sorted(self.query.items())),
                *(f"{name}:{self.headers[name]}" for name in names),
                "",
                listed,
                sha256(body).hexdigest(),
            ]
        )
        hashed = sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret}".encode()
        for part in (day, self.region, self.service, self.end):
            key = hmac.new(key, part.encode(), sha256).digest()
        to_sign = f"{self.algorithm}\n{date}\n{scope}\n{hashed}"
        self.signature = hmac.new(key, to_sign.encode(), sha256).hexdigest()
        if self.presigned:
            self.query["X-Amz-Signature"] = self.signature
        else:
            self.headers["authorization"] = (
                f"{self.algorithm} Credential={self.key}/{scope}, SignedHeaders={listed}, "
                f"Signature={self.signature}"
            )
        self.text = "&".join(f"{quoted(n)}={quoted(v)}" for n, v in self.query.items())
        self.headers["host"] = self.host
        for change in self.after:
            change(self)
        target = self.path + (f"?{self.text}" if self.text else "")
        connection.putrequest(self.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        if self.body:
            connection.putheader("content-length", str(len(self.body)))
        connection.endheaders(self.body or None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def quoted(text):
    return quote(text, safe="-_.~")


def setting(**fields):
    """A case whose request is signed with these values."""

    def change(signing):
        for name, value in fields.items():
            setattr(signing, name, value)

    return change


def later(change):
    """A case whose request is changed after it is signed."""
    return lambda signing: signing.after.append(change)


def header(name, value):
    return later(lambda signing: signing.headers.__setitem__(name, value))


def without_header(name):
    return later(lambda signing: signing.headers.pop(name))


def authorization(change):
    def apply(signing):
        signing.headers["authorization"] = change(signing.headers["authorization"])

    return later(apply)


def text(change):
    """A change to the query of a presigned request after it is signed."""
    return later(lambda signing: setattr(signing, "text", change(signing.text)))


def replaced(old, new):
    def change(given):
        assert old in given
        return given.replace(old, new)

    return change


def swapped_beside_its_hash(body):
    def change(signing):
        signing.headers["x-amz-content-sha256"] = sha256(signing.body).hexdigest()
        signing.after.append(setting(body=body))

    return change


def moment(**delta):
    return lambda signing: setattr(signing, "at", signing.at + timedelta(**delta))


def scoped(**delta):
    return lambda signing: setattr(signing, "scope_at", signing.at + timedelta(**delta))


def flipped(signature, at):
    return f"{signature[:at]}{(int(signature[at], 16) ^ 1):x}{signature[at + 1 :]}"


def either_form():
    """Cases for a signature in a header and for one in a URL."""
    for minutes in (-16, -60, -24 * 60, -366 * 24 * 60, 16, 60, 24 * 60, 366 * 24 * 60):
        yield f"{minutes} minutes off", moment(minutes=minutes)
    for days in (-1, 1, -7, 365):
        yield f"scope {days} days off", scoped(days=days)
    for service in ("s3", "sns", "SQS", "sqs2", "execute-api", "iam"):
        yield f"scope of {service}", setting(service=service)
    for end in ("aws4_reques", "aws4_request2", "AWS4_REQUEST", "aws5_request", ""):
        yield f"scope ending in {end!r}", setting(end=end)
    for region in ("", "us east 1", "us-east-1/sqs", "US-EAST-1", "x" * 41):
        yield f"region {region!r}", setting(region=region)
    for secret in ("", "wrong", SECRET[:-1], f"{SECRET} ", SECRET.lower(), OTHER_SECRET):
        yield f"secret {secret!r}", setting(secret=secret)
    for key in ("", "UNKNOWN", KEY.lower(), f"{KEY}x", KEY[:-1], OTHER_KEY, "../" + KEY):
        yield f"key {key!r}", setting(key=key)
    yield "unknown key, empty secret", setting(key="UNKNOWN", secret="")
    for algorithm in ("AWS4-HMAC-SHA1", "AWS4-HMAC-SHA512", "AWS3-HTTPS", "none"):
        yield f"algorithm {algorithm}", setting(algorithm=algorithm)
    for host in ("evil.example", "localhost", "127.0.0.1", ""):
        yield f"signed for {host!r}", setting(signed_host=host)
        yield f"sent to {host!r}", header("host", host or "x")
    for name in ("x-amz-target", "x-amz-security-token", "x-amz-extra", "x-amz-meta-a"):
        yield f"{name} beside the signature", header(name, "AmazonSQS.PurgeQueue")
    for path in ("/000000000000/made", "//", "/./", "/../", "/a/..", "/%2e"):
        yield f"other path {path}", later(lambda s, path=path: setattr(s, "path", path))
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS"):
        yield f"method {method}", later(lambda s, method=method: setattr(s, "method", method))
    for body in (b"{}", b'{"QueueName": "others"}', CREATE + b" ", b"\0"):
        yield f"payload {body!r}", later(lambda s, body=body: setattr(s, "body", body))
        yield f"signed payload {body!r}", setting(signed_body=body)
    yield "host left unsigned", lambda s: s.unsigned.add("host")
    for names in ("", "host;", ";host", "HOST", "host;host", "host;absent", "absent", "host,date"):
        yield f"names {names!r}", setting(claimed_names=names)


def header_form():
    """Cases for an Authorization header and the headers that belong to it."""
    yield from either_form()
    for at in range(0, 64, 4):
        yield f"digit {at} flipped", authorization(lambda a, at=at: a[:-64] + flipped(a[-64:], at))
    for cut in (1, 2, 32, 63, 64, 65, 75, 76, 100, 120, 140, 160, 180):
        yield f"{cut} cut off", authorization(lambda a, cut=cut: a[:-cut])
    for cut in (1, 5, 16, 17, 20, 28, 29):
        yield f"{cut} cut off in front", authorization(lambda a, cut=cut: a[cut:])
    yield "upper case", authorization(lambda a: a[:-64] + a[-64:].upper())
    for more in (" ", "0", ",", ", more", "\tx", ", Signature=" + "0" * 64):
        yield f"followed by {more!r}", authorization(lambda a, more=more: a + "x" + more)
    for part in ("Credential=", "SignedHeaders=", "Signature="):
        yield f"no {part}", authorization(replaced(part, ""))
        yield f"{part} in lower case", authorization(replaced(part, part.lower()))
        yield f"{part} empty", authorization(replaced(part, part + ","))
    for word in ("Basic AAAA", "Bearer x", "AWS AKID:x", "AWS4-HMAC-SHA256", "AWS4-HMAC-SHA256 "):
        yield f"authorization {word!r}", authorization(lambda a, word=word: word)
    for name in ("x-amz-date", "host", "x-amz-target"):
        yield (
            f"{name} not named",
            authorization(lambda a, name=name: a.replace(f"{name};", "").replace(f";{name}", "")),
        )
    for name in ("x-amz-date", "x-amz-target"):
        yield f"{name} left unsigned", lambda s, name=name: s.unsigned.add(name)
    yield "names unsorted", authorization(replaced("host;x-amz-date", "x-amz-date;host"))
    yield "names unsorted and signed", setting(claimed_names="x-amz-target;x-amz-date;host")
    yield "no date", without_header("x-amz-date")
    yield "a Date instead", later(lambda s: s.headers.update(date=s.headers.pop("x-amz-date")))
    for date in ("20260101", "20260101T000000", "2026-01-01T00:00:00Z", "99999999T999999Z", "now"):
        yield f"date {date}", header("x-amz-date", date)
    for digest in ("UNSIGNED-PAYLOAD", "0" * 64, "", sha256(b"").hexdigest()):
        yield f"payload hash {digest[:20]!r}", header("x-amz-content-sha256", digest)
        yield (
            f"signed payload hash {digest[:20]!r}",
            (lambda s, digest=digest: s.headers.update({"x-amz-content-sha256": digest})),
        )
    for body in (b"{}", b'{"QueueName": "others"}'):
        yield f"payload {body!r} beside the signed hash of another", swapped_beside_its_hash(body)
    yield "other target", header("x-amz-target", "AmazonSQS.PurgeQueue")
    for query in ("Action=DeleteQueue", "a", "a=%zz", "a=b+c", "a=1&a=2", "X-Amz-Signature=0"):
        yield f"query {query}", text(lambda t, query=query: query)


def query_form():
    """Cases for a presigned URL."""
    yield from either_form()
    for at in range(0, 64, 4):
        yield f"digit {at} flipped", text(lambda t, at=at: t[:-64] + flipped(t[-64:], at))
    for cut in (1, 2, 32, 63, 64):
        yield f"{cut} cut off", text(lambda t, cut=cut: t[:-cut])
    yield "upper case", text(lambda t: t[:-64] + t[-64:].upper())
    yield "doubled signature", text(lambda t: t + "&X-Amz-Signature=" + t[-64:])
    yield "two signatures", text(lambda t: f"X-Amz-Signature={'0' * 64}&{t}")
    yield "renamed action", text(replaced("Action=CreateQueue", "Action=PurgeQueue"))
    yield "renamed queue", text(replaced("QueueName=made", "QueueName=other"))
    for more in ("a=b", "Attribute.1.Name=DelaySeconds", "Action=ListQueues", "a", "a=+", "x=%ff"):
        yield f"added {more}", text(lambda t, more=more: f"{t}&{more}")
        yield f"{more} in front", text(lambda t, more=more: f"{more}&{t}")
    for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders"):
        yield f"no {name}", text(lambda t, name=name: dropped(t, f"X-Amz-{name}"))
        yield f"{name} in lower case", text(replaced(f"X-Amz-{name}", f"x-amz-{name.lower()}"))
        yield f"{name} twice", text(lambda t, name=name: f"X-Amz-{name}=1&{t}")
    for expires in ("0", "-1", "604801", "", "1e3", "60.0", "٦٠", "9" * 30, "0x10"):
        yield f"signed to expire in {expires!r}", setting(expires=expires)
        yield (
            f"changed to expire in {expires!r}",
            text(replaced("X-Amz-Expires=60", f"X-Amz-Expires={quoted(expires)}")),
        )
    yield "expired", lambda s: (setting(expires="30")(s), moment(seconds=-40)(s))
    yield "a header as well", header("authorization", f"AWS4-HMAC-SHA256 Credential={KEY}")
    yield (
        "a plus for a space",
        lambda s: (
            s.query.update(QueueName="a b"),
            text(replaced("a%20b", "a+b"))(s),
        ),
    )
    yield "signed with a target beside it", header("x-amz-target", "AmazonSQS.CreateQueue")


def dropped(given, name):
    return "&".join(part for part in given.split("&") if not part.startswith(f"{name}="))


@pytest.fixture(scope="module")
def guarded(query_data):
    server = Local(query_data, keys={KEY: SECRET, OTHER_KEY: OTHER_SECRET})
    yield server
    server.close()


@contextmanager
def connected(server):
    host = server.url.removeprefix("http://")
    with closing(HTTPConnection(host, timeout=60)) as connection:
        yield connection, host


def queues(server):
    return server.call(lambda: [*server.running.engine.shard.names])


@pytest.mark.parametrize("presigned", [False, True])
def test_these_signatures_are_valid_until_the_request_is_changed(guarded, presigned):
    with connected(guarded) as (connection, host):
        signing = Signing(host, presigned)
        signing.body = signing.body.replace(b"made", b"control")
        signing.query |= {"QueueName": "control-2"} if presigned else {}
        assert signing.send(connection)[0] == 200
    assert ("control-2" if presigned else "control") in queues(guarded)


def test_300_requests_with_nearly_correct_signatures_are_refused(guarded, record_property):
    before = queues(guarded)
    responses = {}
    forms = {"header": (header_form(), False), "presigned": (query_form(), True)}
    for form, (cases, presigned) in forms.items():
        for name, change in cases:
            with connected(guarded) as (connection, host):
                signing = Signing(host, presigned)
                change(signing)
                assert f"{form}, {name}" not in responses
                responses[f"{form}, {name}"] = signing.send(connection)
    assert {name: response for name, response in responses.items() if response[0] != 403} == {}
    record_property("figure", f"0 of {len(responses)} accepted")
    assert len(responses) >= CASES
    assert queues(guarded) == before
    # The answers do not say what was wrong; the answer to a HEAD has no text.
    others = [
        text for _, text in responses.values() if text and not any(words in text for words in TEXTS)
    ]
    assert others == []


def test_a_connection_whose_sender_is_known_has_every_signature_checked(guarded):
    before = queues(guarded)
    cases = [*header_form()]
    for name, change in cases:
        with connected(guarded) as (connection, host):
            known = Signing(host, presigned=False)
            known.body = b'{"QueueNamePrefix": "none"}'
            known.headers["x-amz-target"] = "AmazonSQS.ListQueues"
            assert known.send(connection)[0] == 200
            signing = Signing(host, presigned=False)
            change(signing)
            assert signing.send(connection)[0] == 403, name
    assert len(cases) > 100
    assert queues(guarded) == before
