"""Rules that say which target each tensor of a checkpoint is, and the check that they fit.

Every tensor must match exactly one rule, and every target must be filled exactly once. All of
this is checked from the headers, before anything is written.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import ModelConfig
from moejax.errors import CheckpointError
from moejax_converters import targets
from moejax_converters.source import DTYPES

_SHOWN_ERRORS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A tensor whose name matches `source` is `target`, which may use the groups of the match.

    Two targets are fused, with the experts as first axis: `layers.N.experts.gate_up`, gate rows
    over up rows, and `layers.N.experts.down`.
    """

    source: str
    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """A tensor whose name matches `source` is not needed, for this reason."""

    source: str
    reason: str
    copy_of: str | None = None
    """The target that the tensor must equal; this is checked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a target lies: a whole tensor, or an entry of its first axis, or some rows of that."""

    tensor: StoredTensor
    index: int | None = None
    rows: tuple[int, int] | None = None


LAYER = r"model\.layers\.(\d+)\."

QK_NORM_RULES = (
    Rule(LAYER + r"self_attn\.(q|k)_norm\.weight", r"layers.\1.attention.\2_norm.weight"),
)
MLP_RULES = (
    Rule(LAYER + r"mlp\.(gate|up|down)_proj\.weight", r"layers.\1.feed_forward.\2.weight"),
)
MOE_RULES = (
    Rule(LAYER + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", r"layers.\1.experts.\2.\3"),
)
FUSED_MOE_RULES = (
    Rule(LAYER + r"mlp\.gate\.weight", r"layers.\1.feed_forward.router.weight"),
    Rule(LAYER + r"mlp\.experts\.gate_up_proj", r"layers.\1.experts.gate_up"),
    Rule(LAYER + r"mlp\.experts\.down_proj", r"layers.\1.experts.down"),
)


def decoder_rules(config: ModelConfig) -> tuple[Rule | Skip, ...]:
    """Rules for everything but the feed-forward parts of a decoder with Llama's names."""
    head = (
        Skip(r"lm_head\.weight", "tied to the embeddings", copy_of="embed.weight")
        if config.tie_embeddings
        else Rule(r"lm_head\.weight", "head.weight")
    )
    return (
        Rule(r"model\.embed_tokens\.weight", "embed.weight"),
        Rule(r"model\.norm\.weight", "norm.weight"),
        head,
        Rule(LAYER + r"input_layernorm\.weight", r"layers.\1.attention_norm.weight"),
        Rule(LAYER + r"post_attention_layernorm\.weight", r"layers.\1.feed_forward_norm.weight"),
        Rule(LAYER + r"self_attn\.(q|k|v|o)_proj\.(weight|bias)", r"layers.\1.attention.\2.\3"),
        Skip(LAYER + r"self_attn\.rotary_emb\.inv_freq", "computed from rope_theta"),
    )


def resolve(
    tensors: Mapping[str, StoredTensor], rules: Sequence[Rule | Skip], config: ModelConfig
) -> dict[str, Piece]:
    """Target → where it lies. Raises CheckpointError with a list of all that does not fit."""
    compiled = [(re.compile(rule.source), rule) for rule in rules]
    _check_routers(tensors, compiled, config)
    expected = targets.expected_tensors(config)
    pieces: dict[str, Piece] = {}
    errors = []
    for name, tensor in tensors.items():
        where = f"tensor '{name}' in {tensor.path}"
        matches = [(match, rule) for regexp, rule in compiled if (match := regexp.fullmatch(name))]
        if len(matches) != 1:
            errors.append(
                f"{where}: {len(matches)} rules match" if matches else f"{where}: unknown"
            )
            continue
        match, rule = matches[0]
        if isinstance(rule, Skip):
            continue
        target = match.expand(rule.target)
        parts = list(_expand(target, tensor, config))
        if any(part not in expected for part, _ in parts):
            errors.append(f"{where}: is {target}, which this {config.family} model does not have")
            continue
        if error := _check(target, tensor, expected[parts[0][0]], config):
            errors.append(f"{where}: {error}")
            continue
        for part, piece in parts:
            if part in pieces:
                errors.append(f"{where}: is {part}, as '{pieces[part].tensor.name}' is")
                break
            pieces[part] = piece
    errors += [f"no tensor for {target}" for target in expected if target not in pieces]
    if errors:
        raise CheckpointError(_listing(errors))
    return pieces


def _check_routers(
    tensors: Mapping[str, StoredTensor],
    compiled: Sequence[tuple[re.Pattern[str], Rule | Skip]],
    config: ModelConfig,
) -> None:
    """Refuses a wrong number of layers or experts before as many targets are listed."""
    num_experts = config.moe.router.num_experts
    missing = {f"layers.{layer}.feed_forward.router.weight" for layer in config.moe_layers}
    for regexp, rule in compiled:
        if isinstance(rule, Skip) or not rule.target.endswith(".feed_forward.router.weight"):
            continue
        for name, tensor in tensors.items():
            if (match := regexp.fullmatch(name)) is None:
                continue
            if tensor.shape[:1] != (num_experts,):
                raise CheckpointError(
                    f"tensor '{name}' in {tensor.path}: shape {list(tensor.shape)}, "
                    f"but config.json says that there are {num_experts} experts"
                )
            missing.discard(match.expand(rule.target))
    if missing:
        first = min(missing, key=lambda target: (len(target), target))
        raise CheckpointError(
            f"no tensor for {first}: {len(missing)} of {len(config.moe_layers)} layers with "
            "experts have no router, but config.json says that there are so many layers"
        )


def _expand(target: str, tensor: StoredTensor, config: ModelConfig) -> Iterator[tuple[str, Piece]]:
    """The targets that a tensor fills: one, or those of all experts if it is fused."""
    match = re.fullmatch(r"(layers\.\d+\.experts)\.(gate_up|down)", target)
    if match is None:
        yield target, Piece(tensor=tensor)
        return
    width = config.moe.expert_width
    for e in range(config.moe.router.num_experts):
        if match[2] == "down":
            yield f"{match[1]}.{e}.down", Piece(tensor=tensor, index=e)
        else:
            yield f"{match[1]}.{e}.gate", Piece(tensor=tensor, index=e, rows=(0, width))
            yield f"{match[1]}.{e}.up", Piece(tensor=tensor, index=e, rows=(width, 2 * width))


def _check(
    target: str, tensor: StoredTensor, shape: tuple[int, ...], config: ModelConfig
) -> str | None:
    if target.endswith(".experts.gate_up"):
        shape = (config.moe.router.num_experts, 2 * shape[0], shape[1])
    elif target.endswith(".experts.down"):
        shape = (config.moe.router.num_experts, *shape)
    if tensor.shape != shape:
        return f"shape {list(tensor.shape)}, needed {list(shape)}"
    if tensor.dtype not in DTYPES:
        return f"dtype {tensor.dtype} is not supported (supported: {', '.join(DTYPES)})"
    if ".experts." in target and config.dtype == "bfloat16" and tensor.dtype != "BF16":
        return f"dtype {tensor.dtype} does not fit into this model's bfloat16"
    return None


def _listing(errors: list[str]) -> str:
    count = "1 tensor does" if len(errors) == 1 else f"{len(errors)} tensors do"
    lines = [f"{count} not fit the model of config.json:", *errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return "\n  ".join(lines)
