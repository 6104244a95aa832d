"""What a seccomp filter answers, without a kernel: so the filter of the other architecture can be tested too."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.tools.guest.seccomp import (
    ALLOW,
    AND,
    ANY_BIT,
    AT_LEAST,
    EQUAL,
    ERRNO,
    GREATER,
    KILL,
    LOAD,
    NOTIFY,
    RETURN,
    Instruction,
)  # fmt: skip


def verdict(program: Sequence[Instruction], arch: int, number: int, *arguments: int) -> int:
    """The word that the filter returns for one call."""
    words = {0: number & 0xFFFFFFFF, 4: arch} | {16 + 8 * n: value & 0xFFFFFFFF for n, value in enumerate(arguments)}
    at, value = 0, 0
    while True:
        code, yes, no, constant = program[at]
        if code == RETURN:
            return constant
        if code == LOAD:
            value = words.get(constant, 0)
        elif code == AND:
            value &= constant
        else:
            holds = {EQUAL: value == constant, GREATER: value > constant, AT_LEAST: value >= constant,
                     ANY_BIT: bool(value & constant)}[code]  # fmt: skip
            at += yes if holds else no
        at += 1


def word(answer: int) -> int | str:
    """``allowed``, ``asked``, ``killed``, or the error number that the caller gets (0: nothing is done)."""
    names = {ALLOW: "allowed", NOTIFY: "asked", KILL: "killed"}
    return names.get(answer) or answer - ERRNO
