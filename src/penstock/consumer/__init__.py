"""The consumer loop: pulls claims one by one, extends each while it is worked on, and ends it.

    for claim in queues.consume("orders"):
        work(claim)

A claim is deleted when the loop asks for the next one. If the loop is left instead, by an exception
or by `break`, the message is released, after a delay that doubles with every time it was received.
`loop` has what the loop does, as calls; `blocking` makes them in a thread and `awaited` in a task.
In both of them a keeper extends the current claim. It holds no reference to its consumer, so that a
consumer without other references is collected and its claim released.
"""
