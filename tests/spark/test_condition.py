"""Row 23: a condition can select rows and do nothing else.

Whatever is not in its grammar is refused.
"""

import re
from pathlib import Path

import pytest

from penstock.errors import InvalidField
from penstock.spark.condition import CHARACTERS_MAX, DEPTH_MAX, FUNCTIONS, condition_sql

COLUMNS = ("queue", "state", "group", "claims", "pushed_at", "pushed_at_ms", "message_id")

GOOD = {
    "queue = 'orders' and state = 'dead'": "((`queue` = 'orders') AND (`state` = 'dead'))",
    "QUEUE='orders' OR NOT state<>'dead'": "((`queue` = 'orders') OR (NOT (`state` <> 'dead')))",
    "not not claims > 1": "(`claims` > 1)",
    "claims + 2 * 3 - 1 >= -4": "((`claims` + (2 * 3) - 1) >= (- 4))",
    "- - claims != + 1": "(`claims` <> 1)",
    "claims > .5 and claims < 1e3": "((`claims` > .5) AND (`claims` < 1e3))",
    "(claims = 1 or claims = 2) and state = 'live'":
        "(((`claims` = 1) OR (`claims` = 2)) AND (`state` = 'live'))",
    "group in ('a', 'b')": "(`group` IN ('a', 'b'))",
    "`group` not in ('it''s')": r"(`group` NOT IN ('it\u0027s'))",
    "claims between 1 and 2 and state is not null":
        "((`claims` BETWEEN 1 AND 2) AND (`state` IS NOT NULL))",
    "claims not between 1 and 2": "(`claims` NOT BETWEEN 1 AND 2)",
    "group is null": "(`group` IS NULL)",
    "queue like 'or%' and group not ilike '10!%' escape '!'":
        "((`queue` LIKE 'or%') AND (`group` NOT ILIKE '10!%' ESCAPE '!'))",
    "group <=> null": "(`group` <=> NULL)",
    "queue || '-x' = 'a-x'": "((`queue` || '-x') = 'a-x')",
    "lower(queue) = 'a'": "(lower(`queue`) = 'a')",
    "Coalesce(group, 'none') = 'none'": "(coalesce(`group`, 'none') = 'none')",
    "pushed_at > timestamp '2026-01-02 03:04:05'":
        "(`pushed_at` > TIMESTAMP '2026-01-02 03:04:05')",
    "date(pushed_at) = date '2026-01-02'": "(date(`pushed_at`) = DATE '2026-01-02')",
    "pushed_at > now() - interval 3 days": "(`pushed_at` > (now() - INTERVAL '3' DAY))",
    "pushed_at > now() - interval '1' hour": "(`pushed_at` > (now() - INTERVAL '1' HOUR))",
    "timestamp_millis(pushed_at_ms) < now()": "(timestamp_millis(`pushed_at_ms`) < now())",
    "cast(group as int) % 2 = 0": "((CAST(`group` AS int) % 2) = 0)",
    "case when claims > 3 then true else false end":
        "(CASE WHEN (`claims` > 3) THEN TRUE ELSE FALSE END)",
    "case state when 'dead' then 1 end = 1": "((CASE `state` WHEN 'dead' THEN 1 END) = 1)",
    "get_json_object(group, '$.a') = 'b'": r"(get_json_object(`group`, '\u0024.a') = 'b')",
    "true": "TRUE",
}  # fmt: skip

BAD = {
    # The attacks: a file as a table, a Java method, a query inside, the environment.
    "queue in (select value from text.`/etc/passwd`)": ("33", "'.'", "others cannot be read"),
    "exists (select 1 from secrets)": ("1", "'exists'", "function is not allowed"),
    "(select max(value) from secrets) = 'x'": ("2", "'select'", "no such column"),
    "text.`/etc/passwd` = 1": ("5", "'.'", "a column of this table alone"),
    "reflect('java.lang.System', 'load', '/tmp/x.so') is null":
        ("1", "'reflect'", "function is not allowed"),
    "java_method('java.lang.System', 'exit', 1) = 1": ("1", "'java_method'", "not allowed"),
    "claims = 1 or try_reflect('java.lang.Runtime') = 1": ("15", "'try_reflect'", "not allowed"),
    "`reflect`('a', 'b') = 1": ("1", "'`reflect`'", "no such column"),
    "read_files('/etc/passwd') = 1": ("1", "'read_files'", "not allowed"),
    "raise_error('x')": ("1", "'raise_error'", "not allowed"),
    "1 = 1; DROP TABLE messages": ("6", "';'", "one condition, not statements"),
    "1 = 1) UNION SELECT * FROM events --": ("35", "'--'", "comments"),
    "1 = 1) UNION SELECT * FROM events": ("6", "')'", "expected AND, OR"),
    "1 = 1 /* x */": ("7", "'/*'", "comments"),
    # Mistakes.
    "": ("1", "the end", "expected a column"),
    "queue =": ("8", "the end", "expected a column"),
    "queu = 'a'": ("1", "'queu'", "did you mean queue; there are queue, state"),
    'queue = "orders"': ("9", "'\"'", "single quotes"),
    "queue = 'orders": ("9", '"\'"', "not closed"),
    "`queue = 1": ("1", "'`'", "not closed"),
    "claims = 1--1": ("11", "'--'", "comments"),
    "claims = 1 = 1": ("12", "'='", "do not chain"),
    "claims 1": ("8", "'1'", "expected AND, OR"),
    "claims in ()": ("12", "')'", "expected a column"),
    "claims in 1": ("11", "'1'", "expected '('"),
    "claims not 1": ("12", "'1'", "expected IN, BETWEEN or LIKE"),
    "claims between 1": ("17", "the end", "expected AND"),
    "claims is 1": ("11", "'1'", "expected NULL"),
    "queue like queue": ("12", "'queue'", "a pattern in single quotes"),
    "queue like 'a' escape 'bc'": ("23", '"\'bc\'"', "one character"),
    "lower() = 'a'": ("1", "'lower'", "takes 1 arguments, not 0"),
    "lower(queue, state) = 'a'": ("1", "'lower'", "takes 1 arguments, not 2"),
    "interval 1 eon = 1": ("12", "'eon'", "a unit of time: second, minute"),
    "interval queue day = 1": ("10", "'queue'", "a whole number"),
    "cast(queue as array) = 1": ("15", "'array'", "a type: bigint"),
    "case end": ("6", "'end'", "expected a column"),
    "case claims end = 1": ("13", "'end'", "expected WHEN"),
    "claims = 1x": ("10", "'1'", "a condition has columns"),
    "claims & 1 = 1": ("8", "'&'", "a condition has columns"),
    "(" * DEPTH_MAX + "1": (str(DEPTH_MAX + 1), "'1'", "deep"),
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_valid_condition_is_translated_to_sql(text):
    assert condition_sql(text, COLUMNS) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused_with_its_position_in_one_sentence(text):
    at, found, why = BAD[text]
    with pytest.raises(InvalidField) as raised:
        condition_sql(text, COLUMNS)
    sentence = str(raised.value)
    assert sentence.startswith(f"where: at character {at}, {found}: ")
    assert why in sentence
    assert "\n" not in sentence


def test_no_text_can_leave_its_quotes_or_name_a_variable():
    spelt = {
        r"'\'": r"\u005c",
        r"'\'' or 1 = 1 --'": r"\u005c\u0027 or 1 = 1 --",
        "'${env:HOME}'": r"\u0024{env:HOME}",
        "'a\nb\x00'": r"a\u000ab\u0000",
        "'ü\U0001f600'": "ü\U0001f600",
    }
    for text, inside in spelt.items():
        assert condition_sql(f"queue = {text}", COLUMNS) == f"(`queue` = '{inside}')"


def test_long_chains_do_not_nest_and_texts_have_a_limit():
    many = " or ".join(["claims = 1"] * 700)
    assert condition_sql(many, COLUMNS).count("((") == 1
    assert condition_sql("claims = " + "+".join("1" * 2_000), COLUMNS).count("(") == 2
    assert condition_sql("not " * 1_001 + "true", COLUMNS) == "(NOT TRUE)"
    with pytest.raises(InvalidField, match=r"has 10,001 characters; at most 10,000"):
        condition_sql("1" * (CHARACTERS_MAX + 1), COLUMNS)


def test_no_function_on_the_list_reads_or_runs_anything():
    """Functions of Spark that do, by their names."""
    dangerous = "reflect java_method try_reflect input_file_name read_files assert_true raise_error"
    assert not set(dangerous.split()) & set(FUNCTIONS)


def test_the_docs_list_every_function():
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    listed = page.partition("- `abs`")[2].partition("Anything else is refused")[0]
    assert ["abs", *re.findall(r"`(\w+)`", listed)] == list(FUNCTIONS)
