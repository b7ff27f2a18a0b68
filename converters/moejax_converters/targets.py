"""The tensors of a model: their names, their shapes, and which of them are stacked.

A target is the tensor of one layer, `layers.N.…`. In a checkpoint, those of the layers that share
a place in a segment's period are stacked: `segments.S.I.…`, with the repeats as first axis.
"""

import re

from moejax.config import Attention, ModelConfig, Moe

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """The shape of every tensor of a model, by the name of its target."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embed.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["head.weight"] = (vocab, hidden)
    for n, kind in enumerate(config.layers):
        at = f"layers.{n}"
        shapes[f"{at}.attention_norm.weight"] = (hidden,)
        shapes |= _attention(f"{at}.attention", kind.attention, hidden)
        shapes[f"{at}.feed_forward_norm.weight"] = (hidden,)
        if isinstance(kind.feed_forward, Moe):
            shapes |= _moe(at, kind.feed_forward, hidden)
        else:
            shapes |= _mlp(f"{at}.feed_forward", kind.feed_forward.width, hidden)
    return shapes


def dense_stacks(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Name of each dense tensor of a checkpoint → the targets that it stacks, in order.

    A name without `segments` is not stacked; its one target is the tensor itself.
    """
    stacks: dict[str, list[str]] = {}
    places = config.places
    for target in expected_tensors(config):
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", target)
        if match is None:
            stacks[target] = [target]
        elif not match[2].startswith("experts."):
            place = places[int(match[1])]
            name = f"segments.{place.segment}.{place.index}.{match[2]}"
            stacks.setdefault(name, []).append(target)
    return {name: tuple(targets) for name, targets in stacks.items()}


def _attention(at: str, attention: Attention, hidden: int) -> Shapes:
    q_size = attention.num_heads * attention.head_size
    kv_size = attention.num_kv_heads * attention.head_size
    shapes: Shapes = {
        f"{at}.q.weight": (q_size, hidden),
        f"{at}.k.weight": (kv_size, hidden),
        f"{at}.v.weight": (kv_size, hidden),
        f"{at}.o.weight": (hidden, q_size),
    }
    if attention.qkv_bias:
        shapes |= {f"{at}.{name}.bias": shapes[f"{at}.{name}.weight"][:1] for name in "qkv"}
    if attention.output_bias:
        shapes[f"{at}.o.bias"] = (hidden,)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "projection"
        shapes[f"{at}.q_norm.weight"] = (q_size if whole else attention.head_size,)
        shapes[f"{at}.k_norm.weight"] = (kv_size if whole else attention.head_size,)
    return shapes


def _moe(at: str, moe: Moe, hidden: int) -> Shapes:
    shapes: Shapes = {f"{at}.feed_forward.router.weight": (moe.router.num_experts, hidden)}
    if moe.shared is not None:
        shapes |= _mlp(f"{at}.feed_forward.shared", moe.shared.width, hidden)
        if moe.shared.gated:
            shapes[f"{at}.feed_forward.shared.router.weight"] = (1, hidden)
    for e in range(moe.router.num_experts):
        shapes[f"{at}.experts.{e}.gate"] = (moe.expert_width, hidden)
        shapes[f"{at}.experts.{e}.up"] = (moe.expert_width, hidden)
        shapes[f"{at}.experts.{e}.down"] = (hidden, moe.expert_width)
    return shapes


def _mlp(at: str, width: int, hidden: int) -> Shapes:
    return {
        f"{at}.gate.weight": (width, hidden),
        f"{at}.up.weight": (width, hidden),
        f"{at}.down.weight": (hidden, width),
    }
