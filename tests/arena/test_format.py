"""FORMAT.md sections 1 and 2: a worked example of each rule, then every shape and both dtypes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena import format

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

rows_or_columns = st.integers(1, 150)
dtypes = st.sampled_from([BFLOAT16, FLOAT32])
seeds = st.integers(0, 2**32 - 1)


def numbered_words(rows: int, columns: int) -> np.ndarray:
    """Word (r, c) holds 1000 r + c + 1, so that no word is zero."""
    return (1000 * np.arange(rows)[:, None] + np.arange(columns) + 1).astype(np.uint32)


def random_bits(rows: int, columns: int, dtype: np.dtype, seed: int) -> np.ndarray:
    """Any bits, NaN and infinity among them."""
    size = rows * columns * dtype.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(rows, columns)


def random_codes(rows: int, columns: int, bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns), np.uint8)


# Section 1: pages.


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"]
)
def test_poison_is_nan_in_every_dtype(dtype: type) -> None:
    values = np.array([format.POISON_WORD], np.uint32).view(dtype)
    assert format.POISON_WORD == 0x7FFF7FFF
    assert values.size == 4 // np.dtype(dtype).itemsize
    assert np.isnan(values.astype(np.float32)).all()


def test_page_0_is_poison() -> None:
    assert format.POISON_PAGE == 0


def test_a_negative_id_reads_the_host_page_of_its_complement() -> None:
    arena = numbered_words(4, 256)
    host = numbered_words(3, 256) + np.uint32(500_000)
    run = format.read_run(arena, host, np.array([2, -1, -3, 1], np.int32), 1000)
    assert run.size == 1000
    assert run[0] == 2001  # arena page 2
    assert run[256] == 500_001  # -1: host page 0
    assert run[512] == 502_001  # -3: host page 2
    assert run[768] == 1001  # arena page 1
    assert run[999] == 1001 + 999 - 768


def test_a_run_owns_whole_pages_and_the_rest_of_the_last_is_zero() -> None:
    pages = format.to_pages(np.arange(1, 1281, dtype=np.uint32), 512)
    assert pages.shape == (3, 512)
    assert pages[2, 255] == 1280
    assert (pages[2, 256:] == 0).all()


@given(
    pages=st.integers(1, 5),
    page_words=st.sampled_from([256, 512, 4096]),
    missing=st.integers(0, 255),
    seed=seeds,
)
def test_a_run_comes_back_from_pages_of_both_pools(
    pages: int, page_words: int, missing: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    run = rng.integers(0, 2**32, pages * page_words - missing, np.uint32)
    arena = np.full((pages + 1, page_words), format.POISON_WORD, np.uint32)
    host = arena.copy()
    ids = rng.permutation(pages) + 1  # rows of the arena, page 0 left out
    ids = np.where(rng.random(pages) < 0.5, ~ids, ids).astype(np.int32)
    for page, at in zip(format.to_pages(run, page_words), ids.tolist(), strict=True):
        if at >= 0:
            arena[at] = page
        else:
            host[-at - 1] = page
    np.testing.assert_array_equal(format.read_run(arena, host, ids, run.size), run)


# Section 2: words per row, atoms.


@pytest.mark.parametrize(
    ("columns", "bfloat16", "float32", "plane"),
    [
        (1, 4, 4, 4),
        (8, 4, 8, 4),
        (9, 8, 12, 4),
        (128, 64, 128, 4),
        (129, 68, 132, 8),
        (1408, 704, 1408, 44),
        (2048, 1024, 2048, 64),
    ],
)
def test_words_per_row_are_padded_to_a_multiple_of_4(
    columns: int, bfloat16: int, float32: int, plane: int
) -> None:
    assert format.dense_words(columns, 2) == bfloat16
    assert format.dense_words(columns, 4) == float32
    assert format.plane_words(columns) == plane


@pytest.mark.parametrize(
    ("row", "word", "place"),
    [
        (0, 0, 0),
        (0, 3, 3),
        (1, 0, 4),
        (63, 3, 255),  # the last word of the first atom
        (0, 4, 256),  # atoms follow each other along the columns
        (5, 6, 278),
        (0, 8, 512),
        (64, 0, 768),  # the second row of atoms, after 3 atoms of 256 words
        (64, 5, 1025),
        (127, 11, 1535),
    ],
)
def test_atoms_are_64_rows_of_4_words_and_follow_along_the_columns(
    row: int, word: int, place: int
) -> None:
    run = format.to_atoms(numbered_words(128, 12))
    assert run.shape == (1536,)
    assert run[place] == 1000 * row + word + 1


def test_rows_and_words_are_padded_with_zeros_to_whole_atoms() -> None:
    run = format.to_atoms(numbered_words(65, 5))
    assert run.size == 4 * 256
    assert np.count_nonzero(run) == 65 * 5
    assert run[256] == 5  # (0, 4)
    assert (run[257:260] == 0).all()  # (0, 5) to (0, 7)
    assert run[512] == 64_001  # (64, 0)
    assert (run[516:768] == 0).all()  # rows 65 to 127 of the third atom


@given(rows=rows_or_columns, words=st.integers(1, 20))
def test_atoms_are_placed_by_the_formula_of_the_format(rows: int, words: int) -> None:
    matrix = numbered_words(rows, words)
    run = format.to_atoms(matrix)
    columns = -(-words // 4)
    for r, w in np.ndindex(rows, words):
        atom = run[((r // 64) * columns + w // 4) * 256 :][:256]
        assert atom[(r % 64) * 4 + w % 4] == matrix[r, w]
    np.testing.assert_array_equal(format.from_atoms(run, rows, words), matrix)


# Section 2: gate over up, dense runs.


def test_up_starts_at_the_next_multiple_of_64_rows() -> None:
    gate = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    rows = format.stack_halves(gate, 10 * gate)
    assert rows.shape == (128, 2)
    assert rows[:3].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (rows[3:64] == 0).all()
    assert rows[64:67].tolist() == [[10, 20], [30, 40], [50, 60]]
    assert (rows[67:] == 0).all()


@pytest.mark.parametrize(("width", "up_at"), [(1, 64), (64, 64), (65, 128), (1408, 1408)])
def test_each_half_is_padded_alone(width: int, up_at: int) -> None:
    ones = np.ones((width, 1), np.float32)
    rows = format.stack_halves(ones, 2 * ones)
    assert len(rows) == 2 * up_at
    assert np.flatnonzero(rows[:, 0] == 2)[0] == up_at


@given(width=rows_or_columns, hidden=rows_or_columns, dtype=dtypes, seed=seeds)
def test_halves_come_back(width: int, hidden: int, dtype: np.dtype, seed: int) -> None:
    gate = random_bits(width, hidden, dtype, seed)
    up = random_bits(width, hidden, dtype, seed + 1)
    found = format.split_halves(format.stack_halves(gate, up), width)
    assert found[0].tobytes() == gate.tobytes()
    assert found[1].tobytes() == up.tobytes()


def test_a_bfloat16_word_holds_the_earlier_column_in_its_low_half() -> None:
    run = format.encode_dense(np.array([[1.0, -2.0, 0.5]], BFLOAT16))
    assert run.size == 256
    assert hex(run[0]) == "0xc0003f80"  # -2.0 is 0xC000, 1.0 is 0x3F80
    assert hex(run[1]) == "0x3f00"  # 0.5, then padding
    assert (run[2:] == 0).all()


def test_a_float32_word_is_the_value_itself() -> None:
    run = format.encode_dense(np.array([[1.0], [-2.0]], FLOAT32))
    assert hex(run[0]) == "0x3f800000"
    assert hex(run[4]) == "0xc0000000"  # the second row


def test_an_atom_of_bfloat16_is_64_rows_of_8_columns() -> None:
    matrix = np.zeros((64, 16), BFLOAT16)
    matrix[63, 7] = matrix[0, 8] = 1.0
    run = format.encode_dense(matrix)
    assert np.flatnonzero(run).tolist() == [255, 256]
    assert hex(run[255]) == "0x3f800000"  # column 7 is the high half
    assert hex(run[256]) == "0x3f80"


@given(rows=rows_or_columns, columns=rows_or_columns, dtype=dtypes, seed=seeds)
def test_dense_runs_come_back_bit_for_bit(
    rows: int, columns: int, dtype: np.dtype, seed: int
) -> None:
    matrix = random_bits(rows, columns, dtype, seed)
    run = format.encode_dense(matrix)
    assert run.size % 256 == 0
    assert format.decode_dense(run, rows, columns, dtype).tobytes() == matrix.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_a_dense_run_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dense runs are bfloat16 or float32, got {dtype}"):
        format.encode_dense(np.zeros((1, 1), dtype))


# Section 2: planes.


def test_plane_0_holds_the_most_significant_bit_and_bit_j_is_column_j() -> None:
    #         column   0      1      2
    codes = np.array([[0b101, 0b011, 0b100]], np.uint8)
    planes = format.encode_planes(codes, 3)
    assert planes.shape == (3, 256)
    assert planes[:, 0].tolist() == [0b101, 0b010, 0b011]
    assert (planes[:, 1:] == 0).all()


def test_column_33_is_bit_1_of_word_1() -> None:
    codes = np.zeros((1, 40), np.uint8)
    codes[0, 33] = 1
    (plane,) = format.encode_planes(codes, 1)
    assert plane[:4].tolist() == [0, 2, 0, 0]


def test_a_plane_is_cut_into_atoms() -> None:
    codes = np.zeros((65, 129), np.uint8)
    codes[64, 128] = 1  # word 4 of row 64: row 1 and column 1 of 2 x 2 atoms
    (plane,) = format.encode_planes(codes, 1)
    assert plane.size == 4 * 256
    assert np.flatnonzero(plane).tolist() == [768]


@given(
    rows=rows_or_columns,
    columns=rows_or_columns,
    parent_bits=st.integers(1, 8),
    data=st.data(),
    seed=seeds,
)
def test_the_first_planes_are_the_smaller_code(
    rows: int, columns: int, parent_bits: int, data: st.DataObject, seed: int
) -> None:
    bits = data.draw(st.integers(1, parent_bits))
    codes = random_codes(rows, columns, parent_bits, seed)
    planes = format.encode_planes(codes, parent_bits)
    assert planes.shape[0] == parent_bits
    np.testing.assert_array_equal(format.decode_planes(planes, rows, columns), codes)
    np.testing.assert_array_equal(
        format.decode_planes(planes[:bits], rows, columns), codes >> (parent_bits - bits)
    )


@pytest.mark.parametrize(("code", "parent_bits"), [(2, 1), (8, 3), (255, 7)])
def test_a_code_of_too_many_bits_is_refused(code: int, parent_bits: int) -> None:
    with pytest.raises(ValueError, match=f"code {code} needs more than parent_bits={parent_bits}"):
        format.encode_planes(np.array([[0, code]], np.uint8), parent_bits)


# Section 2: tables.


def test_row_r_of_a_table_stands_at_float16_offset_r_times_its_codes() -> None:
    table = np.arange(1, 13, dtype=np.float16).reshape(3, 4)
    run = format.encode_table(table)
    values = run.view(np.float16)
    assert values[:4].tolist() == [1, 2, 3, 4]
    assert values[2 * 4] == 9
    assert hex(run[0]) == "0x40003c00"  # 2.0 over 1.0: the first code is the low half
    assert (values[12:] == 0).all()


@pytest.mark.parametrize(
    ("rows", "bits", "size"),
    [
        (1, 2, 1024),
        (64, 2, 1024),  # 64 rows of 8 bytes are half an atom
        (128, 2, 1024),
        (192, 2, 2048),  # 1536 bytes
        (64, 3, 1024),
        (65, 3, 2048),
        (2816, 4, 90112),
        (64, 8, 32768),
    ],
)
def test_tables_are_padded_to_1_kib(rows: int, bits: int, size: int) -> None:
    assert format.table_bytes(rows, 1 << bits) == size
    assert format.encode_table(np.ones((rows, 1 << bits), np.float16)).nbytes == size


@given(rows=rows_or_columns, bits=st.integers(1, 8), seed=seeds)
def test_tables_come_back(rows: int, bits: int, seed: int) -> None:
    table = random_bits(rows, 1 << bits, np.dtype(np.float16), seed)
    run = format.encode_table(table)
    assert run.size % 256 == 0
    assert format.decode_table(run, rows, bits).tobytes() == table.tobytes()


def test_a_weight_is_the_entry_of_the_first_bits_of_its_code() -> None:
    parent_bits, bits = 4, 2
    codes = np.array([[0b0000, 0b0111, 0b1011, 0b1100]], np.uint8)
    planes = format.encode_planes(codes, parent_bits)
    table = np.array([[-1.5, -0.5, 0.25, 2.0]], np.float16)
    run = format.encode_table(table)
    found = np.take_along_axis(
        format.decode_table(run, 1, bits), format.decode_planes(planes[:bits], 1, 4), axis=1
    )
    assert found.tolist() == [[-1.5, -0.5, 0.25, 2.0]]
