"""Priorities: an urgent task runs before others that wait, and a delayed task is never early.

Run this first, so that all tasks wait, and then a worker with one thread:

    python priorities.py
    penstock worker priorities:app --threads 1 --burst

The worker prints:

    urgent
    usual
    usual
    whenever
"""

from penstock.tasks import TaskApp

app = TaskApp(name="demo")


@app.task
def say(text: str) -> None:
    """Prints the text."""
    print(text, flush=True)


def main() -> None:
    """Pushes tasks in another order than that in which they run."""
    say.with_options(priority=0).push("whenever")
    say.with_options(priority=5).push_many([("usual",), ("usual",)])
    say.push_in(3_600, "in an hour")
    say.with_options(priority=9).push("urgent")


if __name__ == "__main__":
    main()
