"""Reading a Hugging Face `config.json`, in the spellings of transformers 4 and 5.

A key that is absent, or null, means the default of the family's class in transformers. What
moejax cannot honour is refused by the key's name, with its value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moejax import config
from moejax.config import Attention, Dtype, LayerKind, ModelConfig, Rope
from moejax.errors import ConfigError

DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    # Every float16 is a float32; bfloat16 would lose three bits of it.
    "float16": "float32",
}
"""dtype of a checkpoint → dtype that it is stored in."""
ALL_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_DTYPE_NAMES = ("dtype", "torch_dtype")
_OF_ALL_PARTS = (*_DTYPE_NAMES, "tie_word_embeddings")


class Fields:
    """Typed access to a config.json. Several names of one setting may be given: its spellings.

    `at` stands before the names in messages: where an object lies within the file.
    """

    def __init__(self, hf: Mapping[str, Any], defaults: Mapping[str, Any], *, at: str = "") -> None:
        self.hf = hf
        self.at = at
        self._defaults = defaults

    def value(self, *names: str) -> Any:
        """The value under any of the names, else the default of the first, else None."""
        return self._find(*names)[1]

    def integer(self, *names: str, least: int = 1, most: int = config.MAX_INTEGER) -> int:
        """An integer, from `least` to `most`."""
        name, value = self._find(*names)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"config.json: {name} is {value!r}, needed an integer of at least {least} "
                f"and at most {most}"
            )
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer; null in the file means None, whatever the default is."""
        return None if self._is_none(name) else self.integer(name)

    def number(self, *names: str) -> float:
        """A positive number."""
        return _positive(*self._find(*names))

    def optional_number(self, name: str) -> float | None:
        """A positive number; null in the file means None, whatever the default is."""
        return None if self._is_none(name) else self.number(name)

    def numbers(self, *names: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        name, value = self._find(*names)
        if not isinstance(value, list):
            raise ConfigError(f"config.json: {name} is {value!r}, needed a list of numbers")
        return tuple(_positive(f"{name}[{i}]", item) for i, item in enumerate(value))

    def nonnegative(self, *names: str) -> float:
        """A positive number or 0."""
        name, value = self._find(*names)
        return 0.0 if type(value) in (int, float) and value == 0 else _positive(name, value)

    def flag(self, *names: str) -> bool:
        """True or false."""
        name, value = self._find(*names)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} is {value!r}, needed true or false")
        return value

    def integers(self, *names: str) -> list[int]:
        """A list of integers."""
        name, value = self._find(*names)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ConfigError(f"config.json: {name} is {value!r}, needed a list of integers")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Refuses the setting unless it has one of the supported values."""
        at, value = self._find(name)
        # 0 equals False, and True 1.
        if not any(
            value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported
        ):
            options = ", ".join(str(option) for option in supported)
            raise ConfigError(
                f"config.json: {at} {value!r} is not supported (supported: {options})"
            )

    def _is_none(self, name: str) -> bool:
        return self.hf.get(name, self._defaults.get(name)) is None

    def _find(self, *names: str) -> tuple[str, Any]:
        """The name that the file has, as messages write it, and the value."""
        found = {name: self.hf[name] for name in names if self.hf.get(name) is not None}
        values = list(found.values())
        # NaN differs from itself.
        if any(value is not values[0] and value != values[0] for value in values):
            both = " and ".join(f"{self.at}{n} {v}" for n, v in found.items())
            raise ConfigError(f"config.json: {both} disagree")
        name = next(iter(found), names[0])
        return self.at + name, values[0] if values else self._defaults.get(names[0])


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= config.MAX_FLOAT:
        raise ConfigError(f"config.json: {name} is {value!r}, needed a positive number")
    return float(value)


def text_fields(hf: Mapping[str, Any], defaults: Mapping[str, Any], model_type: str) -> Fields:
    """The fields of a decoder whose config.json may be that of a model of several modalities.

    Then the decoder's, of this `model_type`, stand in `text_config`, and some for all parts at the
    top level.
    """
    if hf.get("model_type") == model_type:
        return Fields(hf, defaults)
    text = hf.get("text_config")
    text = {} if text is None else text
    if not isinstance(text, dict) or text.get("model_type", model_type) != model_type:
        raise ConfigError(
            f"config.json: text_config is {text!r}, needed an object of model type '{model_type}'"
        )
    # What both say must agree.
    inner = {f"text_config.{name}": text.get(name) for name in _OF_ALL_PARTS}
    both = Fields(dict(hf) | inner, {})
    shared = {name: both.value(f"text_config.{name}", name) for name in _OF_ALL_PARTS}
    return Fields(text | shared, defaults, at="text_config.")


def decoder(family: str, fields: Fields, layers: Sequence[LayerKind]) -> ModelConfig:
    """The ModelConfig of a plain decoder with these layers."""
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


def check_plain(fields: Fields) -> None:
    """Refuses another activation than silu, and settings of single layers."""
    fields.only("hidden_act", "silu")
    fields.only("per_layer_config", None, {})


def layer_types(fields: Fields, default: Sequence[str], *supported: str) -> list[str]:
    """What each layer attends to: `layer_types`, each one of those supported, else `default`."""
    kinds = fields.value("layer_types")
    if kinds is None:
        return list(default)
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default)
        or not all(kind in supported for kind in kinds)
    ):
        raise ConfigError(
            f"config.json: {fields.at}layer_types is {kinds!r}, "
            f"needed a list of {len(default)}, one per layer, of {' or '.join(supported)}"
        )
    return kinds


def _check_layer_types(fields: Fields, layers: Sequence[LayerKind]) -> None:
    """Refuses `layer_types` that are not those of the layers, where the family does not read it."""
    built = [_layer_type(layer) for layer in layers]
    for n, kind in enumerate(layer_types(fields, built, *ALL_LAYER_TYPES)):
        if kind != built[n]:
            raise ConfigError(
                f"config.json: layer_types says {kind!r} for layer {n}, which by model_type and "
                f"sliding_window is {built[n]!r}"
            )


def _layer_type(layer: LayerKind) -> str:
    reach = layer.attention.reach
    if reach.chunk is not None:
        return "chunked_attention"
    return "full_attention" if reach.window is None else "sliding_attention"


def has_dtype(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json says the dtype of the checkpoint."""
    text = hf.get("text_config")
    places = (hf, text if isinstance(text, dict) else {})
    return any(place.get(name) is not None for place in places for name in _DTYPE_NAMES)


def dtype(fields: Fields) -> Dtype:
    """The dtype that the checkpoint is stored in after conversion."""
    name = str(fields.value(*_DTYPE_NAMES)).removeprefix("torch.")
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


def attention(fields: Fields, *, rope: Rope | None, **parts: Any) -> Attention:
    """Grouped-query attention with the usual scale; `parts`: what is special to the family."""
    heads, kv_heads, head_size = head_counts(fields)
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        rope=rope,
        **parts,
    )


def num_layers(fields: Fields) -> int:
    """`num_hidden_layers`."""
    return fields.integer("num_hidden_layers", most=config.MAX_LAYERS)


def sparse_layers(fields: Fields) -> list[bool]:
    """Which layers have routed experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step")
    dense = fields.integers("mlp_only_layers")
    return [n not in dense and (n + 1) % step == 0 for n in range(num_layers(fields))]


def window(fields: Fields) -> int | None:
    """`sliding_window`, where `use_sliding_window` says that it counts."""
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
