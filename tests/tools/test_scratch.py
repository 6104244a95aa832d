"""Scratch directories that code has filled with anything are measured, bounded and removed; the pool survives."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.tool_pools import LIMITS, use

from turnwise.errors import ToolFault
from turnwise.tools import PythonTool
from turnwise.tools.guest import scratch
from turnwise.tools.guest.scratch import SET_FLAGS, Trash, remove_tree

pytestmark = pytest.mark.filterwarnings("ignore:untrusted code is NOT isolated")
PATIENT = replace(LIMITS, wall_seconds=60.0)
ROOMY = replace(PATIENT, scratch_bytes=32 << 20)  # a directory takes a block on most file systems
IMMUTABLE = 0x10
DEEP = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\n'deep'"


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def nest(base: Path, depth: int, name: str = "d" * 100) -> None:
    """A chain of directories whose path is far longer than the kernel accepts."""
    handle = os.open(base, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=handle)
        below = os.open(name, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "base" / "tree"
    path.mkdir(parents=True)
    return path


def test_nested_directories_are_removed(tree: Path) -> None:
    nest(tree, 1500)
    assert remove_tree(str(tree)) and not os.listdir(tree.parent)


def test_a_wide_tree_is_removed_in_slices(tree: Path) -> None:
    for n in range(40):
        (tree / f"{n}").mkdir()
        for m in range(50):
            (tree / f"{n}/{m}").touch()
    trash, slices = Trash(str(tree.parent)), 0
    trash.add("tree")
    while not trash.work(0.0):
        slices += 1
    assert slices > 100 and not os.listdir(tree.parent)


def test_odd_names_and_modes_are_removed(tree: Path) -> None:
    for number in range(1, 256):
        if number not in (0x2E, 0x2F):
            (Path(os.fsdecode(os.fsencode(tree) + b"/" + bytes([number, 0xFF])))).touch()
    for mode in (0, 0o100, 0o200, 0o300, 0o400, 0o500):
        closed = tree / f"mode{mode}"
        closed.mkdir()
        (closed / "inner").mkdir()
        (closed / "inner" / "file").touch(0)
        (closed / "inner").chmod(mode)
        closed.chmod(mode)
    os.mkfifo(tree / "pipe")
    assert remove_tree(str(tree)) and not os.listdir(tree.parent)


def test_links_are_removed_and_their_targets_stay(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    os.symlink(outside, tree / "folder")
    os.symlink(outside / "file", tree / "file")
    os.symlink("/", tree / "root")
    os.link(outside / "file", tree / "hard")
    assert remove_tree(str(tree))
    assert (outside / "file").read_text() == "kept"
    os.symlink(outside, tree)
    assert remove_tree(str(tree)) and (outside / "file").exists()  # the tree itself became a link


def test_immutable_files_are_removed_where_we_may(tree: Path) -> None:
    (tree / "inner").mkdir()
    (tree / "inner" / "file").touch()
    handle = os.open(tree / "inner" / "file", os.O_RDONLY)
    try:
        fcntl.ioctl(handle, SET_FLAGS, struct.pack("l", IMMUTABLE))
    except OSError as error:
        pytest.skip(f"files cannot be made immutable here: {error}")
    finally:
        os.close(handle)
    assert remove_tree(str(tree))


def test_what_cannot_be_removed_is_reported_and_nothing_raises(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    (tree / "file").touch()
    (tree / "folder").mkdir()
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    assert not remove_tree(str(tree))
    assert not remove_tree("/no/such/folder/at/all") or not Path("/no").exists()


def test_use_counts_blocks_entries_and_depth(tree: Path) -> None:
    (tree / "file").write_bytes(b"x" * 100_000)
    assert not scratch.used(str(tree), 1 << 20) and scratch.used(str(tree), 50_000)
    for n in range(20):
        (tree / f"{n}").mkdir(mode=0o300)
    assert not scratch.used(str(tree), 1 << 20, 21) and scratch.used(str(tree), 1 << 20, 20)
    nest(tree / "0", 100)
    assert scratch.used(str(tree), 1 << 30)


# ------------------------------------------------------------------- in a pool


def test_nested_folders_do_not_end_the_pool(tool: PythonTool) -> None:
    """The clean-up raised RecursionError, which ended the pool and every other session, and left the folders behind."""
    with PythonTool(ROOMY, isolation=tool.isolation, spare=0) as own:
        with own.open() as other:
            other.run("kept = 1")
            with own.open() as session:
                assert session.run(DEEP).output == "'deep'"
            assert other.run("kept").output == "1"
        zygote = own._zygote
        assert zygote is not None and zygote.alive
        base = zygote._scratch
        assert not base or eventually(lambda: not os.listdir(base)), os.listdir(base)
    assert not base or not Path(base).exists()


def test_a_killed_pool_leaves_no_folder(tool: PythonTool) -> None:
    with PythonTool(ROOMY, isolation=tool.isolation, spare=0) as own:
        session = own.open()
        session.run(DEEP)
        zygote = own._zygote
        assert zygote is not None
        base = zygote._scratch
        os.kill(zygote._process.pid, signal.SIGKILL)
        zygote._process.wait()
        with pytest.raises(ToolFault):
            eventually(lambda: session.run("2 + 2").output != "4")
        assert session.run("2 + 2").output == "4" and own._zygote is not zygote
    assert not base or not Path(base).exists()


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(99): open(str(n), 'wb').write(b'x' * (1 << 20))",
        "n = 0\nwhile True:\n  open(str(n), 'w').close(); n += 1",
        "import os\nx = []\nfor n in range(40):\n  x.append(open('f', 'wb'))\n  os.remove('f')\n"
        "  x[n].write(b'x' * (1 << 20))\n  x[n].flush()",
        "import os\nos.mkdir('d', 0o300)\nfor n in range(40): open(f'd/{n}', 'wb').write(b'x' * (1 << 20))",
    ],
)
def test_scratch_is_bounded_on_every_rung(tool: PythonTool, code: str) -> None:
    with PythonTool(PATIENT, isolation=tool.isolation, spare=0) as own, own.open() as session:
        result = session.run(f"{code}\nimport time\ntime.sleep(60)")
        words = ("scratch limit of 4096 KiB or 4096 files", "No space left on device")
        assert any(word in result.output for word in words), result.output
        assert session.run("2 + 2").output == "4"


# ---------------------------------------------------------- memory of a session

CHILDREN = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        block = []
        while True: block.append(bytearray(os.urandom(1 << 16)) * 16)
time.sleep(60)
"""
SHARING = """
import os, time
block = bytearray(os.urandom(1 << 16)) * 1024  # 64 MiB, which children share until they write
for _ in range(5):
    if os.fork() == 0:
        time.sleep(60)
time.sleep(0.3)
len(block) >> 20
"""


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces", "limits"])
def test_memory_is_capped_for_all_processes_together(name: str) -> None:
    """One session took 4.2 GB through its children, each of them below the limit of a process."""
    with PythonTool(PATIENT, isolation=use(name).isolation, spare=0) as own, own.open() as session:
        result = session.run(CHILDREN)
        assert "memory limit of 256 MiB for all processes together" in result.output
        assert session.run("2 + 2").output == "4"


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces"])
def test_memory_that_children_share_counts_once(name: str) -> None:
    with PythonTool(PATIENT, isolation=use(name).isolation, spare=0) as own, own.open() as session:
        assert session.run(SHARING).output == "64"


def test_memory_shared_on_purpose_is_capped() -> None:
    code = (
        "import mmap, os, time\nfor _ in range(5):\n  m = mmap.mmap(-1, 1 << 27)\n  if os.fork() == 0:\n"
        "    for i in range(0, 1 << 27, 4096): m[i] = 1\n    time.sleep(60)\n  m.close()\ntime.sleep(60)"
    )
    with PythonTool(PATIENT, isolation=use("namespaces").isolation, spare=0) as own, own.open() as session:
        assert "memory limit of 256 MiB for all processes together" in session.run(code).output
