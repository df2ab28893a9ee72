"""A small PromQL: the part that Penstock's alerts and dashboard use, evaluated over two scrapes.

It refuses everything that it does not know, so a query that passes here is one that was understood:
names, label matchers, ranges, `on` and `group_left`, comparisons as filters, and these functions.
A range is what lies between the two scrapes, however long the range is that the query names. The
results were compared with Prometheus 2.42.
"""

import re
from collections import defaultdict
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?![\w.])|(?P<duration>\d+[smhd])|(?P<name>[a-zA-Z_]\w*)"
    r'|(?P<text>"[^"]*")|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/(){}\[\],=<>]))'
)
RANGE_FUNCTIONS = ("rate", "increase", "predict_linear")
AGGREGATES = ("sum", "max", "min", "topk")
COMPARISONS = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
ARITHMETIC = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
# Later ones bind tighter.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("or",),
    ("and", "unless"),
    tuple(COMPARISONS),
    ("+", "-"),
    ("*", "/"),
)
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]


class Scrape(NamedTuple):
    """The samples of a page: values by labels, by name; and when it was read."""

    at_s: float
    samples: dict[str, Vector]


def read_scrape(page, at_s, target):
    """A page as Prometheus stores it: each sample with the labels of its target."""
    samples: dict[str, Vector] = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = tuple(sorted({**sample.labels, **target}.items()))
            samples[sample.name][labels] = float(sample.value)
    samples["up"][tuple(sorted(target.items()))] = 1.0
    return Scrape(at_s, samples)


class Query:
    """One expression over two scrapes; `selected` counts what each of its selectors found."""

    def __init__(self, text, before, after):
        self._tokens = self._split(text)
        self._at = 0
        self._before, self._after = before, after
        self.selected: dict[str, int] = {}

    def evaluate(self) -> Any:
        value = self._binary(0)
        assert self._at == len(self._tokens), f"surplus: {self._tokens[self._at :]}"
        return value

    # Reading.

    def _split(self, text):
        tokens, at = [], 0
        while text[at:].strip():
            found = TOKEN.match(text, at)
            assert found, f"not understood: {text[at : at + 40]!r}"
            tokens.append(found[0].strip())
            at = found.end()
        return tokens

    def _peek(self):
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, wanted=None):
        token = self._peek()
        assert token, "ends too early"
        assert wanted in (None, token), f"expected {wanted!r}, got {token!r}"
        self._at += 1
        return token

    def _names(self):
        self._take("(")
        names = []
        while self._peek() != ")":
            names.append(self._take())
            if self._peek() == ",":
                self._take()
        self._take(")")
        return names

    # Evaluating.

    def _binary(self, level):
        if level == len(LEVELS):
            return self._unit()
        left = self._binary(level + 1)
        while self._peek() in LEVELS[level]:
            sign = self._take()
            on, is_grouped = None, False
            if self._peek() == "on":
                self._take()
                on = self._names()
                if self._peek() == "group_left":
                    self._take()
                    assert self._names() == []
                    is_grouped = True
            left = self._combine(sign, left, self._binary(level + 1), on, is_grouped)
        return left

    def _combine(self, sign, left, right, on, is_grouped):
        operate: Any = COMPARISONS.get(sign) or ARITHMETIC.get(sign)
        if isinstance(left, float) and isinstance(right, float):
            assert sign in ARITHMETIC
            return operate(left, right)
        if isinstance(left, float):
            assert sign in ARITHMETIC
            return {_without_name(key): operate(left, value) for key, value in right.items()}
        if isinstance(right, float):
            pairs = [(key, value, right) for key, value in left.items()]
        else:
            pairs = list(self._matched(sign, left, right, on, is_grouped))
            if sign in ("and", "unless"):
                wanted = {key for key, _, _ in pairs}
                is_kept = sign == "and"
                return {key: v for key, v in left.items() if (key in wanted) == is_kept}
        assert operate, f"{sign} of vectors"
        if sign in COMPARISONS:
            return {key: value for key, value, other in pairs if operate(value, other)}
        return {key: operate(value, other) for key, value, other in pairs}

    def _matched(self, sign, left, right, on, is_grouped):
        def key_of(labels):
            return tuple((n, v) for n, v in labels if (on is None or n in on))

        by_key = defaultdict(list)
        for labels, value in right.items():
            by_key[key_of(labels)].append(value)
        seen: set[Labels] = set()
        for labels, value in left.items():
            key = key_of(labels)
            others = by_key.get(key, [])
            if sign not in ("and", "unless", "or"):
                assert len(others) <= 1, f"many matches on the right side of {sign}"
                assert is_grouped or key not in seen, f"many matches on the left side of {sign}"
                seen.add(key)
            for other in others[:1]:
                yield labels, value, other

    def _unit(self):
        token = self._take()
        if token == "(":
            value = self._binary(0)
            self._take(")")
            return value
        if re.fullmatch(r"\d+(\.\d+)?", token):
            return float(token)
        if token in AGGREGATES:
            return self._aggregate(token)
        if token in RANGE_FUNCTIONS:
            return self._over_range(token)
        if token == "histogram_quantile":
            self._take("(")
            share = self._binary(0)
            self._take(",")
            found = _quantile(share, self._binary(0))
            self._take(")")
            return found
        assert re.fullmatch(r"(penstock_\w+|up)", token), f"{token} is no metric of Penstock"
        found, _ = self._select(token)
        assert self._peek() != "[", f"{token}: a range where a vector is expected"
        return found

    def _aggregate(self, name):
        by: list[str] = []
        if self._peek() == "by":
            self._take()
            by = self._names()
        self._take("(")
        most = int(self._binary(0)) if name == "topk" else 0
        if name == "topk":
            self._take(",")
        vector = self._binary(0)
        self._take(")")
        if name == "topk":
            ordered = sorted(vector.items(), key=lambda item: item[1])
            return dict(ordered[-most:])
        known = {label for labels in vector for label, _ in labels}
        assert not vector or known.issuperset(by), f"by {by}: there are {known}"
        groups = defaultdict(list)
        for labels, value in vector.items():
            groups[tuple((n, v) for n, v in labels if n in by)].append(value)
        folds: dict[str, Any] = {"sum": sum, "max": max, "min": min}
        fold = folds[name]
        return {labels: float(fold(values)) for labels, values in groups.items()}

    def _over_range(self, function):
        self._take("(")
        after, before = self._select(self._take())
        self._take("[")
        assert re.fullmatch(r"\d+[smhd]", self._take())
        self._take("]")
        ahead_s = 0.0
        if function == "predict_linear":
            self._take(",")
            ahead_s = self._binary(0)
        self._take(")")
        passed_s = self._after.at_s - self._before.at_s
        found = {}
        for labels, value in after.items():
            if labels not in before:
                continue
            more = value - before[labels]
            if function == "predict_linear":
                found[labels] = value + more / passed_s * ahead_s
            else:
                # A counter that fell has begun anew.
                more = value if more < 0 else more
                found[labels] = more / passed_s if function == "rate" else more
        return found

    def _select(self, name):
        matchers = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                matchers.append((self._take(), self._take(), self._take()[1:-1]))
                if self._peek() == ",":
                    self._take()
            self._take("}")
        after = _chosen(self._after.samples.get(name, {}), matchers)
        label_names = {label for labels in self._after.samples.get(name, {}) for label, _ in labels}
        unknown = [label for label, _, _ in matchers if label_names and label not in label_names]
        assert not unknown, f"{name} has no label {unknown}"
        self.selected[name] = max(len(after), self.selected.get(name, 0))
        return after, _chosen(self._before.samples.get(name, {}), matchers)


def _chosen(samples, matchers):
    tests = {
        "=": lambda value, text: value == text,
        "!=": lambda value, text: value != text,
        "=~": lambda value, text: re.fullmatch(text, value) is not None,
        "!~": lambda value, text: re.fullmatch(text, value) is None,
    }
    return {
        labels: value
        for labels, value in samples.items()
        if all(tests[sign](dict(labels).get(label, ""), text) for label, sign, text in matchers)
    }


def _without_name(labels):
    return labels


def _quantile(share, buckets):
    """As Prometheus does it: linear within a bucket; the last bound for what is above it."""
    groups = defaultdict(list)
    for labels, count in buckets.items():
        bounds = dict(labels)
        bound = float(bounds.pop("le").replace("+Inf", "inf"))
        groups[tuple(sorted(bounds.items()))].append((bound, count))
    found = {}
    for labels, counted in groups.items():
        counted.sort()
        total = counted[-1][1]
        assert counted[-1][0] == float("inf")
        if not total:
            continue
        wanted, low, below = share * total, 0.0, 0.0
        for bound, count in counted:
            if count >= wanted:
                inside = count - below
                is_last = bound == float("inf")
                found[labels] = low if is_last else low + (bound - low) * (wanted - below) / inside
                break
            low, below = bound, count
    return found
