"""A web service that takes mails to be sent: each request becomes a message.

pip install fastapi uvicorn
uvicorn app:app
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Header, HTTPException, Request
from pydantic import BaseModel

import penstock
import penstock.aio

URL = os.environ.get("PENSTOCK_URL", "file:./data")


class Mail(BaseModel):
    """What a caller sends."""

    to: str
    text: str = ""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens the queues before the first request, and closes them after the last."""
    async with await penstock.aio.connect(URL) as queues:
        await queues.create("mails", max_messages=100_000)
        app.state.queues = queues
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/mails", status_code=202)
async def push_mail(
    mail: Mail, request: Request, idempotency_key: str | None = Header(default=None)
) -> dict[str, str]:
    """Pushes a mail; the answer comes when it is on the disk."""
    body = json.dumps(mail.model_dump()).encode()
    try:
        # The same key within five minutes gives the first message's id, and adds nothing.
        pushed = await request.app.state.queues.push("mails", body, dedup_id=idempotency_key)
    except penstock.QueueFull:
        raise HTTPException(503, "too many mails are waiting", {"Retry-After": "60"}) from None
    return {"id": pushed.id}


@app.get("/health")
async def health(request: Request) -> dict[str, int]:
    """How many mails wait."""
    stats = await request.app.state.queues.stats("mails")
    return {"waiting": stats.visible}
