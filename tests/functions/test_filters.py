"""Filter criteria: the operators and the rules about bodies of Lambda's documentation."""

import json

import pytest

from penstock.errors import InvalidField
from penstock.functions.filters import FilterCriteria, read_criteria


def matches(pattern, body, **entry):
    text = body if isinstance(body, str) else json.dumps(body)
    return FilterCriteria([pattern]).matches({"body": text, **entry})


# "Filter rule syntax": the comparison operators, each with a value that fits and one that does not.
OPERATORS = [
    ("Null", {"user": [None]}, {"user": None}, {"user": "a"}),
    ("Empty", {"name": [""]}, {"name": ""}, {"name": "a"}),
    ("Equals", {"name": ["Alice"]}, {"name": "Alice"}, {"name": "alice"}),
    (
        "Equals (ignore case)",
        {"name": [{"equals-ignore-case": "alice"}]},
        {"name": "ALICE"},
        {"name": "Bob"},
    ),
    ("And", {"a": ["1"], "b": ["2"]}, {"a": "1", "b": "2"}, {"a": "1", "b": "3"}),
    ("Or", {"method": ["new", "paid"]}, {"method": "paid"}, {"method": "old"}),
    ("Or (multiple fields)", {"$or": [{"a": ["1"]}, {"b": ["2"]}]}, {"b": "2"}, {"b": "1"}),
    ("Not", {"kind": [{"anything-but": ["test"]}]}, {"kind": "real"}, {"kind": "test"}),
    ("Not a prefix", {"kind": [{"anything-but": {"prefix": "t"}}]}, {"kind": "r"}, {"kind": "t1"}),
    ("Numeric (equals)", {"price": [{"numeric": ["=", 100]}]}, {"price": 100.0}, {"price": 99}),
    (
        "Numeric (range)",
        {"price": [{"numeric": [">", 10, "<=", 20]}]},
        {"price": 20},
        {"price": 10},
    ),
    ("Exists", {"name": [{"exists": True}]}, {"name": None}, {}),
    ("Does not exist", {"name": [{"exists": False}]}, {"other": 1}, {"name": "a"}),
    ("Begins with", {"region": [{"prefix": "us-"}]}, {"region": "us-east-1"}, {"region": "eu"}),
    ("Ends with", {"file": [{"suffix": ".png"}]}, {"file": "a.png"}, {"file": "a.jpg"}),
    ("a field within", {"a": {"b": ["1"]}}, {"a": {"b": "1"}}, {"a": "1"}),
    ("an array of the body", {"tags": ["x"]}, {"tags": ["y", "x"]}, {"tags": []}),
]


@pytest.mark.parametrize(("operator", "pattern", "fits", "not_fitting"), OPERATORS)
def test_an_operator_matches_what_fits_and_nothing_else(operator, pattern, fits, not_fitting):
    assert matches({"body": pattern}, fits)
    assert not matches({"body": pattern}, not_fitting)


def test_a_plain_body_is_filtered_by_a_pattern_of_texts():
    # "Plain string / plain string: Lambda filters based on your filter criteria."
    assert matches({"body": ["ready"]}, "ready")
    assert not matches({"body": ["ready"]}, "waiting")


def test_a_plain_body_is_dropped_by_a_pattern_of_fields():
    # "Plain string / valid JSON: Lambda drops the message."
    assert not matches({"body": {"a": [{"exists": False}]}}, "ready")


def test_a_json_body_is_dropped_by_a_pattern_of_texts():
    # "Valid JSON / plain string: Lambda drops the message."
    assert not matches({"body": ['{"a": 1}']}, '{"a": 1}')


def test_without_a_pattern_for_the_body_only_other_properties_are_filtered():
    pattern = {"messageAttributes": {"kind": {"stringValue": ["order"]}}}
    attributes = {"kind": {"stringValue": "order", "dataType": "String"}}
    for body in ("ready", '{"a": 1}'):
        assert matches(pattern, body, messageAttributes=attributes)
        assert not matches(pattern, body, messageAttributes={})


def test_one_of_several_filters_is_enough():
    criteria = FilterCriteria([{"body": {"a": [1]}}, {"body": {"b": [2]}}])
    assert criteria.matches({"body": '{"b": 2}'})
    assert not criteria.matches({"body": '{"c": 3}'})
    assert FilterCriteria().matches({"body": "anything"})


def test_criteria_are_read_as_lambda_takes_them():
    text = json.dumps({"Filters": [{"Pattern": json.dumps({"body": {"kind": ["order"]}})}]})
    assert read_criteria(text).matches({"body": '{"kind": "order"}'})


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ('{"body": {"a": 1}}', "Filters[0].body.a: expected an object of fields, got 1"),
        ('{"body": {"a": []}}', "an empty list matches nothing"),
        ('{"body": {"a": [{"like": "x"}]}}', '{"like":"x"} is none of anything-but'),
        ('{"body": {"a": [{"numeric": ["~", 1]}]}}', "numeric is"),
        ('{"body": {"a": [{"exists": 1}]}}', "exists is true or false"),
        ('{"body": {"a": [{"prefix": 1}]}}', "prefix is a text"),
        ('{"body": {"a": [{"numeric": [["="], 1]}]}}', "numeric is"),
        ('{"body": {"a": [{"anything-but": {"prefix": 1}}]}}', "prefix is a text"),
        ('{"body": {"a": [{"anything-but": {"like": "x"}}]}}', "anything-but is a value"),
        ('{"body": {"a": [{"anything-but": {}}]}}', "is none of anything-but"),
        ('{"body": {"a": [{"anything-but": []}]}}', "anything-but is a value"),
        ('{"body": {"a": [{"anything-but": [["x"]]}]}}', "anything-but is a value"),
        ('{"$or": [{"a": [1]}]}', "two patterns or more"),
        ("[" * 2_000, "Filters[0].Pattern:"),
        ("x" * 4_097, "at most 4096 characters"),
    ],
)
def test_a_pattern_that_lambda_would_refuse_is_refused_by_name(pattern, told):
    with pytest.raises(InvalidField) as refused:
        read_criteria(json.dumps({"Filters": [{"Pattern": pattern}]}))
    assert told in str(refused.value)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"Filters": [1]}'])
def test_criteria_that_are_none_are_refused(text):
    with pytest.raises(InvalidField):
        read_criteria(text)


def test_more_than_ten_filters_are_refused():
    with pytest.raises(InvalidField, match="at most 10"):
        FilterCriteria([{"body": ["a"]}] * 11)
