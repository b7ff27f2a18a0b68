"""A checkpoint as tables: what it is made of, what that weighs, and what its widths cost."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from moejax.arena import format, geometry
from moejax.checkpoint import Checkpoint
from moejax.config import (
    LayerKind,
    Mla,
    Mlp,
    MlpAndMoe,
    Quantization,
)
from moejax.models.fisher import LEAST_TOKENS

# The first pattern that is found in the name of a dense tensor says its kind.
_KINDS = (
    (r"\.attention\.", "attention"),
    (r"norm\.(weight|bias)$", "norms"),
    (r"\.feed_forward\.(moe\.)?shared\.", "shared experts"),
    (r"\.feed_forward\.(moe\.)?router\.", "routers"),
    (r"\.feed_forward\.expert_bias\.", "expert biases"),
    (r"\.feed_forward\.", "dense MLPs"),
    (r"\.output_scale$", "layer scales"),
    (r"", "embeddings"),
)


def table(folder: Path | str) -> str:
    """Bytes by kind, then by layer; of a quantised checkpoint also by width, and the errors.

    Raises CheckpointError, in one line.
    """
    checkpoint = Checkpoint.open(folder)
    config, quantization = checkpoint.config, checkpoint.quantization
    moe, layers = config.moe, config.layers
    sizes: dict[tuple[str, str], int] = {}
    per_layer = [0] * len(layers)
    for name, by_dtype in _tensors(checkpoint):
        kind = next(kind for pattern, kind in _KINDS if re.search(pattern, name))
        _add(sizes, kind, by_dtype, 1)
        if match := re.match(r"segments\.(\d+)\.(\d+)\.", name):
            for n, place in enumerate(config.places):
                if (place.segment, place.index) == (int(match[1]), int(match[2])):
                    repeats = config.segments[place.segment].repeats
                    per_layer[n] += sum(by_dtype.values()) // repeats
    of_expert: dict[str, int] = {}
    for shape in geometry.linear_shapes(config, quantization):
        for dtype, size in _stored(shape, config.dtype, quantization).items():
            of_expert[dtype] = of_expert.get(dtype, 0) + size
    expert = sum(of_expert.values())
    _add(sizes, "experts", of_expert, moe.router.num_experts * len(config.moe_layers))
    for n in config.moe_layers:
        per_layer[n] += expert * moe.router.num_experts
    lines = [
        f"{config.family}: {len(layers)} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, {config.dtype}",
        f"{len(config.moe_layers)} layers with {moe.router.num_experts} experts of width "
        f"{moe.expert_width} ({_size(expert)} each), {moe.router.experts_per_token} per token",
        "",
        f"{'kind':<16}{'dtype':<12}{'bytes':>12}",
    ]
    lines += [f"{kind:<16}{dtype:<12}{_size(size):>12}" for (kind, dtype), size in sizes.items()]
    lines += [f"{'all':<28}{_size(sum(sizes.values())):>12}", ""]
    lines += [f"{'layers':<12}{'attention':<26}{'feed-forward':<26}{'bytes each':>12}"]
    for first, last in _runs(list(zip(layers, per_layer, strict=True))):
        span = f"{first}" if first == last else f"{first} to {last}"
        layer, each = layers[first], _size(per_layer[first])
        lines.append(f"{span:<12}{_attention(layer):<26}{_feed_forward(layer):<26}{each:>12}")
    if quantization is not None:
        lines += ["", *_widths(checkpoint, quantization), "", *_errors(checkpoint, quantization)]
    return "\n".join(lines)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, int]]]:
    """Every dense tensor, those that are stored as codes too: its bytes by dtype."""
    for name in checkpoint.dense_names():
        dtype = checkpoint.dense_dtype(name)
        size = math.prod(checkpoint.dense_shape(name)) * format.DTYPES[dtype].itemsize
        yield name, {dtype: size}
    quantization = checkpoint.quantization
    if quantization is None:
        return
    for name in checkpoint.linear_names():
        repeats, *_ = shape = checkpoint.linear_shape(name)
        linear = geometry.linear_shape(quantization, name, shape)
        stored = _stored(linear, checkpoint.linear_dtype(name), quantization)
        yield name, {dtype: repeats * size for dtype, size in stored.items()}


def _stored(
    shape: geometry.LinearShape, dtype: str, quantization: Quantization | None
) -> dict[str, int]:
    """Bytes of a linear: those of its dense run by the dtype, and of its codes by their bits."""
    sizes = geometry.run_sizes(shape, dtype, quantization)
    found = {dtype: sizes["dense"]} if "dense" in sizes else {}
    if quantization is not None:
        codes = f"{quantization.seed_bits} to {quantization.parent_bits} bits"
        found[codes] = sum(size for name, size in sizes.items() if name != "dense")
    return found


def _add(
    sizes: dict[tuple[str, str], int], kind: str, by_dtype: Mapping[str, int], count: int
) -> None:
    for dtype, size in by_dtype.items():
        sizes[kind, dtype] = sizes.get((kind, dtype), 0) + count * size


def _widths(checkpoint: Checkpoint, quantization: Quantization) -> list[str]:
    """What the experts weigh at each width: the planes and the tables that it reads.

    A server gives whole pages to each run, and keeps the table of the next smaller width too.
    """
    config = checkpoint.config
    names = checkpoint.linear_names()
    coded = {name: checkpoint.linear_shape(name) for name in names}
    served = geometry.choose_geometry(config, config.dtype, quantization, coded)
    shapes = geometry.linear_shapes(config, quantization)
    experts = len(config.moe_layers) * config.moe.router.num_experts
    weights = experts * sum(shape.parts * shape.rows * shape.columns for shape in shapes)
    gate_up, down = (shape.rows_per_table for shape in shapes)
    lines = [
        f"experts as nested codes: seed of {quantization.seed_bits} bits, parent of "
        f"{quantization.parent_bits}; rows per table: gate_up {gate_up}, down {down}",
        f"{'width':<12}{'bytes':>12}{'bits per weight':>18}{'served, in pages':>20}",
    ]
    for width in quantization.widths:
        size = experts * sum(
            geometry.width_bytes(shape, config.dtype, quantization, width) for shape in shapes
        )
        pages = experts * sum(runs.pages_at(width) for runs in served.expert_runs)
        lines.append(
            f"{width:<12}{_size(size):>12}{8 * size / weights:>18.2f}"
            f"{_size(pages * served.page_bytes):>20}"
        )
    if names:
        lines.append("other linears as nested codes: " + ", ".join(names))
    return lines


def _errors(checkpoint: Checkpoint, quantization: Quantization) -> list[str]:
    """The relative error of each layer's experts at each width, and how well it is known."""
    if not checkpoint.has_sensitivity:
        return ["what the widths cost is not known: the codes were imported without the weights"]
    costs = checkpoint.sensitivity()
    bits = range(quantization.seed_bits, quantization.parent_bits + 1)
    title = "relative error of experts by width, "
    title += (
        "weighted by importance" if costs.is_calibrated else "not calibrated: all weights alike"
    )
    header = f"{'layer':<12}" + "".join(f"{width:>10}" for width in bits)
    if costs.is_calibrated:
        header += f"   experts of fewer than {LEAST_TOKENS} tokens"
    lines = [title, header]
    for number, layer in enumerate(checkpoint.config.moe_layers):
        norm = np.sum(costs.expert_norms[number])
        errors = (
            np.sqrt(np.sum(costs.experts[number], axis=(0, 1)) / norm)
            if norm
            else [0.0] * len(bits)
        )
        line = f"{layer:<12}" + "".join(f"{error:>10.5f}" for error in errors)
        if costs.is_calibrated:
            few = np.count_nonzero(costs.tokens[number] < LEAST_TOKENS)
            line += f"   {few} of {costs.tokens.shape[1]}"
        lines.append(line)
    return lines


def _runs(layers: list[tuple[LayerKind, int]]) -> Iterator[tuple[int, int]]:
    """First and last of the neighbours that are equal."""
    for _, group in itertools.groupby(range(len(layers)), key=lambda n: layers[n]):
        run = list(group)
        yield run[0], run[-1]


def _attention(kind: LayerKind) -> str:
    part = kind.attention
    if isinstance(part, Mla):
        return f"latent of {part.latent_size} + {part.rope_size}"
    if part.window is not None:
        seen = f"window of {part.window}"
    else:
        seen = "all tokens" if part.chunk is None else f"chunks of {part.chunk}"
    return seen if part.rope is not None else f"{seen}, no positions"


def _feed_forward(kind: LayerKind) -> str:
    part = kind.feed_forward
    if isinstance(part, Mlp):
        return f"MLP of {part.width}"
    if isinstance(part, MlpAndMoe):
        return f"{part.moe.router.num_experts} experts, MLP of {part.mlp.width}"
    shared = f", shared {part.shared.width}" if part.shared else ""
    return f"{part.router.num_experts} experts{shared}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
