"""Faults of the machine are told from those of environments and models by type, wherever they pass."""

from __future__ import annotations

import errno
import sqlite3

import pytest

from turnwise import errors
from turnwise.errors import (
    ContextOverflow,
    EnvironmentFault,
    GeneratorLost,
    HostFault,
    ServerFault,
    ToolFault,
    host_fault,
    scarcity,
)


def wrapped(fault, kind=EnvironmentFault):
    try:
        try:
            raise fault
        except BaseException as cause:
            raise kind("the shop is closed") from cause
    except Exception as outer:
        return outer


SCARCE = {
    "too many open files": OSError(errno.EMFILE, "x"),
    "the machine has too many open files": OSError(errno.ENFILE, "x"),
    "no more threads or processes": OSError(errno.EAGAIN, "x"),
    "no more threads": RuntimeError("can't start new thread"),
    "no memory left": OSError(errno.ENOMEM, "x"),
    "no space left on the disk": OSError(errno.ENOSPC, "x"),
    "quota": OSError(errno.EDQUOT, "x"),
    "ulimit -f": OSError(errno.EFBIG, "x"),
    "a tool died": ToolFault("a tool died"),
}


@pytest.mark.parametrize("words", list(SCARCE))
def test_what_ran_out_is_named_also_behind_another_error(words):
    for fault in (SCARCE[words], wrapped(SCARCE[words])):
        assert words in host_fault(fault) and words in scarcity(fault)


def test_the_limit_is_named(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    assert "too many open files (the limit is 40): raise the limit (ulimit -n" in scarcity(OSError(errno.EMFILE, "x"))


@pytest.mark.parametrize(
    "fault",
    [
        EnvironmentFault("OSError: [Errno 24] Too many open files"),  # what a guest printed
        EnvironmentFault("out of memory"),
        ValueError("no space left on device"),
        OSError("Too many open files"),
        PermissionError(errno.EACCES, "x"),
        TimeoutError(),
        ContextOverflow("too long"),
        wrapped(ConnectionResetError(), ContextOverflow),
        GeneratorLost("gone"),  # the run stops for it
    ],
)
def test_words_and_refusals_are_no_faults_of_the_machine(fault):
    assert host_fault(fault) == ""


def test_a_server_that_is_gone_is_one_but_no_scarcity():
    """A tool's function may be asked by the model to reach any address."""
    for fault in (ServerFault("no connection"), ConnectionRefusedError(errno.ECONNREFUSED, "refused"), BrokenPipeError()):
        assert host_fault(fault) and not scarcity(fault)


def test_a_call_that_wants_too_much_memory_is_to_blame_itself_while_there_is_room(monkeypatch):
    assert scarcity(MemoryError()) and not scarcity(MemoryError(), of_call=True) and not host_fault(MemoryError())
    monkeypatch.setattr(errors, "_has_room", lambda: False)
    assert "no memory left" in host_fault(MemoryError())


def test_a_full_disk_under_sqlite():
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert "no space left" in host_fault(raised.value)


def test_a_tool_fault_is_one():
    assert issubclass(ToolFault, HostFault)


def test_a_thread_without_room_for_its_stack_names_the_address_space(monkeypatch):
    resource = pytest.importorskip("resource")
    fault = RuntimeError("can't start new thread")
    for space, room, seen in ((10_000, False, True), (10_000, True, False), (resource.RLIM_INFINITY, False, False)):
        limits = {resource.RLIMIT_AS: space, resource.RLIMIT_NPROC: 96551}
        monkeypatch.setattr(resource, "getrlimit", lambda number, limits=limits: (limits[number],) * 2)
        monkeypatch.setattr(errors, "_has_room", lambda room=room: room)
        assert ("(ulimit -v, the limit is 10000)" in scarcity(fault)) is seen
        assert ("(the limit is 96551)" in scarcity(fault)) is not seen
