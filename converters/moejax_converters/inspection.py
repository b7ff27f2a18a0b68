"""A checkpoint as a table: what it is made of, and what that weighs."""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from moejax.arena import format
from moejax.checkpoint import Checkpoint, layout
from moejax.config import LayerKind, Mla, Mlp, MlpAndMoe

# The first pattern that is found in the name of a dense tensor says its kind.
_KINDS = (
    (r"\.attention\.", "attention"),
    (r"norm\.(weight|bias)$", "norms"),
    (r"\.feed_forward\.shared\.", "shared experts"),
    (r"\.feed_forward\.(moe\.)?router\.", "routers"),
    (r"\.feed_forward\.expert_bias\.", "expert biases"),
    (r"\.feed_forward\.", "dense MLPs"),
    (r"\.output_scale$", "layer scales"),
    (r"", "embeddings"),
)


def table(folder: Path | str) -> str:
    """Bytes by kind, then by layer."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    moe, layers = config.moe, config.layers
    sizes: dict[tuple[str, str], int] = {}
    per_layer = [0] * len(layers)
    for name in checkpoint.dense_names():
        dtype = checkpoint.dense_dtype(name)
        size = math.prod(checkpoint.dense_shape(name)) * format.DTYPES[dtype].itemsize
        kind = next(kind for pattern, kind in _KINDS if re.search(pattern, name))
        sizes[kind, dtype] = sizes.get((kind, dtype), 0) + size
        if match := re.match(r"segments\.(\d+)\.(\d+)\.", name):
            for n, place in enumerate(config.places):
                if (place.segment, place.index) == (int(match[1]), int(match[2])):
                    per_layer[n] += size // config.segments[place.segment].repeats
    expert = 4 * sum(
        layout.run_words(s, config.dtype) for s in layout.linear_shapes(config).values()
    )
    experts = expert * moe.router.num_experts
    sizes["experts", config.dtype] = experts * len(config.moe_layers)
    for n in config.moe_layers:
        per_layer[n] += experts
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
    return "\n".join(lines)


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
