"""Where a target lies in a checkpoint: in which tensor, and which part of that it is."""

import dataclasses

import numpy as np
from jaxtyping import Shaped

from moejax.checkpoint.tensor_file import StoredTensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A part of an array: it is reshaped, then cut, then its last two axes are swapped."""

    shape: tuple[int, ...] | None = None
    """None: as it is."""
    cut: tuple[slice, ...] = ()
    """One slice for each of the first axes."""
    swapped: bool = False

    def of(self, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The part; nothing is copied."""
        array = array if self.shape is None else array.reshape(self.shape)
        array = array[self.cut]
        return array.swapaxes(-1, -2) if self.swapped else array

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of an array of this shape."""
        shape = shape if self.shape is None else self.shape
        cut = (*self.cut, *[slice(None)] * (len(shape) - len(self.cut)))
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(cut, shape, strict=True))
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a target lies: a view of a block, which is what is read at once.

    The block is a tensor, or an entry of its first axis, or some rows [start, end) of that.
    """

    tensor: StoredTensor
    index: int | None = None
    rows: tuple[int, int] | None = None
    view: View = View()

    @property
    def block(self) -> tuple[str, int | None, tuple[int, int] | None]:
        """Pieces with the same block are read together."""
        return self.tensor.name, self.index, self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape if self.index is None else self.tensor.shape[1:]
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        return self.view.shape_of(shape)
