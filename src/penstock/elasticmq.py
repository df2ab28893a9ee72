"""Reads a configuration file of ElasticMQ as settings of `penstock serve`.

The file is HOCON, of which this is the part that ElasticMQ's documentation uses:

    name { … }              an object; two of one name are merged
    name = value            or with a colon; a later value replaces an earlier one
    a.b.c = value           the same as a { b { c = value } }
    "a.b" = "value"         quoted as in JSON
    # comment, // comment   to the end of the line

Lists, substitutions (`${…}`), `+=` and texts in three quotes are refused with their line, and so is
every setting of which Penstock has none: an ignored line would be a server that behaves otherwise
than its file says. `include classpath("application.conf")`, with which most of these files begin,
is ElasticMQ's own default values and says nothing; any other include is refused.
"""

import json
import re
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, NoReturn

from penstock.errors import InvalidField

ENDING: Final = ".conf"
_DEPTH_MAX: Final = 20
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\ufeff]+)
    |(?P<comment>(?:\#|//)[^\n]*)
    |(?P<newline>\n)
    |(?P<triple>\"\"\")
    |(?P<quoted>"(?:[^"\\\n]|\\[^\n])*")
    |(?P<substitution>\$\{)
    |(?P<mark>\+=|[{}\[\]=:,])
    |(?P<plain>(?:[^\s"{}\[\]:=,\#$+`^?!@*&\\/]+|/(?!/))+)""",
    re.VERBOSE,
)
_INCLUDE: Final = re.compile(r'[ \t]*classpath\("application(\.conf)?"\)')
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)[ \t]*([A-Za-z]*)", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
# In seconds; a number without a unit is milliseconds.
_UNITS: Final = {
    **dict.fromkeys(("", "ms", "milli", "millis", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "second", "seconds"), 1),
    **dict.fromkeys(("m", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3_600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_TRUTHS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# As `penstock.wire.sqs.attributes.TAGS`, which this module is below.
_TAGS: Final = "Tags"


class _Scalar(NamedTuple):
    text: str
    line: int


class _Object(NamedTuple):
    fields: "dict[str, _Scalar | _Object]"
    line: int


class _Token(NamedTuple):
    kind: str
    text: str
    line: int
    end: int


def read_elasticmq(text: str, where: str) -> dict[str, Any]:
    """The settings that the file means. Raises InvalidField, which names the file and the line."""
    root = _Section(_Parser(text, where).root(), "", where)
    found: dict[str, Any] = {}
    queues = root.section("queues")
    if queues is not None:
        found["queues"] = _queues(queues)
    sqs = root.section("rest-sqs")
    if sqs is not None:
        sqs.only("enabled", "true", "Penstock always answers the SQS API")
        sqs.only("sqs-limits", "strict", "Penstock always has Amazon's limits")
        _put(found, host=sqs.text("bind-hostname"), port=sqs.number("bind-port"))
        sqs.end()
    aws = root.section("aws")
    if aws is not None:
        _put(found, region=aws.text("region"), account=aws.text("accountId"))
        aws.end()
    _read_without_effect(root)
    root.end()
    return found


def _read_without_effect(root: "_Section") -> None:
    """What needs nothing here, as docs/how-to/coming-from-elasticmq.md says; else it is refused."""
    address = root.section("node-address")
    if address is not None:
        # Queue URLs have the host that the client used.
        for name in ("protocol", "host", "port"):
            address.text(name)
        address.only("context-path", "", "queue URLs have no path before the account")
        address.end()
    root.text("generate-node-address")
    stats = root.section("rest-stats")
    if stats is not None:
        # The console is on the port of the API.
        for name in ("enabled", "bind-port", "bind-hostname"):
            stats.text(name)
        stats.end()
    storage = root.section("storage")
    if storage is not None:
        storage.only("type", "in-memory", "give --data or --store")
        storage.end()
    for name in ("queues-storage", "persisted-queues-storage", "messages-storage"):
        kept = root.section(name)
        if kept is not None:
            kept.only("enabled", "false", "messages and queues are kept where --data says")
            kept.skip()


def _put(found: dict[str, Any], **given: Any) -> None:
    found.update({name: value for name, value in given.items() if value is not None})


def _queues(section: "_Section") -> dict[str, dict[str, Any]]:
    """The settings of `Queues.create` for each queue."""
    names = {name: name for name in section.names()}
    given = {name: section.section(name) for name in names}
    fifo = {name for name, queue in given.items() if queue is not None and queue.flag("fifo")}
    for name in fifo:
        # As ElasticMQ, which adds the ending.
        names[name] = name if name.endswith(".fifo") else f"{name}.fifo"
    return {
        names[name]: {} if queue is None else _queue(queue, names) for name, queue in given.items()
    }


def _queue(section: "_Section", names: dict[str, str]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for name, why in (
        ("copyTo", "Penstock does not copy messages to another queue"),
        ("moveTo", "Penstock does not redirect a queue; send to the other one"),
    ):
        section.refuse(name, why)
    _put(
        words,
        visibility_timeout=section.duration_s("defaultVisibilityTimeout"),
        delay=section.duration_s("delay"),
        wait=section.duration_s("receiveMessageWait"),
        dedup_by_content=section.flag("contentBasedDeduplication"),
    )
    dead = section.section("deadLettersQueue")
    if dead is not None:
        target, count = dead.text("name"), dead.number("maxReceiveCount")
        if target is None or count is None:
            dead.fail("name and maxReceiveCount are both needed")
        words |= {"dead_letter": names.get(target, target), "max_receives": count}
        dead.end()
    tags = section.section("tags")
    if tags is not None:
        texts = {name: tags.text(name) for name in tags.names()}
        words["annotations"] = {_TAGS: json.dumps(texts)}
    section.end()
    return words


class _Section:
    """An object of the file whose fields are taken one by one; `end` refuses those left over."""

    def __init__(self, node: _Object, path: str, where: str) -> None:
        self._node = node
        self._left = dict(node.fields)
        self._known: list[str] = []
        self._path = path
        self._where = where

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._node.fields)

    def section(self, name: str) -> "_Section | None":
        """The object of this name, if there is one."""
        node = self._node_of(name)
        if isinstance(node, _Scalar):
            _fail(self._where, node.line, f"{self._path}{name}: expected {{ … }}")
        return None if node is None else _Section(node, f"{self._path}{name}.", self._where)

    def text(self, name: str) -> str | None:
        """The value of this name, if there is one."""
        node = self._node_of(name)
        if isinstance(node, _Object):
            _fail(self._where, node.line, f"{self._path}{name}: expected a value, got {{ … }}")
        return None if node is None else node.text

    def _node_of(self, name: str) -> _Scalar | _Object | None:
        self._known.append(name)
        self._left.pop(name, None)
        return self._node.fields.get(name)

    def number(self, name: str) -> int | None:
        """A whole number."""
        text = self.text(name)
        if text is not None and _NUMBER.fullmatch(text) is None:
            self._expected(name, text, "a whole number")
        return None if text is None else int(text)

    def flag(self, name: str) -> bool | None:
        """True or false."""
        text = self.text(name)
        if text is not None and text not in _TRUTHS:
            self._expected(name, text, "true or false")
        return None if text is None else _TRUTHS[text]

    def duration_s(self, name: str) -> float | None:
        """A duration, in seconds."""
        text = self.text(name)
        if text is None:
            return None
        found = _DURATION.fullmatch(text)
        if found is None or found[2] not in _UNITS:
            self._expected(name, text, "a duration, such as 10 seconds, 500 ms or 2 minutes")
        return float(found[1]) * _UNITS[found[2]]

    def only(self, name: str, value: str, why: str) -> None:
        """Refuses every value but this one."""
        text = self.text(name)
        if text is not None and text != value:
            self._expected(name, text, f"only {value!r} here, because {why}")

    def refuse(self, name: str, why: str) -> None:
        """Refuses the field if it is there."""
        if name in self._node.fields:
            line = self._node.fields[name].line
            _fail(self._where, line, f"{self._path}{name}: {why}; remove the line")

    def skip(self) -> None:
        """The other fields have no effect."""
        self._left.clear()

    def end(self) -> None:
        """Refuses a field that was not taken."""
        for name, node in self._left.items():
            near = get_close_matches(name, self._known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self._known)}"
            text = f"{self._path}{name}: Penstock has no such setting; {hint}"
            _fail(self._where, node.line, text)

    def fail(self, reason: str) -> NoReturn:
        """Refuses the object."""
        _fail(self._where, self._node.line, f"{self._path[:-1]}: {reason}")

    def _expected(self, name: str, text: str, what: str) -> NoReturn:
        line = self._node.fields[name].line
        _fail(self._where, line, f"{self._path}{name}: expected {what}, got {text[:40]!r}")


def _fail(where: str, line: int, reason: str) -> NoReturn:
    raise InvalidField(f"config: {where!r}, line {line}: {reason}")


class _Parser:
    """Makes one tree of objects of a text."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._at = 0
        self._line = 1

    def root(self) -> _Object:
        """The object that the file is, with or without braces."""
        root = _Object({}, 1)
        token = self._skip(",")
        if token.text == "{" and token.kind == "mark":
            self._fields(root, "}", 1)
            token = self._skip("")
            if token.kind != "end":
                self._unexpected(token)
        else:
            self._back(token)
            self._fields(root, "", 0)
        return root

    def _fields(self, into: _Object, closing: str, depth: int) -> None:
        """Reads fields until the closing brace, or the end of the text."""
        if depth > _DEPTH_MAX:
            _fail(self._where, self._line, f"objects are nested deeper than {_DEPTH_MAX}")
        while True:
            token = self._skip(",")
            if token.kind == "end" or (token.kind == "mark" and token.text == "}"):
                if token.text != closing:
                    self._unexpected(token)
                return
            if token.kind == "plain" and token.text == "include":
                self._include(token)
                continue
            path, mark = self._path(token)
            if mark.text == "+=":
                _fail(self._where, mark.line, "+= is not supported: Penstock reads no lists")
            value = mark if mark.text == "{" else self._skip("")
            if value.kind == "mark" and value.text == "{":
                self._fields(self._object(into, path, value.line), "}", depth + len(path))
                self._end_of_value(closing)
                continue
            self._back(value)
            scalar = self._scalar()
            parent = self._object(into, path[:-1], scalar.line)
            parent.fields[path[-1]] = scalar

    def _object(self, root: _Object, path: list[str], line: int) -> _Object:
        for name in path:
            inner = root.fields.get(name)
            if not isinstance(inner, _Object):
                inner = root.fields[name] = _Object({}, line)
            root = inner
        return root

    def _path(self, first: _Token) -> tuple[list[str], _Token]:
        """The names of a key, and the mark that follows it."""
        parts, token = [""], first
        while token.kind in ("plain", "quoted"):
            if token.kind == "quoted":
                parts[-1] += self._unquoted(token)
            else:
                pieces = token.text.split(".")
                parts[-1] += pieces[0]
                parts += pieces[1:]
            token = self._next()
        if token.kind == "space":
            token = self._next_solid()
        if "" in parts or len(parts) > _DEPTH_MAX:
            self._unexpected(first)
        if token.kind != "mark" or token.text not in ("{", "=", ":", "+="):
            self._unexpected(token, " after a name: expected = or {")
        return parts, token

    def _scalar(self) -> _Scalar:
        """A value: words up to a comma, a brace or the end of the line."""
        words: list[str] = []
        line = self._line
        while True:
            token = self._next()
            if token.kind == "quoted":
                words.append(self._unquoted(token))
            elif token.kind in ("plain", "space"):
                words.append(token.text)
            elif token.kind == "mark" and token.text in "[]=:":
                lists = ": lists are not supported" if token.text == "[" else " in a value"
                self._unexpected(token, lists)
            elif token.kind != "comment":
                break
        if not words:
            self._unexpected(token, ": expected a value")
        self._back(token)
        return _Scalar("".join(words).strip(" \t\r"), line)

    def _end_of_value(self, closing: str) -> None:
        token = self._next_solid()
        is_end = token.kind in ("newline", "end", "comment")
        if not is_end and token.text not in (",", "}"):
            self._unexpected(token, " after }")
        self._back(token)

    def _include(self, token: _Token) -> None:
        found = _INCLUDE.match(self._text, token.end)
        if found is None:
            _fail(
                self._where,
                token.line,
                'include: only classpath("application.conf") can be, which is ElasticMQ\'s own '
                "default values; write the settings into this file",
            )
        self._at = found.end()

    def _unquoted(self, token: _Token) -> str:
        try:
            text: str = json.loads(token.text, strict=False)
        except ValueError:
            _fail(self._where, token.line, f"{token.text[:40]} is not a text as in JSON")
        return text

    def _skip(self, also: str) -> _Token:
        """The next token that is no space, comment or new line, nor the mark `also`."""
        while True:
            token = self._next_solid()
            if token.kind not in ("newline", "comment") and (not also or token.text != also):
                return token

    def _next_solid(self) -> _Token:
        token = self._next()
        return self._next() if token.kind == "space" else token

    def _next(self) -> _Token:
        if self._at >= len(self._text):
            return _Token("end", "", self._line, self._at)
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            _fail(self._where, self._line, f"unexpected {self._text[self._at]!r}")
        token = _Token(found.lastgroup or "", found[0], self._line, found.end())
        if token.kind == "substitution":
            _fail(self._where, token.line, "${…}: substitutions are not supported; write the value")
        if token.kind == "triple":
            _fail(self._where, token.line, 'texts in """ are not supported; use one quote')
        self._at = found.end()
        self._line += token.kind == "newline"
        return token

    def _back(self, token: _Token) -> None:
        """The token is to be read again."""
        self._at = token.end - len(token.text)
        self._line = token.line

    def _unexpected(self, token: _Token, more: str = "") -> NoReturn:
        shown = "the end of the file" if token.kind == "end" else repr(token.text[:40])
        shown = "the end of the line" if token.kind == "newline" else shown
        _fail(self._where, token.line, f"unexpected {shown}{more}")
