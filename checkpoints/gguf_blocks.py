"""The blocks that GGUF tensors consist of, as numbers: codes in groups with scales and minimums, or values.

A reader gets [rows, blocks, bytes of a block] uint8. Source of the layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .stored import INT4, MXFP4_VALUES, Grouping, Groups

Bytes = NDArray[np.uint8]

# What the 4-bit codes of IQ4_NL and IQ4_XS stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockReader:
    grouping: Grouping
    read: Callable[[Bytes], Groups]


def _halves(blocks: Bytes, start: int, count: int = 1) -> NDArray[np.float16]:
    """[rows, blocks, count] float16, which begin at a byte of each block."""
    found: NDArray[np.float16] = blocks.view(np.float16)[..., start // 2 : start // 2 + count]
    return found


def _words(part: Bytes) -> NDArray[np.uint64]:
    """Bytes [rows, blocks, 8 * words] as [rows * blocks, words], which NumPy works on eight at a time."""
    return np.ascontiguousarray(part).view(np.uint64).reshape(-1, part.shape[-1] // 8)


def _empty(blocks: Bytes, num_bytes: int) -> tuple[Bytes, NDArray[np.uint64]]:
    """Room for so many bytes of each block, [rows, bytes], and the same memory as words of each block."""
    found = np.empty((len(blocks), blocks.shape[1] * num_bytes), np.uint8)
    return found, found.view(np.uint64).reshape(-1, num_bytes // 8)


def _bytes_of(value: int) -> np.uint64:
    """A word of eight equal bytes."""
    return np.uint64(value * 0x0101_0101_0101_0101)


_LOW, _HIGH, _FOUR = _bytes_of(15), _bytes_of(240), np.uint64(4)


def _low(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return word & _LOW


def _high(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return word >> _FOUR & _LOW


def _q4_0(blocks: Bytes) -> Groups:
    scales = _halves(blocks, 0)[..., 0]
    with np.errstate(over="ignore"):
        return Groups(blocks[..., 2:], scales, scales * np.float16(-8))


def _q4_1(blocks: Bytes) -> Groups:
    scales, minimums = np.moveaxis(_halves(blocks, 0, 2), -1, 0)
    return Groups(blocks[..., 4:], scales, minimums)


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(blocks[..., 2:], _halves(blocks, 0)[..., 0])


def _mxfp4(blocks: Bytes) -> Groups:
    return Groups(blocks[..., 1:], powers_of_two(blocks[..., 0], -128))


def powers_of_two(exponents: Bytes, bias: int) -> NDArray[np.float16]:
    """2 ** (exponent + bias). Of float16, what is too large becomes infinite, and what is too small zero."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), exponents.astype(np.int32) + bias).astype(np.float16)


def _q5_0(blocks: Bytes) -> Groups:
    return Groups(_five_bits(blocks[..., 2:6], blocks[..., 6:], _SIGN_BITS), _halves(blocks, 0)[..., 0])


def _q5_1(blocks: Bytes) -> Groups:
    scales, minimums = np.moveaxis(_halves(blocks, 0, 2), -1, 0)
    return Groups(_five_bits(blocks[..., 4:8], blocks[..., 8:], _FIFTH_BITS), scales, minimums)


def _spread(of_bit: tuple[int, int]) -> NDArray[np.uint64]:
    """For each byte a word, which has one of two bytes for each bit."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.array(of_bit, np.uint8)[bits].view(np.uint64)[:, 0]


# What a fifth bit adds to a code of four: 16 if it is set; or, with 16 subtracted from all, the sign if it is not.
_FIFTH_BITS, _SIGN_BITS = _spread((0, 16)), _spread((240, 0))


def _five_bits(fifth: Bytes, nibbles: Bytes, table: NDArray[np.uint64]) -> NDArray[np.int8]:
    """[rows, blocks, 32], from one bit for each value and the other four."""
    codes, (values, words) = _words(nibbles), _empty(nibbles, 32)
    bits = fifth.reshape(-1, 4)
    for word in range(4):
        code = codes[:, word % 2]
        np.bitwise_or(_low(code) if word < 2 else _high(code), table[bits[:, word]], out=words[:, word])
    return values.view(np.int8).reshape(*nibbles.shape[:2], 32)


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(blocks[..., 2:].view(np.int8), _halves(blocks, 0)[..., 0])


def _k_scales(blocks: Bytes, middle_code: float) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Scales and minimums [rows, 8 * blocks], from 6 bits for each group and a factor of all.

    Minimums make up for the rounding of scales to float16 where codes are in the middle.
    """
    words = np.ascontiguousarray(blocks[..., 4:16]).view(np.uint32)
    codes = np.empty((2, *blocks.shape[:2], 2), np.uint32)
    for kind in range(2):
        low, high = words[..., kind], words[..., 2] >> np.uint32(4 * kind)
        codes[kind, ..., 0] = low & 0x3F3F3F3F
        codes[kind, ..., 1] = high & 0x0F0F0F0F | low >> 2 & 0x30303030
    six_bits = codes.view(np.uint8).astype(np.float32)
    factors = _halves(blocks, 0, 2).astype(np.float32)
    exact, least = six_bits[0] * factors[..., :1], six_bits[1] * factors[..., 1:]
    scales = _rounded(exact)
    with np.errstate(invalid="ignore"):
        minimums = _rounded((exact - scales) * np.float32(middle_code) - least)
    return scales.reshape(len(blocks), -1), minimums.reshape(len(blocks), -1)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """What is too large for float16 becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16)


def _q4_k(blocks: Bytes) -> Groups:
    codes, (values, words) = _words(blocks[..., 16:]), _empty(blocks, 128)
    for pair in range(4):  # of groups, in 32 bytes; ours have 16 bytes each
        for word in range(2):
            first, second = codes[:, 4 * pair + word], codes[:, 4 * pair + 2 + word]
            np.bitwise_or(_low(first), second << _FOUR & _HIGH, out=words[:, 4 * pair + word])
            np.bitwise_or(_high(first), second & _HIGH, out=words[:, 4 * pair + 2 + word])
    return Groups(values.reshape(len(blocks), -1, 16), *_k_scales(blocks, 7.5))


def _q5_k(blocks: Bytes) -> Groups:
    fifth, codes, (values, words) = _words(blocks[..., 16:48]), _words(blocks[..., 48:]), _empty(blocks, 256)
    sixteen = _bytes_of(16)
    for group in range(8):
        for word in range(4):
            code = codes[:, 4 * (group // 2) + word]
            bits = fifth[:, word] << np.uint64(4 - group) if group < 4 else fifth[:, word] >> np.uint64(group - 4)
            nibble = _high(code) if group % 2 else _low(code)
            np.bitwise_or(nibble, bits & sixteen, out=words[:, 4 * group + word])
    return Groups(values.view(np.int8).reshape(len(blocks), -1, 32), *_k_scales(blocks, 15.5))


def _q6_k(blocks: Bytes) -> Groups:
    low, high, (values, words) = _words(blocks[..., :128]), _words(blocks[..., 128:192]), _empty(blocks, 256)
    two_bits = _bytes_of(48)
    for half in range(2):
        for part in range(4):
            for word in range(4):
                code = low[:, 8 * half + 4 * (part % 2) + word]
                bits = high[:, 4 * half + word]
                bits = (
                    bits << _FOUR
                    if part == 0
                    else bits << np.uint64(2)
                    if part == 1
                    else bits >> np.uint64(2 * part - 4)
                )
                nibble = _low(code) if part < 2 else _high(code)
                np.bitwise_or(nibble, bits & two_bits, out=words[:, 16 * half + 4 * part + word])
    words |= _bytes_of(128)  # 32 is subtracted from each byte, without borrowing from its neighbour
    words -= _bytes_of(32)
    words ^= _bytes_of(128)
    scales = _rounded(blocks[..., 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208).astype(np.float32))
    return Groups(values.view(np.int8).reshape(len(blocks), -1, 16), scales.reshape(len(blocks), -1))


def _iq4_xs(blocks: Bytes) -> Groups:
    high = _halves(blocks, 2).view(np.uint16)
    low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(*blocks.shape[:2], 8)
    six_bits = (low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3) << 4).astype(np.float32)
    scales = _rounded((six_bits - 32) * _halves(blocks, 0).astype(np.float32))
    return Groups(blocks[..., 8:].reshape(len(blocks), -1, 16), scales.reshape(len(blocks), -1))


# By the type's name. Tensors of other types are read whole.
READERS = {
    "Q4_0": BlockReader(INT4, _q4_0),
    "Q4_1": BlockReader(INT4, _q4_1),
    "Q4_K": BlockReader(INT4, _q4_k),
    "Q5_0": BlockReader(Grouping(5), _q5_0),
    "Q5_1": BlockReader(Grouping(5, has_minimum=True), _q5_1),
    "Q5_K": BlockReader(Grouping(5, has_minimum=True), _q5_k),
    "Q6_K": BlockReader(Grouping(6, 16), _q6_k),
    "Q8_0": BlockReader(Grouping(8), _q8_0),
    "IQ4_NL": BlockReader(Grouping(4, table=IQ4_VALUES), _iq4_nl),
    "IQ4_XS": BlockReader(Grouping(4, table=IQ4_VALUES), _iq4_xs),
    "MXFP4": BlockReader(Grouping(4, table=MXFP4_VALUES), _mxfp4),
}
