"""Two stores as two shards: what departs from one is kept, through anything, until it arrives."""

import pytest

from penstock.backends.engine import upkeep as upkeep_module
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import Carried
from penstock.core.receipts import MessageIds
from penstock.errors import RequestError
from penstock.journal import codec
from penstock.journal.reader import JournalReader
from penstock.journal.verify import verify
from penstock.service import CreateQueue, Delete, DeleteQueue, History, Pull, Push, Release
from tests.backends.engine.life import exact_replay, portrait, same

SHARD, OTHER = 3, 7
