"""Filter criteria of an event source mapping: which messages a function is given; pure.

    {"Filters": [{"Pattern": "{\\"body\\": {\\"kind\\": [\\"order\\"]}}"}]}

A message is given to the function if one of the filters matches, and is deleted if none does. A
pattern names fields, each with a list of what its value may be: a value, `null`, or a condition:
prefix, suffix, equals-ignore-case, anything-but, numeric, exists. `$or` is a list of patterns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.errors import InvalidField

FILTERS_MAX: Final = 10
_PATTERN_CHARS_MAX: Final = 4_096
_NUMERIC: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": lambda value, bound: value == bound,
    "<": lambda value, bound: value < bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    ">=": lambda value, bound: value >= bound,
}
_OF_TEXTS: Final = frozenset({"prefix", "suffix", "equals-ignore-case"})
_CONDITIONS: Final = _OF_TEXTS | {"anything-but", "numeric", "exists"}


class FilterCriteria:
    """The filters of a mapping. Without any, every message matches."""

    def __init__(self, patterns: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raises InvalidField for a pattern that Lambda would refuse."""
        if len(patterns) > FILTERS_MAX:
            raise InvalidField(
                f"Filters: {len(patterns)} filters, at most {FILTERS_MAX} are allowed"
            )
        for number, pattern in enumerate(patterns):
            _check(f"Filters[{number}]", pattern)
        self._patterns = patterns

    def matches(self, entry: Mapping[str, Any]) -> bool:
        """Whether a message, as it is in an event, is given to the function."""
        return not self._patterns or any(_fits(pattern, entry) for pattern in self._patterns)


def read_criteria(text: str | bytes) -> FilterCriteria:
    """The criteria of a JSON text, as Lambda takes them. Raises InvalidField."""
    found = _decode("filter", text)
    filters = found.get("Filters") if isinstance(found, dict) else None
    if not isinstance(filters, list):
        raise InvalidField('filter: expected {"Filters": [{"Pattern": "…"}]}')
    patterns = []
    for number, each in enumerate(filters):
        pattern = each.get("Pattern") if isinstance(each, dict) else None
        if not isinstance(pattern, str) or len(pattern) > _PATTERN_CHARS_MAX:
            raise InvalidField(
                f"Filters[{number}]: expected a Pattern, a JSON text of at most "
                f"{_PATTERN_CHARS_MAX} characters"
            )
        patterns.append(_decode(f"Filters[{number}].Pattern", pattern))
    return FilterCriteria(patterns)


def _decode(field: str, text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidField(f"{field}: {error}") from None


def _check(field: str, pattern: Any) -> None:
    """Raises InvalidField unless this is a pattern."""
    if not isinstance(pattern, Mapping):
        raise InvalidField(f"{field}: expected an object of fields, got {_shown(pattern)}")
    for name, wanted in pattern.items():
        here = f"{field}.{name}"
        if name == "$or":
            if not isinstance(wanted, list) or len(wanted) < 2:
                raise InvalidField(f"{here}: expected a list of two patterns or more")
            for each in wanted:
                _check(here, each)
        elif isinstance(wanted, list):
            if not wanted:
                raise InvalidField(f"{here}: an empty list matches nothing; name a value")
            for each in wanted:
                _check_rule(here, each)
        else:
            _check(here, wanted)


def _check_rule(field: str, rule: Any) -> None:
    if isinstance(rule, list):
        raise InvalidField(f"{field}: a list within a list is no value")
    if not isinstance(rule, dict):
        return
    unknown = [name for name in rule if name not in _CONDITIONS]
    if unknown or len(rule) != 1:
        raise InvalidField(f"{field}: {_shown(rule)} is none of {', '.join(sorted(_CONDITIONS))}")
    ((kind, value),) = rule.items()
    if kind == "numeric":
        _check_numeric(field, value)
    elif kind == "exists" and not isinstance(value, bool):
        raise InvalidField(f"{field}: exists is true or false, not {_shown(value)}")
    elif kind in _OF_TEXTS and not isinstance(value, str):
        raise InvalidField(f"{field}: {kind} is a text, not {_shown(value)}")
    elif kind == "anything-but":
        _check_anything_but(field, value)


def _check_anything_but(field: str, value: Any) -> None:
    if isinstance(value, dict) and value.keys() <= _OF_TEXTS:
        _check_rule(field, value)
    elif value == [] or any(isinstance(each, dict | list) for each in _listed(value)):
        raise InvalidField(
            f"{field}: anything-but is a value, a list of values, or one of "
            f"{', '.join(sorted(_OF_TEXTS))}, not {_shown(value)}"
        )


def _check_numeric(field: str, value: Any) -> None:
    is_pairs = isinstance(value, list) and len(value) in (2, 4)
    if not is_pairs or not all(
        isinstance(operator, str) and operator in _NUMERIC and _is_number(bound)
        for operator, bound in zip(value[::2], value[1::2], strict=True)
    ):
        raise InvalidField(
            f'{field}: numeric is ["=", 5] or [">", 0, "<=", 10], not {_shown(value)}'
        )


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:60] + "…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(pattern: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether a message fits a pattern: its body as JSON if the pattern's is an object."""
    rest = {name: wanted for name, wanted in pattern.items() if name != "body"}
    wanted = pattern.get("body")
    if wanted is not None:
        is_json, body = _body(entry["body"])
        # A pattern of an object drops a plain body, and one of texts drops a JSON body.
        if isinstance(wanted, Mapping) != is_json:
            return False
        if not (_is_part(wanted, body) if is_json else _is_one_of(wanted, [body])):
            return False
    return _is_part(rest, entry)


def _body(text: str) -> tuple[bool, Any]:
    """Whether a body is JSON, and what it is then; a lone text or number is a plain body."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False, text
    return (True, found) if isinstance(found, dict | list) else (False, text)


def _is_part(pattern: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, list):
        # A field of one of the objects of a list is enough.
        return any(_is_part(pattern, each) for each in value)
    if not isinstance(value, Mapping):
        value = {}
    for name, wanted in pattern.items():
        if name == "$or":
            if not any(_is_part(each, value) for each in wanted):
                return False
        elif isinstance(wanted, Mapping):
            if not _is_part(wanted, value.get(name)):
                return False
        else:
            found = value.get(name, _ABSENT)
            given = found if isinstance(found, list) else [found]
            if not _is_one_of(wanted, given):
                return False
    return True


_ABSENT: Final = object()


def _is_one_of(rules: Sequence[Any], values: Sequence[Any]) -> bool:
    return any(_allows(rule, value) for rule in rules for value in values)


def _allows(rule: Any, value: Any) -> bool:
    if isinstance(rule, dict):
        ((kind, wanted),) = rule.items()
        return _meets(kind, wanted, value)
    if value is _ABSENT:
        return False
    return bool(rule == value) and isinstance(rule, bool) == isinstance(value, bool)


def _meets(kind: str, wanted: Any, value: Any) -> bool:
    if kind == "exists":
        return bool(wanted) == (value is not _ABSENT)
    if value is _ABSENT:
        return False
    if kind == "anything-but":
        if isinstance(wanted, dict):
            return not _allows(wanted, value)
        return not any(_allows(each, value) for each in _listed(wanted))
    if kind == "numeric":
        return _is_number(value) and all(
            bool(_NUMERIC[operator](value, bound))
            for operator, bound in zip(wanted[::2], wanted[1::2], strict=True)
        )
    if not isinstance(value, str):
        return False
    match kind:
        case "prefix":
            return bool(value.startswith(wanted))
        case "suffix":
            return bool(value.endswith(wanted))
    return bool(value.lower() == wanted.lower())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
