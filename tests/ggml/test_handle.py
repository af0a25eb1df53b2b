"""A native object is freed once, after what was made from it, and a forgotten one is freed with a warning."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyggml_dflash.errors import BackendError, EngineClosed
from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.ffi import ffi, lib
from pyggml_dflash.ggml.handle import Handle, check, check_pointer


class Counted(Handle):
    """A handle on a byte of memory that notes when it is freed."""

    __slots__ = ("memory",)

    def __init__(self, freed: list[object], *parents: object) -> None:
        self.memory = ffi.new("char[1]")
        super().__init__(self.memory, freed.append, *parents)


@contextmanager
def finalizer_errors() -> Iterator[list[str]]:
    found: list[str] = []
    before = sys.unraisablehook

    def note(problem: Any) -> None:
        found.append(str(problem.exc_value))

    sys.unraisablehook = note
    try:
        yield found
    finally:
        sys.unraisablehook = before


def test_closing_frees_once() -> None:
    freed: list[object] = []
    handle = Counted(freed)
    assert not handle.closed
    assert handle.ptr == handle.memory
    handle.close()
    handle.close()
    assert freed == [handle.memory]
    assert handle.closed


def test_use_after_close_raises_and_names_the_class() -> None:
    handle = Counted([])
    handle.close()
    with pytest.raises(EngineClosed, match="Counted is closed"):
        _ = handle.ptr


def test_a_closed_handle_says_nothing_when_it_goes() -> None:
    freed: list[object] = []
    handle = Counted(freed)
    handle.close()
    del handle
    gc.collect()
    assert len(freed) == 1


def test_a_forgotten_handle_is_freed_with_a_warning() -> None:
    freed: list[object] = []
    handles = [Counted(freed)]
    with pytest.warns(ResourceWarning, match="Counted was not closed"):
        handles.clear()
    assert len(freed) == 1


def test_a_forgotten_handle_is_freed_even_where_warnings_are_errors() -> None:
    freed: list[object] = []
    handles = [Counted(freed)]
    with finalizer_errors() as errors, warnings.catch_warnings():
        warnings.simplefilter("error")
        handles.clear()
    assert errors == ["Counted was not closed"]
    assert len(freed) == 1


def test_a_handle_holds_what_it_was_made_from_until_it_is_freed() -> None:
    freed: list[object] = []
    parent = Counted(freed)
    memory = parent.memory
    alive = weakref.ref(parent)
    children = [Counted(freed, parent)]
    child_memory = children[0].memory
    del parent
    assert alive() is not None
    with pytest.warns(ResourceWarning):
        children.clear()
    assert alive() is None
    assert freed == [child_memory, memory]


def test_a_closed_handle_lets_go_of_what_it_was_made_from() -> None:
    parent = Counted([])
    child = Counted([], parent)
    alive = weakref.ref(parent)
    child.close()
    parent.close()
    del parent
    assert alive() is None


def test_nothing_is_owned_where_c_returned_nothing() -> None:
    with pytest.raises(BackendError, match="Context: ggml returned nothing"):
        check_pointer(ffi.NULL, "Context")
    with pytest.raises(BackendError, match="Handle"):
        Handle(ffi.NULL, lib.ggml_free)


def test_a_status_becomes_an_exception_with_its_meaning() -> None:
    check(lib.GGML_STATUS_SUCCESS, "graph compute")
    for status, words in (
        (lib.GGML_STATUS_ALLOC_FAILED, "allocation failed"),
        (lib.GGML_STATUS_ABORTED, "aborted"),
        (lib.GGML_STATUS_FAILED, f"ggml status {lib.GGML_STATUS_FAILED}"),
    ):
        with pytest.raises(BackendError, match=f"graph compute: {words}"):
            check(status, "graph compute")


def test_a_real_object_can_be_closed_and_forgotten() -> None:
    context = Context(4)
    context.close()
    with pytest.raises(EngineClosed, match="Context"):
        _ = context.ptr
    contexts = [Context(4)]
    with pytest.warns(ResourceWarning, match="Context was not closed"):
        contexts.clear()
