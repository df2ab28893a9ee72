"""A simulated disk behind the storage interface: it loses power, fills up, and fails a sync.

Every write into a file adds a version of each sector that it touches. After a power cut each sector
of each file has any of the versions that it had since the last sync, or the content of the last
sync, independently of all other sectors: this covers every subset and every order of writeback.
With `tearing`, a sector may also be half written, which real disks promise not to do.
Names are like sectors: one that was created or removed since the last sync of the directory exists
or does not. A failed sync marks its sectors clean although they may not be written, as Linux does.
"""

import errno
import itertools
import math
import os
import random
from collections.abc import Iterator
from typing import Any


class PowerCut(BaseException):
    """The power is cut; not an Exception, so that no code under test can catch it."""


class Inode:
    def __init__(self, size: int, sector_bytes: int, tearing: bool) -> None:
        self.sector_bytes = sector_bytes
        self.tearing = tearing
        self.cache = bytearray(size)
        self.stable = bytearray(size)
        self.dirty: dict[int, list[bytes]] = {}
        self.unwritten: dict[int, list[bytes]] = {}

    def write(self, offset: int, data: bytes) -> None:
        self.cache[offset : offset + len(data)] = data
        step = self.sector_bytes
        for at in range(offset - offset % step, offset + len(data), step):
            self.dirty.setdefault(at, []).append(bytes(self.cache[at : at + step]))

    def flush(self) -> None:
        for at in self.dirty:
            end = at + self.sector_bytes
            self.stable[at:end] = self.cache[at:end]
            self.unwritten.pop(at, None)
        self.dirty.clear()

    def lose(self) -> None:
        for at, versions in self.dirty.items():
            self.unwritten.setdefault(at, []).extend(versions)
        self.dirty.clear()

    def choices(self) -> dict[int, list[bytes]]:
        """The contents that an unsynced sector may have after a power cut, the synced one first."""
        found = {}
        for at in sorted(self.dirty.keys() | self.unwritten.keys()):
            stable = bytes(self.stable[at : at + self.sector_bytes])
            written = self.unwritten.get(at, []) + self.dirty.get(at, [])
            if self.tearing:
                written += [new[:40] + stable[40:] for new in written]
            found[at] = list(dict.fromkeys([stable, *written]))
        return found


class DiskMap:
    def __init__(self, disk: "Disk", inode: Inode) -> None:
        self._disk = disk
        self._inode = inode

    def __getitem__(self, key: slice) -> bytes:
        return bytes(self._inode.cache[key])

    def __setitem__(self, key: slice, value) -> None:
        start, stop, _ = key.indices(len(self._inode.cache))
        assert stop - start == len(value)
        self._disk.step()
        self._inode.write(start, bytes(value))


class DiskFile:
    def __init__(self, disk: "Disk", inode: Inode, name: str = "") -> None:
        self._disk = disk
        self._inode = inode
        self._is_list = name == "manifest"

    @property
    def size_bytes(self) -> int:
        return len(self._inode.cache)

    def map(self) -> DiskMap:
        return DiskMap(self._disk, self._inode)

    def read(self, offset: int, size_bytes: int) -> bytes:
        return bytes(self._inode.cache[offset : offset + size_bytes])

    def zero(self, start: int, end: int) -> None:
        self._disk.step()
        self._inode.write(start, bytes(end - start))

    def sync(self) -> None:
        self._disk.step()
        # Syncs of the manifest are counted apart: a failure there does not stop the stream.
        if self._is_list:
            self._disk.list_syncs += 1
            fails = self._disk.list_syncs in self._disk.failing_list_syncs
        else:
            self._disk.syncs += 1
            fails = self._disk.syncs in self._disk.failing_syncs
        if fails:
            self._inode.lose()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._inode.flush()

    def seal(self) -> None: ...

    def unload(self) -> None: ...

    def close(self) -> None: ...


class Disk:
    """A disk with one directory; it is the storage and the directory in one."""

    path = "disk"

    def __init__(
        self, *, sector_bytes: int = 4096, room_bytes: int = 1 << 40, tearing: bool = False
    ) -> None:
        self.sector_bytes = sector_bytes
        self.tearing = tearing
        self.room_bytes = room_bytes
        self.names_now: dict[str, Inode] = {}
        self.names_stable: dict[str, Inode] = {}
        self.archived: dict[str, bytes] = {}
        self.syncs = 0
        self.failing_syncs: set[int] = set()
        self.list_syncs = 0
        self.failing_list_syncs: set[int] = set()
        self.open_files_max = 1 << 30
        self.steps_left: int | None = None

    def step(self) -> None:
        """Count one operation on the disk, and cut the power if it was the last."""
        if self.steps_left is not None:
            if self.steps_left == 0:
                raise PowerCut
            self.steps_left -= 1

    def open(self, name: str, *, writable: bool):
        """Open the directory, or one of its files: the interface has one method for both."""
        if name == self.path:
            return self
        if name not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return DiskFile(self, self.names_now[name], name)

    def names(self) -> list[str]:
        return sorted(self.names_now)

    def create(self, name: str, size_bytes: int, head: bytes) -> DiskFile:
        self.step()
        if size_bytes > self.free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(self.names_now) >= self.open_files_max:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        inode = self.names_now[name + ".new"] = Inode(size_bytes, self.sector_bytes, self.tearing)
        self.step()
        inode.write(0, head)
        self.step()
        inode.flush()
        self.step()
        self.names_now[name] = self.names_now.pop(name + ".new")
        self.step()
        self.sync()
        return DiskFile(self, inode, name)

    def extend(self, name: str, size_bytes: int) -> None:
        inode = self.names_now[name]
        missing = size_bytes - len(inode.cache)
        if missing > 0:
            inode.cache += bytes(missing)
            inode.stable += bytes(size_bytes - len(inode.stable))

    def free_bytes(self) -> int:
        return self.room_bytes - self.used_bytes()

    def remove(self, name: str) -> None:
        self.step()
        del self.names_now[name]

    def archive(self, name: str, to: str) -> None:
        self.step()
        self.archived[f"{to}/{name}"] = bytes(self.names_now[name].cache)

    def sync(self) -> None:
        self.step()
        self.names_stable = dict(self.names_now)

    def close(self) -> None: ...

    def used_bytes(self) -> int:
        # In one step: the thread that syncs makes files meanwhile.
        return sum(len(inode.cache) for inode in list(self.names_now.values()))

    def after_cut(self, rng: random.Random) -> "Disk":
        """Return a disk in one of the states that a power cut may leave."""
        return self._outcome([rng.choice(options) for options in self._options()])

    def outcomes(self) -> Iterator["Disk"]:
        """Yield a disk in each of the states that a power cut may leave."""
        for picked in itertools.product(*self._options()):
            yield self._outcome(list(picked))

    def outcome_count(self) -> int:
        return math.prod(len(options) for options in self._options())

    def _unsynced_names(self) -> list[str]:
        names = sorted(self.names_now.keys() | self.names_stable.keys())
        return [n for n in names if self.names_now.get(n) is not self.names_stable.get(n)]

    def _inodes(self) -> list[Inode]:
        inodes = [*self.names_stable.values(), *self.names_now.values()]
        return list({id(inode): inode for inode in inodes}.values())

    def _options(self) -> list[list[Any]]:
        options: list[list[Any]] = [
            [self.names_stable.get(name), self.names_now.get(name)]
            for name in self._unsynced_names()
        ]
        for inode in self._inodes():
            options += inode.choices().values()
        return options

    def _outcome(self, picked: list[Any]) -> "Disk":
        chosen = iter(picked)
        names = dict(self.names_stable)
        for name in self._unsynced_names():
            inode = next(chosen)
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        copies = {}
        for inode in self._inodes():
            copy = copies[id(inode)] = Inode(len(inode.cache), self.sector_bytes, self.tearing)
            copy.stable[:] = inode.stable
            for at in inode.choices():
                content = next(chosen)
                copy.stable[at : at + len(content)] = content
            copy.cache[:] = copy.stable
        left = Disk(
            sector_bytes=self.sector_bytes, room_bytes=self.room_bytes, tearing=self.tearing
        )
        left.names_now = {name: copies[id(inode)] for name, inode in names.items()}
        left.names_stable = dict(left.names_now)
        return left
