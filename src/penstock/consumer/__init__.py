"""The consumer loop: pulls claims one by one, extends each while it is worked on, and ends it.

    for claim in queues.consume("orders"):
        work(claim)

A claim is deleted when the loop asks for the next one. If the loop is left instead, by an exception
or by `break`, the message is released, after a delay that doubles with every time it was received.
`blocking` has the loop for threads, `awaited` the one for asyncio, `options` the parts that both
use. In each, a keeper extends the current claim. It holds no reference to its consumer, so that a
consumer without other references is collected and its claim released.
"""
