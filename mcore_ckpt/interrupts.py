"""Distinguishes exceptions that a signal handler has raised in the midst of our code from errors of our code.

A handler of the training (a preemption, an alarm, Ctrl-C) may raise any exception, wherever the main thread is. Such an
exception does not mean that a save or load has failed, so this package passes the exception on to the caller unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


def is_interrupt(error: BaseException) -> bool:
    """True if a signal handler has raised this exception, or if it ends the program (KeyboardInterrupt, SystemExit)."""
    return not isinstance(error, Exception) or _passes_handler(error.__traceback__)


def _passes_handler(trace: TracebackType | None) -> bool:
    """True if the traceback has a signal handler: a function that got the interrupted frame as an argument."""
    while trace is not None:
        frame = trace.tb_frame
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]  # *args
        given = [frame.f_locals.get(name) for name in names]
        interrupted = frame.f_back
        if interrupted is not None and any(
            each is interrupted or (isinstance(each, tuple) and interrupted in each) for each in given
        ):
            return True
        trace = trace.tb_next
    return False


def chain_of(error: BaseException, outer: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes, up to `outer`, which the caller was already handling."""
    todo, seen = [error], set[int]()
    while todo:
        each = todo.pop()
        if each is outer or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [link for link in (each.__context__, each.__cause__) if link is not None]


@contextmanager
def interrupts_as_themselves() -> Iterator[None]:
    """Raises an interrupt of the block unchanged, even if code in between has turned it into another error."""
    outer = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        found = next(filter(is_interrupt, chain_of(error, outer)), None)
        if found is None or found is error:
            raise
        raise found  # noqa: B904 - it has its own cause
