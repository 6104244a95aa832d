"""A machine that runs out of something is told so in one line."""

from __future__ import annotations

import errno

import pytest

from turnwise.cli.main import FUNCTIONS, explain_scarcity, main

FAULTS = {
    "too many open files": OSError(errno.EMFILE, "Too many open files", "x"),
    "no space left": OSError(errno.ENOSPC, "No space left on device"),
    "cannot be written to": OSError(errno.EROFS, "Read-only file system", "runs"),
    "was closed from elsewhere": OSError(errno.EBADF, "Bad file descriptor"),
    "permission denied": PermissionError(errno.EACCES, "Permission denied", "runs"),
    "no memory left": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "no memory left:": MemoryError(),
    "for a library": ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    "no more threads": RuntimeError("can't start new thread"),
}


@pytest.mark.parametrize("said", list(FAULTS))
def test_one_line_and_no_traceback(said, monkeypatch, capsys):
    def fail(argv):
        try:
            raise FAULTS[said]
        except Exception as fault:
            raise RuntimeError("a library wrapped it") from fault

    monkeypatch.setitem(FUNCTIONS, "list", fail)
    assert main(["list"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), OSError("odd"), ImportError("no module named x")])
def test_errors_of_another_kind_keep_their_traceback(fault, monkeypatch):
    def fail(argv):
        raise fault

    monkeypatch.setitem(FUNCTIONS, "list", fail)
    assert not explain_scarcity(fault)
    with pytest.raises(type(fault)):
        main(["list"])
