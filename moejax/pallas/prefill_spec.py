"""What `prefill_kernel` is made for, and how it shares out shared memory."""

import dataclasses

ATOM_WORDS = 256
DENSE = 16
DENSE_ATOMS = 16
"""Atoms of a step of 128 columns at width 16, of 64 rows."""
TABLE_BYTES = 8192
"""At most, of the tables of 16 rows."""
WEIGHT_ATOMS = 96
"""Atoms of shared memory for tables and stages of weights."""
MAX_WEIGHT_STAGES = 4
TOKEN_BYTES = 128 << 10
"""Shared memory for stages of tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a kernel is made for."""

    which: int
    """0: gate_up, 1: down."""
    rows: int
    """Of a part."""
    columns: int
    tokens: int
    """Of a tile."""
    plane_pages: int
    page_words: int
    widths: tuple[int, ...]
    table_slots: tuple[int, ...]
    """Of each width below 16, the first slot of its table."""
    rows_per_table: int
    has_bias: bool
    activation: str
    alpha: float
    limit: float

    @property
    def steps(self) -> int:
        """Steps of 128 columns."""
        return -(-self.columns // 128)

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of a part."""
        return -(-self.rows // 64)

    @property
    def out_columns(self) -> int:
        """Values of a token that gate_up writes: its rows, padded to steps of down."""
        return -(-self.rows // 128) * 128

    @property
    def programs(self) -> int:
        """Programs of a tile."""
        return self.out_columns // (64 if self.which == 0 else 128)

    @property
    def token_stages(self) -> int:
        return min(8, TOKEN_BYTES // (self.tokens * 128))

    def row_atoms(self, width: int) -> int:
        """Atoms of 64 rows, of a plane or of the values."""
        return -(-self.columns // 8) if width == DENSE else self.steps

    def copies(self, width: int) -> int:
        """Atoms of a step, of both blocks."""
        return 2 * (DENSE_ATOMS if width == DENSE else width)

    def table_line(self, width: int) -> int:
        """Bytes from an entry of a table in shared memory to the next."""
        return min(128, TABLE_BYTES >> width)

    def table_atoms(self, width: int) -> int:
        """Atoms that the tables take."""
        return 0 if width == DENSE else 8 * (self.table_line(width) << width) // 1024

    def weight_stages(self, width: int) -> int:
        room = WEIGHT_ATOMS - self.table_atoms(width)
        return min(MAX_WEIGHT_STAGES, room // self.copies(width))
