"""The table of element types is ggml's."""

from __future__ import annotations

import pytest

from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml.element import REMOVED_TYPES, ElementType
from pyggml_dflash.ggml.ffi import c_string, lib


def test_every_number_is_a_type_or_one_that_ggml_removed() -> None:
    known = {int(t) for t in ElementType}
    assert known | set(REMOVED_TYPES) == set(range(lib.GGML_TYPE_COUNT))
    assert not known & set(REMOVED_TYPES)
    assert all(lib.ggml_blck_size(number) == 0 for number in REMOVED_TYPES)


@pytest.mark.parametrize("element", ElementType, ids=lambda t: t.label)
def test_sizes_and_names_are_those_of_ggml(element: ElementType) -> None:
    assert element.block == lib.ggml_blck_size(element)
    assert element.block_bytes == lib.ggml_type_size(element)
    assert element.label == c_string(lib.ggml_type_name(element)).lower()
    assert element.is_quantized == lib.ggml_is_quantized(element)
    assert element.row_bytes(512) == lib.ggml_row_size(element, 512)


def test_a_row_of_half_a_block_is_refused() -> None:
    assert ElementType.Q4_0.row_bytes(64) == 36
    with pytest.raises(UsageError, match="row of 48 elements is not a whole number of q4_0 blocks of 32"):
        ElementType.Q4_0.row_bytes(48)
    with pytest.raises(UsageError, match="-1 elements"):
        ElementType.F32.row_bytes(-1)
