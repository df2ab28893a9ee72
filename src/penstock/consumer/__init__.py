"""The consumer loop: pulls claims one by one, extends each while it is worked on, and ends it.

    for claim in queues.consume("orders"):
        work(claim)

A claim is deleted when the loop asks for the next one. If the loop is left instead, by an exception
or by `break`, the message is released, after a delay that doubles with every time it was received.
`blocking` has the loop for threads, `awaited` the one for asyncio, `options` what both share. In
each, a keeper holds the claim at hand; it does not refer to its consumer, so that a consumer that
nothing refers to any more is collected and its claim released.
"""
