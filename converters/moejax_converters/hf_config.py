"""Reading a Hugging Face `config.json`, in the spellings of transformers 4 and 5.

A key that is absent, or null, means the default of the family's class in transformers. What
moejax cannot honour is refused by the key's name, with its value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moejax import config
from moejax.config import Dtype, LayerKind, ModelConfig, Rope
from moejax.errors import ConfigError

DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    # Every float16 is a float32; bfloat16 would lose three bits of it.
    "float16": "float32",
}
"""dtype of a checkpoint → dtype that it is stored in."""

# What transformers' default rotary positions read; the first two are spellings of the type.
_DEFAULT_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


class Fields:
    """Typed access to a config.json. Several names of one setting may be given: its spellings."""

    def __init__(self, hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.hf = hf
        self._defaults = defaults

    def value(self, *names: str) -> Any:
        """The value under any of the names, else the default of the first, else None."""
        found = {name: self.hf[name] for name in names if self.hf.get(name) is not None}
        values = list(found.values())
        # NaN differs from itself.
        if any(value is not values[0] and value != values[0] for value in values):
            raise ConfigError(
                "config.json: " + " and ".join(f"{n} {v}" for n, v in found.items()) + " disagree"
            )
        return values[0] if values else self._defaults.get(names[0])

    def integer(self, *names: str, least: int = 1, most: int = config.MAX_INTEGER) -> int:
        """An integer, from `least` to `most`."""
        value = self.value(*names)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"config.json: {names[0]} is {value!r}, needed an integer of at least {least} "
                f"and at most {most}"
            )
        return value

    def number(self, *names: str) -> float:
        """A positive number."""
        return positive(names[0], self.value(*names))

    def flag(self, *names: str) -> bool:
        """True or false."""
        value = self.value(*names)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {names[0]} is {value!r}, needed true or false")
        return value

    def integers(self, *names: str) -> list[int]:
        """A list of integers."""
        value = self.value(*names)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ConfigError(f"config.json: {names[0]} is {value!r}, needed a list of integers")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Refuses the setting unless it has one of the supported values."""
        value = self.value(name)
        if value not in supported:
            options = ", ".join(str(option) for option in supported)
            raise ConfigError(
                f"config.json: {name} {value!r} is not supported (supported: {options})"
            )


def positive(name: str, value: Any) -> float:
    """A positive finite number, as a float."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= config.MAX_FLOAT:
        raise ConfigError(f"config.json: {name} is {value!r}, needed a positive number")
    return float(value)


def decoder(family: str, fields: Fields, layers: Sequence[LayerKind]) -> ModelConfig:
    """The ModelConfig of a plain decoder with these layers."""
    fields.only("hidden_act", "silu")
    _check_layer_types(fields, layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        norm_epsilon=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        dtype=dtype(fields),
        segments=config.segments_of(layers),
    )


def _check_layer_types(fields: Fields, layers: Sequence[LayerKind]) -> None:
    """Refuses `layer_types` that are not those of the layers, where the family does not read it."""
    kinds = fields.value("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != len(layers):
        raise ConfigError(
            f"config.json: layer_types is {kinds!r}, needed a list of {len(layers)}, one per layer"
        )
    for n, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        built = "full_attention" if layer.attention.window is None else "sliding_attention"
        if kind != built:
            raise ConfigError(
                f"config.json: layer_types says {kind!r} for layer {n}, which by model_type and "
                f"sliding_window is {built!r}"
            )


def dtype(fields: Fields) -> Dtype:
    """The dtype that the checkpoint is stored in after conversion."""
    name = str(fields.value("dtype", "torch_dtype")).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: dtype '{name}' is not supported (supported: {', '.join(DTYPES)})"
        )
    return DTYPES[name]


def head_counts(fields: Fields) -> tuple[int, int, int]:
    """Query heads, KV heads and head size."""
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.value("num_key_value_heads")
    head_size = fields.value("head_dim")
    if head_size is None and hidden < heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is less than num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    return (
        heads,
        heads if kv_heads is None else fields.integer("num_key_value_heads"),
        hidden // heads if head_size is None else fields.integer("head_dim"),
    )


def num_layers(fields: Fields) -> int:
    """`num_hidden_layers`."""
    return fields.integer("num_hidden_layers", most=config.MAX_LAYERS)


def rope(fields: Fields) -> Rope:
    """Plain rotary positions; every kind of scaling and partial rotation is refused."""
    parameters = fields.value("rope_scaling", "rope_parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise ConfigError(f"config.json: rope_parameters is {parameters!r}, needed an object")
    nested = [name for name, value in parameters.items() if name.endswith("_attention")]
    if nested:
        raise ConfigError(
            f"config.json: rope_parameters that differ by layer ({', '.join(nested)}) "
            "are not supported"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"config.json: rope type '{kind}' is not supported (supported: default)")
    partial = parameters.get("partial_rotary_factor", fields.value("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(
            f"config.json: partial_rotary_factor {partial} is not supported (supported: 1.0)"
        )
    for name, value in parameters.items():
        if name not in _DEFAULT_ROPE_KEYS and value is not None:
            raise ConfigError(
                f"config.json: rope_parameters has {name} {value!r}, "
                "but rope type 'default' does not scale"
            )
    theta = parameters.get("rope_theta")
    return Rope(
        theta=positive("rope_theta", fields.value("rope_theta") if theta is None else theta)
    )


def sparse_layers(fields: Fields) -> list[bool]:
    """Which layers have routed experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step")
    dense = fields.integers("mlp_only_layers")
    return [n not in dense and (n + 1) % step == 0 for n in range(num_layers(fields))]


def window(fields: Fields) -> int | None:
    """`sliding_window`, where `use_sliding_window` says that it counts."""
    if not fields.flag("use_sliding_window"):
        return None
    if "sliding_window" not in fields.hf:
        return 4096  # the default of the classes that have use_sliding_window
    return None if fields.hf["sliding_window"] is None else fields.integer("sliding_window")
