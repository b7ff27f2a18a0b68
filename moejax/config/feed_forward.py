"""MLPs, routers and experts."""

import dataclasses
from typing import Annotated, Literal

import pydantic

from moejax.config.values import MAX_FLOAT, STRICT, Positive, PositiveFloat
from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """(min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit) (gpt-oss)."""

    __pydantic_config__ = STRICT
    limit: PositiveFloat
    alpha: PositiveFloat


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiglu
"""What makes one value of gate x and up x: a function of gate, times up, unless said otherwise."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A gated MLP: down(activation(gate x) * up x)."""

    __pydantic_config__ = STRICT
    kind: Literal["mlp"] = "mlp"
    width: Positive
    activation: Activation = "silu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Experts stand in groups; a token chooses from the best groups only (DeepSeek-V2, 2.2.2)."""

    __pydantic_config__ = STRICT
    count: Positive
    kept: Positive
    best: Literal[1, 2]
    """The score of a group is the sum of this many of its best."""

    def __post_init__(self) -> None:
        if self.kept > self.count:
            raise ConfigError(f"{self.kept} groups of experts are kept, of {self.count}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Scores of all experts, the `experts_per_token` largest of them, and their weights."""

    __pydantic_config__ = STRICT
    num_experts: Positive
    experts_per_token: Positive
    renormalize: bool
    """Divide the chosen weights by their sum."""
    float32_weights: bool
    """Keep the weights in float32 for the combination, rather than in the model's dtype."""
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Of the logits: over all experts, each for itself, or SparseMixer's two rounds (Liu et al.
    2023, GRIN; the part for inference)."""
    float32_logits: bool = False
    """Weights, input and product in float32, rather than in the model's dtype."""
    bias: bool = False
    """On the logits."""
    choice_bias: bool = False
    """A learned value per expert, added to its score where experts are chosen, not to its weight
    (Wang et al. 2024, loss-free balancing)."""
    groups: ExpertGroups | None = None
    scale: PositiveFloat = 1.0
    """Factor on the weights."""
    jitter: Annotated[float, pydantic.Field(ge=0, le=MAX_FLOAT, allow_inf_nan=False)] = 0.0
    """Of SparseMixer: experts further from the best than twice this share do not count."""
    input_norm: bool = False
    """The router reads RMS(x) * learned scale * hidden_size ** -0.5 (Gemma 4)."""
    expert_scale: bool = False
    """A learned factor per expert on its weights."""

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{self.experts_per_token} experts per token of {self.num_experts} experts"
            )
        if self.score == "sparsemixer" and self.experts_per_token != 2:
            raise ConfigError(f"sparsemixer chooses 2 experts, not {self.experts_per_token}")
        if self.score != "sparsemixer" and self.jitter:
            raise ConfigError("jitter is of sparsemixer")
        if self.score == "sparsemixer" and (self.choice_bias or self.groups or self.renormalize):
            raise ConfigError("sparsemixer has no choice bias, no groups and no renormalization")
        if self.groups is not None:
            size, rest = divmod(self.num_experts, self.groups.count)
            if rest or self.experts_per_token > size * self.groups.kept or size < self.groups.best:
                raise ConfigError(
                    f"{self.num_experts} experts in {self.groups.count} groups, of which "
                    f"{self.groups.kept} are kept, give no {self.experts_per_token} for a token"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An MLP that every token passes; `gated`: times sigmoid of a learned projection."""

    __pydantic_config__ = STRICT
    width: Positive
    gated: bool
    activation: Activation = "silu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts of `expert_width`, each a gated MLP, and perhaps a shared expert."""

    __pydantic_config__ = STRICT
    kind: Literal["moe"] = "moe"
    router: Router
    expert_width: Positive
    activation: Activation = "silu"
    expert_bias: bool = False
    """On gate, up and down of every expert; the routing weight multiplies that of down too."""
    weights_input: bool = False
    """The routing weight multiplies the expert's input, not its output (Llama 4)."""
    shared: SharedExpert | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpAndMoe:
    """A dense MLP beside routed experts, summed (Gemma 4).

    Both read norms of their own of the residual, the router the residual itself, and the outputs
    of both are normed.
    """

    __pydantic_config__ = STRICT
    kind: Literal["mlp_and_moe"] = "mlp_and_moe"
    mlp: Mlp
    moe: Moe


FeedForward = Annotated[Mlp | Moe | MlpAndMoe, pydantic.Field(discriminator="kind")]
