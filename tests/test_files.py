"""Row 28: every path that Penstock opens, as another user of the machine may have prepared it."""

import os
import stat
from pathlib import Path

import pytest

from penstock.files import (
    OtherOwner,
    check_named,
    make_directories,
    make_directory_in,
    open_in,
    read_in,
    read_named,
    remove_in,
    write_in,
)

NOBODY = 65_534


def tree(directory):
    """Every path below a directory: its kind and mode, its owner and its content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found[str(path)] = (about.st_mode, about.st_uid, about.st_nlink, content)
    return found


def prepare(kind: str, path: Path, target: Path) -> None:
    """Puts there what another user could have put there."""
    match kind:
        case "link to a file" | "link to a directory":
            path.symlink_to(target)
        case "link that leads nowhere":
            path.symlink_to(target.with_name("missing"))
        case "named pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "file":
            path.write_bytes(b"not mine")
        case "second name":
            path.hardlink_to(target)
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


@pytest.fixture
def target(tmp_path):
    """A file that nothing may read or change."""
    path = tmp_path / "elsewhere" / "target"
    path.parent.mkdir()
    path.write_bytes(b"precious")
    return path


@pytest.fixture
def root(tmp_path):
    """A directory that a person names."""
    path = tmp_path / "root"
    path.mkdir()
    return path


READS = {"read": lambda root: read_in(root, "name")}
CHANGES = {
    "open to change": lambda root: os.close(open_in(root, "name", os.O_RDWR | os.O_CREAT)),
    "open to empty": lambda root: os.close(
        open_in(root, "name", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    ),
    "open to append": lambda root: os.close(
        open_in(root, "name", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ),
}
LINKS = ["link to a file", "link that leads nowhere", "named pipe", "directory"]


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("way", [*READS, *CHANGES])
def test_only_a_regular_file_is_opened_and_nothing_is_changed(root, target, kind, way):
    prepare(kind, root / "name", target)
    before = tree(root.parent)
    with pytest.raises(OSError, match=r"name is .*, not a regular file"):
        {**READS, **CHANGES}[way](root)
    assert tree(root.parent) == before


@pytest.mark.parametrize("way", CHANGES)
def test_a_file_with_a_second_name_elsewhere_is_not_written(root, target, way):
    prepare("second name", root / "name", target)
    before = tree(root.parent)
    with pytest.raises(OSError, match="name has another name as well"):
        CHANGES[way](root)
    assert tree(root.parent) == before


@pytest.mark.parametrize("kind", [*LINKS[:3], "file", "second name"])
def test_a_file_that_is_written_whole_replaces_what_has_its_name(root, target, kind):
    prepare(kind, root / "name", target)
    write_in(root, "name", b"new")
    assert read_in(root, "name") == b"new"
    assert (root / "name").lstat().st_nlink == 1
    assert target.read_bytes() == b"precious"
    assert [each.name for each in root.iterdir()] == ["name"]


def test_the_draft_of_a_file_is_not_written_through_a_link(root, target):
    prepare("link to a file", root / f".name.{os.getpid()}", target)
    write_in(root, "name", b"new")
    assert target.read_bytes() == b"precious"


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_no_draft(root):
    (root / "name").mkdir()
    with pytest.raises(IsADirectoryError):
        write_in(root, "name", b"new")
    assert [each.name for each in root.iterdir()] == ["name"]


@pytest.mark.parametrize("kind", ["link to a directory", "named pipe", "file"])
def test_no_directory_on_the_way_may_be_something_else(root, target, kind):
    prepare(kind, root / "between", target.parent)
    before = tree(root.parent)
    for act in (
        lambda: read_in(root, "between/target"),
        lambda: write_in(root, "between/target", b"new"),
        lambda: remove_in(root, "between/target"),
        lambda: make_directory_in(root, "between"),
        lambda: make_directory_in(root, "between/new"),
        lambda: os.close(open_in(root, "between", os.O_DIRECTORY)),
    ):
        with pytest.raises(OSError, match=r"between is .*, not a directory"):
            act()
    assert tree(root.parent) == before


def test_removing_a_link_removes_the_link_itself(root, target):
    prepare("link to a file", root / "name", target)
    assert remove_in(root, "name")
    assert not remove_in(root, "name")
    assert target.read_bytes() == b"precious"


def test_a_larger_file_than_expected_is_refused(root):
    (root / "name").write_bytes(bytes(11))
    with pytest.raises(OSError, match="name is larger than 10 bytes"):
        read_in(root, "name", 10)
    with pytest.raises(OSError, match="name is larger than 10 bytes"):
        read_named(root / "name", 10)


def test_what_is_made_is_for_this_user_only(root):
    made = make_directories(root / "a" / "b")
    make_directory_in(root, "a/c")
    write_in(root, "a/file", b"")
    os.close(open_in(root, "a/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    assert made == [str(root / "a"), str(root / "a" / "b")]
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in root.rglob("*")}
    assert modes == {"a": 0o700, "b": 0o700, "c": 0o700, "file": 0o600, "output": 0o600}


def test_a_file_that_a_person_named_may_be_a_link_of_this_user(root, target):
    (root / "link").symlink_to(target)
    assert read_named(root / "link", 100) == b"precious"


@pytest.mark.parametrize("kind", ["named pipe", "directory"])
def test_a_file_that_a_person_named_is_a_regular_one(root, target, kind):
    prepare(kind, root / "name", target)
    with pytest.raises(OSError, match=r"name is .*, not a regular file"):
        read_named(root / "name", 100)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["file", "second name", "directory", "device", "link to a file"])
def test_what_belongs_to_another_user_is_refused(root, target, kind):
    prepare(kind, root / "name", target)
    os.lchown(root / "name", NOBODY, NOBODY)
    before = tree(root.parent)
    for act in (*READS.values(), *CHANGES.values()):
        with pytest.raises(OSError, match=r"name (belongs to user 65534|is .*, not a regular)"):
            act(root)
    with pytest.raises(OSError, match=r"name (belongs to user 65534|is .*, not a directory)"):
        make_directory_in(root, "name")
    with pytest.raises(OtherOwner, match=r"belongs to user 65534, .* run it as user 65534"):
        check_named(root / "name")
    with pytest.raises(OtherOwner):
        read_named(root / "name", 100)
    assert tree(root.parent) == before


@pytest.mark.root
def test_a_directory_of_another_user_on_the_way_is_refused(root):
    (root / "between").mkdir()
    (root / "between" / "name").write_bytes(b"mine")
    os.chown(root / "between", NOBODY, NOBODY)
    with pytest.raises(OtherOwner, match="between belongs to user 65534"):
        read_in(root, "between/name")


@pytest.mark.root
def test_a_link_of_another_user_to_a_directory_of_this_one_is_refused(root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    check_named(link)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(OtherOwner, match="belongs to user 65534"):
        check_named(link)
    check_named(link, other_owner=True)


@pytest.mark.root
def test_the_files_of_a_directorys_owner_are_accepted_where_the_directory_was(root):
    (root / "name").write_bytes(b"theirs")
    for path in (root, root / "name"):
        os.chown(path, NOBODY, NOBODY)
    with pytest.raises(OtherOwner):
        check_named(root)
    check_named(root, other_owner=True)
    assert read_in(root, "name") == b"theirs"
