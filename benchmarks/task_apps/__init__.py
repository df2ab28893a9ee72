"""The same two tasks for each of the task queues that `benchmarks.tasks` compares.

Each module has the tasks `nothing` and `doze`, and `enqueue(task, numbers)` that pushes one call
after the other. Where the store is, and where the ledger is, stands in the environment.
"""
