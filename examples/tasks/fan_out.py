"""A fan-out with a final task: words are counted part by part, and the counts added up at the end.

    penstock worker fan_out:app
    python fan_out.py

It prints:

    the most frequent of 17 words: the 4, and 2, of 2
"""

from collections import Counter

from penstock.tasks import TaskApp, chain, group

app = TaskApp(name="words")

TEXT = [
    "the sluice and the gate",
    "of the river",
    "hold and feed the mill",
    "of stone by day",
]


@app.task
async def clean(line: str) -> list[str]:
    """The words of a line."""
    return line.lower().split()


@app.task
def count(words: list[str]) -> dict[str, int]:
    """How often each word occurs."""
    return dict(Counter(words))


@app.task(result_ttl=60)
def add_up(parts: list[dict[str, int]], show: int) -> str:
    """All counts together; `parts` has one for each line, in order."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    shown = ", ".join(f"{word} {times}" for word, times in total.most_common(show))
    return f"the most frequent of {total.total()} words: {shown}"


def main() -> None:
    """Pushes a chain of two tasks for each line, and a final task that gets all the results."""
    lines = [chain(clean.prepare(line), count.prepare()) for line in TEXT]
    print(group(*lines, final=add_up.prepare(show=3)).push().get(timeout=60))


if __name__ == "__main__":
    main()
