"""From words of bit-planes to codes, in Gluon: exchanges of bits between words and within them.

A word of a plane has one bit of 32 columns. Two exchanges, of single bits and of pairs, turn the
words of up to four planes into four words of eight codes, each in a nibble: word r holds those of
columns r, 4 + r, 8 + r, ... 28 + r, the first in its low nibble. A third, of nibbles, turns the
words of up to eight planes into eight words of four codes, each in a byte: word s holds those of
columns s, 8 + s, 16 + s and 24 + s.
(Hacker's Delight, section 7-3, transposes matrices of bits so.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _merge(low, high, SHIFT: gl.constexpr, MASK: gl.constexpr):
    """(what MASK selects of both, what it leaves of both), `low` in the lower places."""
    rest: gl.constexpr = MASK ^ 0xFFFFFFFF
    even = (low & MASK) | ((high << SHIFT) & rest)
    odd = ((low >> SHIFT) & MASK) | (high & rest)
    return even, odd


@gluon.jit
def _spread(low, SHIFT: gl.constexpr, MASK: gl.constexpr):
    """`_merge` where high is zero."""
    return low & MASK, (low >> SHIFT) & MASK


@gluon.jit
def nibbles_of(planes, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Four words of eight codes from planes FIRST to FIRST + COUNT, the most significant first."""
    if COUNT == 1:
        even, odd = _spread(planes[FIRST], 1, 0x55555555)
        n0, n2 = _spread(even, 2, 0x33333333)
        n1, n3 = _spread(odd, 2, 0x33333333)
    elif COUNT == 2:
        even, odd = _merge(planes[FIRST + 1], planes[FIRST], 1, 0x55555555)
        n0, n2 = _spread(even, 2, 0x33333333)
        n1, n3 = _spread(odd, 2, 0x33333333)
    elif COUNT == 3:
        even, odd = _merge(planes[FIRST + 2], planes[FIRST + 1], 1, 0x55555555)
        even_top, odd_top = _spread(planes[FIRST], 1, 0x55555555)
        n0, n2 = _merge(even, even_top, 2, 0x33333333)
        n1, n3 = _merge(odd, odd_top, 2, 0x33333333)
    else:
        even, odd = _merge(planes[FIRST + 3], planes[FIRST + 2], 1, 0x55555555)
        even_top, odd_top = _merge(planes[FIRST + 1], planes[FIRST], 1, 0x55555555)
        n0, n2 = _merge(even, even_top, 2, 0x33333333)
        n1, n3 = _merge(odd, odd_top, 2, 0x33333333)
    return n0, n1, n2, n3


@gluon.jit
def bytes_of(n):
    """Eight words of four codes from four words of nibbles."""
    c0, c4 = _spread(n[0], 4, 0x0F0F0F0F)
    c1, c5 = _spread(n[1], 4, 0x0F0F0F0F)
    c2, c6 = _spread(n[2], 4, 0x0F0F0F0F)
    c3, c7 = _spread(n[3], 4, 0x0F0F0F0F)
    return c0, c1, c2, c3, c4, c5, c6, c7


@gluon.jit
def codes_of(planes, BITS: gl.constexpr):
    """Eight words of four codes from a tuple of BITS words, the most significant plane first."""
    if BITS <= 4:
        c = bytes_of(nibbles_of(planes, 0, BITS))
    else:
        n = nibbles_of(planes, BITS - 4, 4)
        top = nibbles_of(planes, 0, BITS - 4)
        c0, c4 = _merge(n[0], top[0], 4, 0x0F0F0F0F)
        c1, c5 = _merge(n[1], top[1], 4, 0x0F0F0F0F)
        c2, c6 = _merge(n[2], top[2], 4, 0x0F0F0F0F)
        c3, c7 = _merge(n[3], top[3], 4, 0x0F0F0F0F)
        c = (c0, c1, c2, c3, c4, c5, c6, c7)
    return c
