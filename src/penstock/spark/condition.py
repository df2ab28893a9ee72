"""A condition on the rows of a table: parsed here and translated to SQL for Spark.

Spark's own expressions can read any file and call any Java method, so the user's text is never
passed to Spark. The condition is parsed by the grammar below; anything else is refused, and Spark
gets SQL that is generated from the parsed tree: columns in backticks, texts escaped, everything
else from the tables of this module.

    condition  = and { OR and }            and    = not { AND not }           not = [ NOT ] test
    test       = sum [ compare sum | IS [ NOT ] NULL | [ NOT ] IN ( sum , … )
                       | [ NOT ] BETWEEN sum AND sum | [ NOT ] LIKE text [ ESCAPE text ] ]
    sum        = product { + | - | || product }
    product    = sign { * | / | % sign }   sign   = [ - | + ] value
    value      = number | text | TRUE | FALSE | NULL | DATE text | TIMESTAMP text
                 | INTERVAL number unit | column | function ( condition , … )
                 | CAST ( condition AS type ) | ( condition )
                 | CASE [ condition ] { WHEN condition THEN condition } [ ELSE condition ] END

A text is in single quotes, a quote inside it is doubled, and a backslash is a plain character.
Names and words may be in any case. Types are left to Spark, which checks them before it runs.
"""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from penstock.errors import InvalidField

CHARACTERS_MAX: Final = 10_000
DEPTH_MAX: Final = 64

# Functions of one row that read nothing but their arguments: how many of those each takes.
# None of them makes a text much longer than its arguments.
FUNCTIONS: Final[dict[str, tuple[int, int]]] = {
    "abs": (1, 1), "ceil": (1, 1), "coalesce": (1, 20), "concat": (1, 20), "contains": (2, 2),
    "current_date": (0, 0), "current_timestamp": (0, 0), "date": (1, 1), "date_add": (2, 2),
    "date_format": (2, 2), "date_sub": (2, 2), "date_trunc": (2, 2), "datediff": (2, 2),
    "day": (1, 1), "dayofweek": (1, 1), "endswith": (2, 2), "floor": (1, 1),
    "from_unixtime": (1, 2), "get_json_object": (2, 2), "greatest": (2, 20), "hour": (1, 1),
    "if": (3, 3), "least": (2, 20), "length": (1, 1), "lower": (1, 1), "ltrim": (1, 1),
    "minute": (1, 1), "mod": (2, 2), "month": (1, 1), "now": (0, 0), "nullif": (2, 2),
    "round": (1, 2), "rtrim": (1, 1), "second": (1, 1), "startswith": (2, 2), "substr": (2, 3),
    "substring": (2, 3), "timestamp_millis": (1, 1), "timestamp_seconds": (1, 1),
    "to_date": (1, 2), "to_timestamp": (1, 2), "trim": (1, 1), "unix_millis": (1, 1),
    "unix_timestamp": (0, 2), "upper": (1, 1), "year": (1, 1),
}  # fmt: skip
TYPES: Final = ("bigint", "boolean", "date", "double", "int", "string", "timestamp")
UNITS: Final = ("second", "minute", "hour", "day", "week", "month", "year")
_COMPARES: Final = {
    "=": "=", "==": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
    "<=>": "<=>",
}  # fmt: skip
_WORDS: Final = frozenset(
    {
        "and", "or", "not", "in", "between", "like", "ilike", "escape", "is", "null", "true",
        "false", "case", "when", "then", "else", "end", "cast", "as", "interval",
    }
)  # fmt: skip
_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+)
    | (?P<comment>--|/\*)
    | (?P<text>'(?:[^']|'')*')
    | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    | (?P<quoted>`(?:[^`]|``)*`)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign><=>|<=|>=|<>|!=|==|\|\||[-+*/%=<>(),])
    """,
    re.VERBOSE | re.ASCII,
)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words

    def is_sign(self, *signs: str) -> bool:
        return self.kind == "sign" and self.text in signs

    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


def condition_sql(text: str, columns: Sequence[str]) -> str:
    """The condition as SQL that can only select among these columns.

    Raises InvalidField, which names the place, counted in characters from 1, and what is allowed.
    """
    if len(text) > CHARACTERS_MAX:
        raise InvalidField(f"where: has {len(text):,} characters; at most {CHARACTERS_MAX:,}")
    return _Parser(_tokens(text), columns).whole()


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup == "comment":
            raise _refusal(at, *_unreadable(text[at : at + 2]))
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match[0], at))
        at = match.end()
    return [*tokens, _Token("end", "", len(text))]


def _unreadable(start: str) -> tuple[str, str]:
    found = repr(start[0])
    if start[0] == "'":
        return found, "this text is not closed by a second single quote"
    if start[0] == "`":
        return found, "this column name is not closed by a second backtick"
    if start[0] == '"':
        return found, "write texts in 'single quotes' and column names in `backticks`"
    if start in ("--", "/*"):
        return repr(start), "comments are not allowed"
    if start[0] == ".":
        return found, "name a column of this table alone; others cannot be read"
    if start[0] == ";":
        return found, "give one condition, not statements"
    return found, "a condition has columns, literals, operators and functions"


def _refusal(at: int, found: str, why: str) -> InvalidField:
    return InvalidField(f"where: at character {at + 1}, {found}: {why}")


class _Parser:
    """One method for each rule of the grammar; each returns SQL, in parentheses where needed."""

    def __init__(self, tokens: list[_Token], columns: Sequence[str]) -> None:
        self._tokens = tokens
        self._columns = {column.lower(): column for column in columns}
        self._next = 0
        self._depth = 0

    def whole(self) -> str:
        sql = self._condition()
        if self._token.kind != "end":
            raise self._unexpected("AND, OR, an operator or the end")
        return sql

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _take_word(self, *words: str) -> bool:
        taken = self._token.is_word(*words)
        self._next += taken
        return taken

    def _take_sign(self, sign: str) -> bool:
        taken = self._token.is_sign(sign)
        self._next += taken
        return taken

    def _unexpected(self, what: str) -> InvalidField:
        return _refusal(self._token.at, self._token.shown(), f"expected {what}")

    def _need_word(self, word: str) -> None:
        if not self._take_word(word):
            raise self._unexpected(word.upper())

    def _need_sign(self, sign: str) -> None:
        if not self._take_sign(sign):
            raise self._unexpected(repr(sign))

    def _condition(self) -> str:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _refusal(
                self._token.at, self._token.shown(), f"nested more than {DEPTH_MAX} deep"
            )
        sql = self._chain("or", lambda: self._chain("and", self._negation))
        self._depth -= 1
        return sql

    def _chain(self, word: str, part: Callable[[], str]) -> str:
        parts = [part()]
        while self._take_word(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else f"({f' {word.upper()} '.join(parts)})"

    def _negation(self) -> str:
        # Two NOTs are one after another, not nested: a loop needs no limit of depth.
        negated = False
        while self._take_word("not"):
            negated = not negated
        test = self._test()
        return f"(NOT {test})" if negated else test

    def _test(self) -> str:
        left = self._sum()
        if self._token.is_sign(*_COMPARES):
            sign = _COMPARES[self._take().text]
            left = f"({left} {sign} {self._sum()})"
        elif self._take_word("is"):
            negated = "NOT " if self._take_word("not") else ""
            self._need_word("null")
            left = f"({left} IS {negated}NULL)"
        else:
            left = self._worded_test(left)
        if self._token.is_sign(*_COMPARES):
            raise self._unexpected("AND, OR or the end; comparisons do not chain")
        return left

    def _worded_test(self, left: str) -> str:
        negated = "NOT " if self._take_word("not") else ""
        if self._take_word("in"):
            self._need_sign("(")
            return f"({left} {negated}IN ({', '.join(self._list(self._sum))}))"
        if self._take_word("between"):
            low = self._sum()
            self._need_word("and")
            return f"({left} {negated}BETWEEN {low} AND {self._sum()})"
        for word in ("like", "ilike"):
            if self._take_word(word):
                pattern = self._text("a pattern in single quotes")
                escape = ""
                if self._take_word("escape"):
                    escape = f" ESCAPE {self._text('one character in single quotes', 1)}"
                return f"({left} {negated}{word.upper()} {pattern}{escape})"
        if negated:
            raise self._unexpected("IN, BETWEEN or LIKE")
        return left

    def _sum(self) -> str:
        return self._operators(("+", "-", "||"), self._product)

    def _product(self) -> str:
        return self._operators(("*", "/", "%"), self._sign)

    def _operators(self, signs: tuple[str, ...], part: Callable[[], str]) -> str:
        # Spark, too, takes operators of one rank from the left: one pair of parentheses will do.
        pieces = [part()]
        while self._token.is_sign(*signs):
            pieces += [self._take().text, part()]
        return pieces[0] if len(pieces) == 1 else f"({' '.join(pieces)})"

    def _sign(self) -> str:
        negative = False
        while self._token.is_sign("-", "+"):
            negative ^= self._take().text == "-"
        value = self._value()
        return f"(- {value})" if negative else value

    def _value(self) -> str:
        token = self._take()
        if token.kind == "number":
            return token.text
        if token.kind == "text":
            return _literal(token.text)
        if token.is_sign("("):
            return self._closed(self._condition())
        if token.kind == "quoted":
            return self._column(token, token.text[1:-1].replace("``", "`"))
        if token.kind == "word":
            return self._named(token)
        self._next -= 1
        raise self._unexpected("a column, a literal, a function or a condition in parentheses")

    def _named(self, token: _Token) -> str:
        word = token.text.lower()
        if word in ("true", "false", "null"):
            return word.upper()
        if word in ("date", "timestamp") and self._token.kind == "text":
            return f"{word.upper()} {_literal(self._take().text)}"
        if word == "interval":
            return self._interval()
        if word == "cast":
            return self._cast()
        if word == "case":
            return self._case()
        if word in _WORDS:
            self._next -= 1
            raise self._unexpected("a column, a literal, a function or a condition in parentheses")
        if self._token.is_sign("("):
            return self._function(token)
        return self._column(token, token.text)

    def _column(self, token: _Token, name: str) -> str:
        column = self._columns.get(name.lower())
        if column is None:
            near = get_close_matches(name.lower(), self._columns, 1)
            hint = f", did you mean {self._columns[near[0]]}" if near else ""
            known = ", ".join(self._columns.values())
            raise _refusal(
                token.at, token.shown(), f"there is no such column{hint}; there are {known}"
            )
        return f"`{column.replace('`', '``')}`"

    def _function(self, token: _Token) -> str:
        name = token.text.lower()
        if name not in FUNCTIONS:
            raise _refusal(
                token.at,
                token.shown(),
                f"this function is not allowed; allowed are {', '.join(FUNCTIONS)}",
            )
        self._need_sign("(")
        given = [] if self._take_sign(")") else self._list(self._condition)
        least, most = FUNCTIONS[name]
        if not least <= len(given) <= most:
            takes = str(least) if least == most else f"{least} to {most}"
            raise _refusal(token.at, token.shown(), f"takes {takes} arguments, not {len(given)}")
        return f"{name}({', '.join(given)})"

    def _list(self, part: Callable[[], str]) -> list[str]:
        parts = [part()]
        while self._take_sign(","):
            parts.append(part())
        self._need_sign(")")
        return parts

    def _closed(self, sql: str) -> str:
        self._need_sign(")")
        return sql

    def _interval(self) -> str:
        token = self._take()
        amount = token.text.strip("'")
        if token.kind not in ("number", "text") or not re.fullmatch(r"\d{1,9}", amount):
            raise _refusal(token.at, token.shown(), "expected a whole number, as in INTERVAL 3 DAY")
        unit = self._one_of(UNITS, "a unit of time")
        return f"INTERVAL '{amount}' {unit.upper()}"

    def _cast(self) -> str:
        self._need_sign("(")
        inner = self._condition()
        self._need_word("as")
        return self._closed(f"CAST({inner} AS {self._one_of(TYPES, 'a type')})")

    def _one_of(self, names: Sequence[str], what: str) -> str:
        token = self._take()
        name = token.text.lower()
        # A unit may be in the plural: INTERVAL 3 DAYS.
        for known in (name, name.removesuffix("s")):
            if token.kind == "word" and known in names:
                return known
        raise _refusal(token.at, token.shown(), f"expected {what}: {', '.join(names)}")

    def _case(self) -> str:
        pieces = ["CASE"]
        if not self._token.is_word("when"):
            pieces.append(self._condition())
        while self._take_word("when"):
            pieces += ["WHEN", self._condition()]
            self._need_word("then")
            pieces += ["THEN", self._condition()]
        if "WHEN" not in pieces:
            raise self._unexpected("WHEN")
        if self._take_word("else"):
            pieces += ["ELSE", self._condition()]
        self._need_word("end")
        return f"({' '.join(pieces)} END)"

    def _text(self, what: str, characters: int | None = None) -> str:
        token = self._token
        if token.kind != "text" or characters not in (None, len(_characters(token.text))):
            raise self._unexpected(what)
        return _literal(self._take().text)


def _characters(quoted: str) -> str:
    return quoted[1:-1].replace("''", "'")


def _literal(quoted: str) -> str:
    """A text as Spark spells it.

    Spark replaces `${…}` by settings and environment variables before it parses, also inside
    quotes: the dollar sign is escaped like the quote and the backslash.
    """
    return f"'{''.join(map(_spelt, _characters(quoted)))}'"


def _spelt(character: str) -> str:
    if character in "'\\$" or not (character.isprintable() or ord(character) > 0xFFFF):
        return f"\\u{ord(character):04x}"
    return character
