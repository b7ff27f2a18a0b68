"""Rules that say which target each tensor of a checkpoint is, and the check that they fit.

Every tensor must match exactly one rule, or be skipped, and every target must be filled exactly
once. All of this is checked from the headers, before anything is written.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import ModelConfig
from moejax.errors import CheckpointError
from moejax_converters import fused, targets
from moejax_converters.fused import Layout
from moejax_converters.pieces import Piece
from moejax_converters.source import DTYPES

_SHOWN_ERRORS = 5
_ROUTERS = (".feed_forward.router.weight", ".feed_forward.moe.router.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A tensor whose name matches `source` is `target`, which may use the groups of the match."""

    source: str
    target: str
    layout: Layout | None = None
    """Where a tensor holds several targets: which, and `target` is what their names start with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """A tensor whose name matches `source` is not needed, for this reason; no rule is asked."""

    source: str
    reason: str
    copy_of: str | None = None
    """The target that the tensor must equal; this is checked."""
    unserved: bool = False
    """The model can do more with it than moejax does: `reason` names that."""


# A model of several modalities has the decoder under a name of its own.
MODEL = r"(?:model|language_model\.model|model\.language_model)\."
HEAD = r"(?:language_model\.)?lm_head\."
LAYER = MODEL + r"layers\.(\d+)\."

ATTENTION_RULES = (
    Rule(LAYER + r"self_attn\.(q|k|v|o)_proj\.(weight|bias)", r"layers.\1.attention.\2.\3"),
)
QK_NORM_RULES = (
    Rule(LAYER + r"self_attn\.(q|k)_norm\.weight", r"layers.\1.attention.\2_norm.weight"),
)
MLP_RULES = (
    Rule(LAYER + r"mlp\.(gate|up|down)_proj\.weight", r"layers.\1.feed_forward.\2.weight"),
)
MOE_RULES = (
    Rule(LAYER + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", r"layers.\1.experts.\2.\3"),
)
ROUTER_RULES = (Rule(LAYER + r"mlp\.gate\.weight", r"layers.\1.feed_forward.router.weight"),)
FUSED_MOE_RULES = (
    Rule(LAYER + r"mlp\.experts\.gate_up_proj", r"layers.\1.experts", fused.gate_up_rows),
    Rule(LAYER + r"mlp\.experts\.down_proj", r"layers.\1.experts", fused.down_rows),
)
MIXTRAL_EXPERT_RULES = tuple(
    Rule(
        LAYER + rf"block_sparse_moe\.experts\.(\d+)\.{name}\.weight",
        rf"layers.\1.experts.\2.{part}",
    )
    for name, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
)


def top_rules(config: ModelConfig) -> tuple[Rule | Skip, ...]:
    """Rules for the embeddings, the last norm and the head."""
    head = (
        Skip(HEAD + "weight", "tied to the embeddings", copy_of="embed.weight")
        if config.tie_embeddings
        else Rule(HEAD + "(weight|bias)", r"head.\1")
    )
    return (
        Rule(MODEL + r"embed_tokens\.weight", "embed.weight"),
        Rule(MODEL + r"norm\.(weight|bias)", r"norm.\1"),
        head,
        Skip(LAYER + r"self_attn\.rotary_emb\.inv_freq", "computed from rope_theta"),
    )


def decoder_rules(config: ModelConfig) -> tuple[Rule | Skip, ...]:
    """Rules for everything but the feed-forward parts of a decoder with Llama's names."""
    return (
        *top_rules(config),
        Rule(LAYER + r"input_layernorm\.(weight|bias)", r"layers.\1.attention_norm.\2"),
        Rule(LAYER + r"post_attention_layernorm\.(weight|bias)", r"layers.\1.feed_forward_norm.\2"),
        *ATTENTION_RULES,
    )


def resolve(
    tensors: Mapping[str, StoredTensor], rules: Sequence[Rule | Skip], config: ModelConfig
) -> dict[str, Piece]:
    """Target → where it lies. Raises CheckpointError with a list of all that does not fit."""
    needed = {name: t for name, t in tensors.items() if _skip_of(name, rules) is None}
    compiled = [(re.compile(rule.source), rule) for rule in rules if isinstance(rule, Rule)]
    _check_routers(needed, compiled, config)
    expected = targets.expected_tensors(config)
    pieces: dict[str, Piece] = {}
    errors = []
    for name, tensor in needed.items():
        where = f"tensor '{name}' in {tensor.path}"
        matches = [(match, rule) for regexp, rule in compiled if (match := regexp.fullmatch(name))]
        if len(matches) != 1:
            errors.append(
                f"{where}: {len(matches)} rules match" if matches else f"{where}: unknown"
            )
            continue
        match, rule = matches[0]
        target = match.expand(rule.target)
        if rule.layout is None:
            parts, shape = {target: Piece(tensor=tensor)}, expected.get(target, ())
        else:
            layout = rule.layout(target, tensor, config)
            parts, shape = layout.pieces, layout.shape
        if not parts.keys() <= expected.keys():
            errors.append(f"{where}: is {target}, which this {config.family} model does not have")
            continue
        if error := _check(target, tensor, shape, config):
            errors.append(f"{where}: {error}")
            continue
        for part, piece in parts.items():
            if part in pieces:
                errors.append(f"{where}: is {part}, as '{pieces[part].tensor.name}' is")
                break
            pieces[part] = piece
    errors += [f"no tensor for {target}" for target in expected if target not in pieces]
    if errors:
        raise CheckpointError(_listing(errors))
    return pieces


def unserved(tensors: Mapping[str, StoredTensor], rules: Sequence[Rule | Skip]) -> list[str]:
    """What the skipped tensors would be for, as far as the model could do it with them."""
    counts: dict[str, int] = {}
    for name in tensors:
        skip = _skip_of(name, rules)
        if skip is not None and skip.unserved:
            counts[skip.reason] = counts.get(skip.reason, 0) + 1
    return [f"{reason} ({count} tensors)" for reason, count in counts.items()]


def _skip_of(name: str, rules: Sequence[Rule | Skip]) -> Skip | None:
    skips = (rule for rule in rules if isinstance(rule, Skip))
    return next((skip for skip in skips if re.fullmatch(skip.source, name)), None)


def _check_routers(
    tensors: Mapping[str, StoredTensor],
    compiled: Sequence[tuple[re.Pattern[str], Rule]],
    config: ModelConfig,
) -> None:
    """Refuses a wrong number of layers or experts before as many targets are listed."""
    num_experts = config.moe.router.num_experts
    missing = set(config.moe_layers)
    for regexp, rule in compiled:
        if not rule.target.endswith(_ROUTERS):
            continue
        for name, tensor in tensors.items():
            if (match := regexp.fullmatch(name)) is None:
                continue
            if tensor.shape[:1] != (num_experts,):
                raise CheckpointError(
                    f"tensor '{name}' in {tensor.path}: shape {list(tensor.shape)}, "
                    f"but config.json says that there are {num_experts} experts"
                )
            missing.discard(int(match[1]))
    if missing:
        raise CheckpointError(
            f"no tensor for the router of layer {min(missing)}: {len(missing)} of "
            f"{len(config.moe_layers)} layers with experts have no router, "
            "but config.json says that there are so many layers"
        )


def _check(
    target: str, tensor: StoredTensor, shape: tuple[int, ...], config: ModelConfig
) -> str | None:
    if tensor.shape != shape:
        return f"shape {list(tensor.shape)}, needed {list(shape)}"
    if tensor.dtype not in DTYPES:
        return f"dtype {tensor.dtype} is not supported (supported: {', '.join(DTYPES)})"
    if ".experts" in target and config.dtype == "bfloat16" and tensor.dtype != "BF16":
        return f"dtype {tensor.dtype} does not fit into this model's bfloat16"
    return None


def _listing(errors: list[str]) -> str:
    count = "1 tensor does" if len(errors) == 1 else f"{len(errors)} tensors do"
    lines = [f"{count} not fit the model of config.json:", *errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return "\n  ".join(lines)
