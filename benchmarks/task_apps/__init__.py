"""The same two tasks for each of the task queues that `benchmarks.tasks` compares.

Each module has the tasks `nothing` and `sleep_10ms`, and `enqueue(task, numbers)` that pushes one
call after the other. The store and the ledger are given by environment variables.
"""
