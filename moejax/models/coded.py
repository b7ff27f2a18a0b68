"""Matrices of layers that are stored as codes, multiplied where they lie."""

import dataclasses

from jaxtyping import Array, Float, Int32, UInt32

from moejax.arena.geometry import Runs
from moejax.pallas.dispatch import Kernels, run_linear


@dataclasses.dataclass
class Current:
    """The arena as the layer that is being traced finds it.

    A matrix may be read before the layer writes its KV or after it. In place, each must read the
    array of its time: with an older one XLA would have to keep a copy of the arena.
    """

    pages: UInt32[Array, "pages words"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CodedMatrix:
    """A matrix in pages, at any width, as a parameter of a layer."""

    current: Current
    host: UInt32[Array, "host_pages words"] | None
    tables: Int32[Array, "rows slots"]
    """Of all such matrices of all layers."""
    widths: Int32[Array, " rows"]
    row: Int32[Array, ""]
    runs: Runs
    kernels: Kernels

    def product(
        self, x: Float[Array, "tokens k"], bias: Float[Array, " m"] | None
    ) -> Float[Array, "tokens m"]:
        """x times the transpose of the matrix, plus a bias, in the dtype of x."""
        pages = self.current.pages
        if pages is None:
            raise AssertionError("the arena is not known yet")
        tables = (self.tables, self.widths, self.row)
        return run_linear(x, bias, pages, self.host, *tables, self.runs, self.kernels)

    def __getitem__(self, at: object) -> "CodedMatrix":
        """Itself: what a parameter is asked for."""
        return self
