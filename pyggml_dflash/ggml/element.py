"""Element types of ggml tensors: their numbers in files and how elements pack into bytes. Layer 1.

A type stores `block` consecutive elements of a row in `block_bytes` bytes. The table is plain data,
so that a file can be checked without the native library; a test holds it against ggml's own.
"""

from __future__ import annotations

import enum

from pyggml_dflash.errors import UsageError


class ElementType(enum.IntEnum):
    """A ggml element type; its integer value is the one that ggml and GGUF files use."""

    block: int  # elements per block, 1 where every element stands alone
    block_bytes: int

    def __new__(cls, number: int, block: int = 1, block_bytes: int = 1) -> ElementType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block, member.block_bytes = block, block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18

    @property
    def label(self) -> str:
        """ggml's name in lower case, as options and reports write it: 'q4_0', 'q4_k'."""
        return self.name.lower()

    @property
    def is_quantized(self) -> bool:
        """Whether elements share a block, so that no single one can be addressed."""
        return self.block > 1

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements; UsageError when `n` is no whole number of blocks."""
        if n < 0 or n % self.block:
            raise UsageError(
                f"a row of {n} elements is not a whole number of {self.label} blocks of {self.block}"
            )
        return n // self.block * self.block_bytes


# Numbers that older files carry and ggml has dropped, with what to do about such a file.
REMOVED_TYPES = {
    4: "Q4_2, which ggml has dropped; quantise the model again",
    5: "Q4_3, which ggml has dropped; quantise the model again",
    31: "Q4_0_4_4, which ggml has dropped; use the Q4_0 file, which is repacked when loaded",
    32: "Q4_0_4_8, which ggml has dropped; use the Q4_0 file, which is repacked when loaded",
    33: "Q4_0_8_8, which ggml has dropped; use the Q4_0 file, which is repacked when loaded",
    36: "IQ4_NL_4_4, which ggml has dropped; use the IQ4_NL file, which is repacked when loaded",
    37: "IQ4_NL_4_8, which ggml has dropped; use the IQ4_NL file, which is repacked when loaded",
    38: "IQ4_NL_8_8, which ggml has dropped; use the IQ4_NL file, which is repacked when loaded",
}
