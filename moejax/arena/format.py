"""Encoder and decoder of FORMAT.md sections 1 and 2, in plain NumPy.

This is the definition that everything else is tested against: the JAX reader of pages, the kernels
and the checkpoint. Matrices are `[rows, columns]`; a run is a flat `uint32` vector.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Float16, Int32, Integer, Shaped, UInt8, UInt32

VERSION = 1
ATOM_BYTES = 1024
ATOM_ROWS = 64
ATOM_WORDS = 4
WORD_BITS = 32
POISON_PAGE = 0
# The four words of an atom's row move together: as one number they move twice as fast.
_QUAD = np.complex128
# A NaN as float32, and in both halves as bfloat16 and as float16.
POISON_WORD = 0x7FFF7FFF

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def pad_to(n: int, multiple: int) -> int:
    """n, rounded up to a multiple."""
    return ceil_div(n, multiple) * multiple


def dense_words(columns: int, itemsize: int) -> int:
    """Words per stored row of a dense run, padding included."""
    return pad_to(ceil_div(columns * itemsize, 4), ATOM_WORDS)


def plane_words(columns: int) -> int:
    """Words per stored row of a bit-plane, padding included."""
    return pad_to(ceil_div(columns, WORD_BITS), ATOM_WORDS)


def stack_halves(
    gate: Shaped[np.ndarray, "width hidden"], up: Shaped[np.ndarray, "width hidden"]
) -> Shaped[np.ndarray, "rows hidden"]:
    """Gate over up, each padded with zero rows to a multiple of 64."""
    pad = [(0, pad_to(len(gate), ATOM_ROWS) - len(gate)), (0, 0)]
    return np.concatenate([np.pad(gate, pad), np.pad(up, pad)])


def split_halves(
    rows: Shaped[np.ndarray, "rows hidden"], width: int
) -> tuple[Shaped[np.ndarray, "width hidden"], Shaped[np.ndarray, "width hidden"]]:
    """The gate and up of `stack_halves`."""
    half = pad_to(width, ATOM_ROWS)
    return rows[:width], rows[half : half + width]


def to_atoms(words: UInt32[np.ndarray, "rows words"]) -> UInt32[np.ndarray, " run"]:
    """A matrix of words as a run of atoms; rows and words are padded with zeros."""
    rows, columns = words.shape
    pad = [(0, pad_to(rows, ATOM_ROWS) - rows), (0, pad_to(columns, ATOM_WORDS) - columns)]
    padded = np.pad(words, pad)
    quads = padded.view(_QUAD).reshape(-1, ATOM_ROWS, padded.shape[1] // ATOM_WORDS)
    return np.ascontiguousarray(quads.transpose(0, 2, 1)).view(np.uint32).reshape(-1)


def from_atoms(
    run: UInt32[np.ndarray, " run"], rows: int, words: int
) -> UInt32[np.ndarray, "rows words"]:
    """The matrix of words that `to_atoms` encoded."""
    quads = run.view(_QUAD).reshape(ceil_div(rows, ATOM_ROWS), ceil_div(words, ATOM_WORDS), -1)
    padded = np.ascontiguousarray(quads.transpose(0, 2, 1)).view(np.uint32)
    return padded.reshape(pad_to(rows, ATOM_ROWS), -1)[:rows, :words]


def encode_dense(matrix: Shaped[np.ndarray, "rows columns"]) -> UInt32[np.ndarray, " run"]:
    """A bfloat16 or float32 matrix as a dense run. Padding is zero."""
    if matrix.dtype not in DTYPES.values():
        raise ValueError(f"dense runs are bfloat16 or float32, got {matrix.dtype}")
    rows, columns = matrix.shape
    size = matrix.dtype.itemsize
    padded = np.zeros((rows, dense_words(columns, size) * 4 // size), matrix.dtype)
    padded[:, :columns] = matrix
    return to_atoms(padded.view(np.uint32))


def decode_dense(
    run: UInt32[np.ndarray, " run"], rows: int, columns: int, dtype: np.dtype
) -> Shaped[np.ndarray, "rows columns"]:
    """The matrix that `encode_dense` encoded."""
    words = from_atoms(run, rows, dense_words(columns, dtype.itemsize))
    return np.ascontiguousarray(words).view(dtype)[:, :columns]


def encode_planes(
    codes: UInt8[np.ndarray, "rows columns"], parent_bits: int
) -> UInt32[np.ndarray, "planes run"]:
    """Codes of `parent_bits` bits as bit-planes, most significant first, each a run of atoms."""
    if codes.size and int(codes.max()) >> parent_bits:
        raise ValueError(f"code {codes.max()} needs more than {parent_bits=}")
    rows, columns = codes.shape
    padded = np.zeros((rows, plane_words(columns) * WORD_BITS), np.uint8)
    padded[:, :columns] = codes
    planes = []
    for p in range(parent_bits):
        bits = (padded >> (parent_bits - 1 - p)) & 1
        words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        planes.append(to_atoms(words))
    return np.stack(planes)


def decode_planes(
    planes: UInt32[np.ndarray, "planes run"], rows: int, columns: int
) -> UInt8[np.ndarray, "rows columns"]:
    """Codes of the first planes: with b of them, the b-bit code of each weight."""
    codes = np.zeros((rows, columns), np.uint8)
    for run in planes:
        words = np.ascontiguousarray(from_atoms(run, rows, plane_words(columns)))
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        codes = np.left_shift(codes, 1, dtype=np.uint8) | bits[:, :columns]
    return codes


def encode_table(table: Float16[np.ndarray, "rows codes"]) -> UInt32[np.ndarray, " run"]:
    """Lookup tables of all stored rows, or groups of them, one after the other, padded to 1 KiB."""
    rows, codes = table.shape
    values = np.zeros(table_bytes(rows, codes) // 2, np.float16)
    values[: rows * codes] = table.reshape(-1)
    return values.view(np.uint32)


def decode_table(
    run: UInt32[np.ndarray, " run"], rows: int, bits: int
) -> Float16[np.ndarray, "rows codes"]:
    """The tables that `encode_table` encoded."""
    return run.view(np.float16)[: rows << bits].reshape(rows, 1 << bits)


def table_bytes(rows: int, codes: int) -> int:
    """Bytes of the run of lookup tables of so many stored rows, or groups of them."""
    return pad_to(rows * codes * 2, ATOM_BYTES)


def to_pages(run: UInt32[np.ndarray, " run"], page_words: int) -> UInt32[np.ndarray, "pages words"]:
    """A run cut into pages; the rest of the last page is zero."""
    pages = ceil_div(run.size, page_words)
    padded = np.zeros(pages * page_words, np.uint32)
    padded[: run.size] = run
    return padded.reshape(pages, page_words)


def read_run(
    arena: UInt32[np.ndarray, "pages words"],
    host: UInt32[np.ndarray, "host_pages words"],
    ids: Int32[np.ndarray, " slots"] | Integer[np.ndarray, " slots"],
    num_words: int,
) -> UInt32[np.ndarray, " run"]:
    """The first words of a run whose pages lie in the arena (id >= 0) or on the host (~id)."""
    pages = [arena[i] if i >= 0 else host[~i] for i in ids.tolist()]
    return np.concatenate(pages)[:num_words]
