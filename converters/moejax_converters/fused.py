"""Tensors that hold several targets: all experts of a layer, or keys and values of all heads.

Which layout a tensor has is said by its family and its name, never by its shape: where an expert is
half as wide as the hidden size, or just as wide, a shape fits several layouts.
"""

import dataclasses
from collections.abc import Callable

from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import Mla, ModelConfig
from moejax_converters.pieces import Piece, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What a tensor of several targets is made of."""

    shape: tuple[int, ...]
    """That it must have."""
    pieces: dict[str, Piece]
    """By target."""


Layout = Callable[[str, StoredTensor, ModelConfig], Fused]
"""Where the targets that are named `AT.…` lie in a tensor."""


def gate_up_rows(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, 2 I, H]: for each expert, gate rows over up rows. `at` is `layers.N.experts`."""
    experts, width, hidden = _sizes(config)
    pieces = {}
    for e in range(experts):
        pieces[f"{at}.{e}.gate"] = Piece(tensor=tensor, index=e, rows=(0, width))
        pieces[f"{at}.{e}.up"] = Piece(tensor=tensor, index=e, rows=(width, 2 * width))
    return Fused(shape=(experts, 2 * width, hidden), pieces=pieces)


def down_rows(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, H, I]. `at` is `layers.N.experts`."""
    experts, width, hidden = _sizes(config)
    pieces = {f"{at}.{e}.down": Piece(tensor=tensor, index=e) for e in range(experts)}
    return Fused(shape=(experts, hidden, width), pieces=pieces)


def gate_up_columns(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, H, 2 I]: for each expert, gate columns, then up columns. `at` is `layers.N.experts`."""
    _, width, _ = _sizes(config)
    return _columns(at, tensor, config, slice(0, width), slice(width, 2 * width))


def gate_up_alternating(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, H, 2 I]: for each expert, gate in even columns, up in odd. `at` is `layers.N.experts`."""
    return _columns(at, tensor, config, slice(0, None, 2), slice(1, None, 2))


def _columns(at: str, tensor: StoredTensor, config: ModelConfig, gate: slice, up: slice) -> Fused:
    experts, width, hidden = _sizes(config)
    views = {
        part: View(cut=(slice(None), columns), swapped=True)
        for part, columns in (("gate", gate), ("up", up))
    }
    pieces = {
        f"{at}.{e}.{part}": Piece(tensor=tensor, index=e, view=view)
        for e in range(experts)
        for part, view in views.items()
    }
    return Fused(shape=(experts, hidden, 2 * width), pieces=pieces)


def down_columns(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, I, H]. `at` is `layers.N.experts`."""
    experts, width, hidden = _sizes(config)
    view = View(swapped=True)
    pieces = {f"{at}.{e}.down": Piece(tensor=tensor, index=e, view=view) for e in range(experts)}
    return Fused(shape=(experts, width, hidden), pieces=pieces)


def alternating_bias(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[E, 2 I]: even columns are gate, odd are up. `at` is `layers.N.feed_forward.expert_bias`."""
    experts, width, _ = _sizes(config)
    pieces = {
        f"{at}.{part}": Piece(tensor=tensor, view=View(cut=(slice(None), slice(first, None, 2))))
        for part, first in (("gate", 0), ("up", 1))
    }
    return Fused(shape=(experts, 2 * width), pieces=pieces)


def keys_and_values(at: str, tensor: StoredTensor, config: ModelConfig) -> Fused:
    """[heads (nope + value), latent]: for each head, rows of its key, then of its value.

    `at` is `layers.N.attention`, of latent attention.
    """
    part = next(k.attention for k in config.layers if isinstance(k.attention, Mla))
    rows = part.nope_size + part.value_size
    shape = (part.num_heads, rows, part.latent_size)
    cuts = {"k_up": slice(0, part.nope_size), "v_up": slice(part.nope_size, rows)}
    pieces = {
        f"{at}.{name}": Piece(tensor=tensor, view=View(shape=shape, cut=(slice(None), cut)))
        for name, cut in cuts.items()
    }
    return Fused(shape=(part.num_heads * rows, part.latent_size), pieces=pieces)


def _sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Experts of a layer, their width, and the hidden size."""
    return config.moe.router.num_experts, config.moe.expert_width, config.hidden_size
