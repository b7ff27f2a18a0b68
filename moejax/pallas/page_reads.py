"""Reads of pages and of tokens, in Gluon: what each thread of a product needs of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def page_at(pages, host, ids, PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr):
    """Where pages of these signed ids begin."""
    # Without a pool on the host its pages read as poison.
    at = pages + gl.maximum(ids, 0).to(gl.int64) * PAGE_WORDS
    if HAS_HOST:
        at = gl.where(ids >= 0, at, host + (-1 - ids).to(gl.int64) * PAGE_WORDS)
    return at


@gluon.jit
def atom_at(pages, host, slots, atom, used, PAGE_WORDS: gl.constexpr, HAS_HOST: gl.constexpr):
    """Where an atom of the run at these slots begins."""
    PAGE_ATOMS: gl.constexpr = PAGE_WORDS // 256
    ids = gl.load(slots + atom // PAGE_ATOMS, mask=used, other=0)
    return page_at(pages, host, ids, PAGE_WORDS, HAS_HOST) + (atom % PAGE_ATOMS) * 256


@gluon.jit
def load_4(at, used, THREADS: gl.constexpr):
    """Four neighbouring words of each thread; zeros where not used."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [THREADS // 32, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))[:, None] + word
    used = gl.convert_layout(used, gl.SliceLayout(1, LAYOUT))[:, None] & (word >= 0)
    words = gl.load(at, mask=used, other=0)
    even, odd = gl.split(gl.reshape(words, (THREADS, 2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, ONE),
        gl.convert_layout(w1, ONE),
        gl.convert_layout(w2, ONE),
        gl.convert_layout(w3, ONE),
    )


@gluon.jit
def load_tokens(tokens, place, used, TILES: gl.constexpr, THREADS: gl.constexpr):
    """Fragments of two steps of 16 columns, for each 8 tokens: a tuple of 4 * TILES words.

    `tokens`: where those of this thread begin, one of each 8.
    """
    found = ()
    for n in gl.static_range(TILES):
        found = found + load_4(tokens[n] + place, used[n], THREADS)
    return found
