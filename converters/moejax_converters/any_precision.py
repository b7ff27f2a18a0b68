"""Folders of Any-Precision LLM, whose linears are nested codes with tables instead of weights.

Park et al. 2024, arXiv 2402.10517. Such a folder is a Hugging Face folder whose `config.json` has

    "anyprec": {"seed_precision": 3, "parent_precision": 8, "group_count": 1, "arch_config": {…}}

and where a linear `X` that is packed has, in place of `X.weight` [rows, columns],

    X.qweight   int32 [parent, rows, columns / 32]: bit-planes of its codes, most significant first
    X.lut{b}    float16 [rows, 2^b], for each b from seed to parent: the weights that codes of b
                bits stand for, in rising order but for rounding

The top b bits of a code are the code of width b. Of a Mixture-of-Experts model, `X` is the name
that each expert's projection has in its family: `model.layers.3.mlp.experts.5.gate_proj`, `up_proj`
and `down_proj`; in Mixtral `model.layers.3.block_sparse_moe.experts.5.w1` (gate), `w3` (up) and
`w2` (down). Other linears of a layer may be packed too: left to itself the project packs all of
them, projections of attention and routers as well.

Only safetensors are read. The project itself writes a `pytorch_model.bin`, which is refused by
name: load it with `torch.load(…, weights_only=True)`, clone what shares memory (tied embeddings),
and save the same names with `safetensors.torch.save_file` as `model.safetensors` in its place.
What it cannot pack itself (groups of columns, sparse outliers) is refused.

Inside a row of a plane, words stand in the order of its CUDA kernel: 32 lanes load one word each,
for 1024 columns. With T words in chunk c (32, or what is left in the last chunk), bit
31 - (8 g + m) of word t is column 1024 c + 8 T g + 8 t + m, for 0 <= g < 4 and 0 <= m < 8.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float16, Int32, UInt8

from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config.quantization import MAX_BITS, MIN_BITS
from moejax.errors import CheckpointError, ConfigError
from moejax_converters.rules import Rule, Skip
from moejax_converters.source import Source

EXPERT_PARTS = ("gate", "up", "down")

_KEY = "anyprec"
_CODES, _WEIGHT = ".qweight", ".weight"
_WORD_BITS = 32
_LANES = 32
# The project takes means from differences of prefix sums: where importances differ by many orders
# of magnitude, neighbours come out in the wrong order, in a few percent of the steps at worst. What
# a code stands for is its entry all the same. Of tables in any order, half of the steps fall.
_MOST_FALLS = 0.25
# Which modules were packed is seen by the tensors that are there.
_KNOWN_KEYS = ("seed_precision", "parent_precision", "group_count", "arch_config")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The widths that all packed linears of a folder have."""

    seed_bits: int
    parent_bits: int

    @property
    def widths(self) -> range:
        return range(self.seed_bits, self.parent_bits + 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A linear as codes of `parent_bits` bits, in the order of its columns, and its tables."""

    codes: UInt8[np.ndarray, "rows columns"]
    tables: dict[int, Float16[np.ndarray, "rows _"]]
    """Width → [rows, 2^width], from the seed to the parent."""
    seed_bits: int
    parent_bits: int


def is_any_precision(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a packed folder."""
    return config.get(_KEY) is not None


def scheme(config: Mapping[str, Any]) -> Scheme:
    """What a config.json says of the codes. Raises CheckpointError for what cannot be read."""
    setting = config.get(_KEY)
    if not isinstance(setting, dict):
        raise CheckpointError(f"config.json: {_KEY} is {setting!r}, needed an object")
    seed, parent = setting.get("seed_precision"), setting.get("parent_precision")
    if type(seed) is not int or type(parent) is not int:
        raise CheckpointError(
            f"config.json: {_KEY}: seed_precision {seed!r} and parent_precision {parent!r}, "
            "needed two integers"
        )
    if not MIN_BITS <= seed <= parent <= MAX_BITS:
        raise CheckpointError(
            f"config.json: {_KEY}: seed_precision {seed} and parent_precision {parent}, "
            f"needed {MIN_BITS} <= seed_precision <= parent_precision <= {MAX_BITS}"
        )
    groups = setting.get("group_count", 1)
    if type(groups) is not int or groups != 1:
        raise CheckpointError(
            f"config.json: {_KEY}: group_count {groups!r} is not supported (supported: 1)"
        )
    for key, value in setting.items():
        # A variant of the project names its sparse outliers here: none of them do no harm.
        if key not in _KNOWN_KEYS and value:
            raise CheckpointError(f"config.json: {_KEY}: {key} is not supported")
    return Scheme(seed_bits=seed, parent_bits=parent)


def unpack_codes(
    qweight: Int32[np.ndarray, "planes rows words"],
) -> UInt8[np.ndarray, "rows columns"]:
    """The codes of bit-planes, in the order of their columns; columns = 32 * words."""
    planes, rows, words = qweight.shape
    if not 1 <= planes <= MAX_BITS:
        raise ValueError(f"{planes} planes, needed 1 to {MAX_BITS}")
    full = words // _LANES * _LANES
    codes = np.zeros((rows, words * _WORD_BITS), np.uint8)
    for plane in qweight:
        # Bytes of words and bits of bytes, the most significant first: [words, g] and m.
        parts = plane.astype(">i4").view(np.uint8).reshape(rows, words, 4)
        chunks = parts[:, :full].reshape(rows, full // _LANES, _LANES, 4).swapaxes(2, 3)
        last = parts[:, full:].swapaxes(1, 2)
        ordered = [chunks.reshape(rows, 4 * full), last.reshape(rows, 4 * (words - full))]
        codes <<= 1
        codes |= np.unpackbits(np.concatenate(ordered, axis=1), axis=1)
    return codes


def read_linear(source: Source, prefix: str) -> PackedLinear:
    """The packed linear whose tensors are `prefix.qweight` and `prefix.lut…`.

    Raises:
        CheckpointError: a tensor is missing, or its dtype or shape is not what `anyprec` says, or a
            table holds what is not finite, or is not in rising order.
    """
    widths = scheme(source.config)
    qweight, tables = _parts(source, prefix, widths)
    return PackedLinear(
        codes=unpack_codes(source.read(qweight.name)),
        tables={bits: _read_table(source, table) for bits, table in tables.items()},
        seed_bits=widths.seed_bits,
        parent_bits=widths.parent_bits,
    )


def cut(linear: PackedLinear, parent_bits: int) -> PackedLinear:
    """The same weights at widths up to `parent_bits`: nesting makes that exact.

    Raises ConfigError if the linear has no such width.
    """
    _check_width(linear, parent_bits)
    return PackedLinear(
        codes=linear.codes >> (linear.parent_bits - parent_bits),
        tables={bits: table for bits, table in linear.tables.items() if bits <= parent_bits},
        seed_bits=linear.seed_bits,
        parent_bits=parent_bits,
    )


def values(linear: PackedLinear, bits: int) -> Float16[np.ndarray, "rows columns"]:
    """The weights of a width. Raises ConfigError if the linear does not have it."""
    _check_width(linear, bits)
    table, codes = linear.tables[bits], linear.codes >> (linear.parent_bits - bits)
    weights = np.empty(codes.shape, table.dtype)
    # A row at a time: NumPy looks up with indices of eight bytes.
    for row in range(len(codes)):
        weights[row] = table[row, codes[row]]
    return weights


def shown(source: Source) -> dict[str, StoredTensor]:
    """The tensors of a folder, with `X.weight` in float16 in place of all that X is packed as.

    With these `rules.resolve` finds and checks the targets as it does in every other folder; a
    tensor that belongs to a packed linear and is not read is unknown to it. A shown tensor stands
    at the place of its codes: what it holds is `values(read_linear(source, "X"), …)`.

    Raises CheckpointError, as `read_linear` does, for what the headers tell.
    """
    widths = scheme(source.config)
    tensors = dict(source.tensors)
    for prefix in _prefixes(source.tensors):
        qweight, tables = _parts(source, prefix, widths)
        name = prefix + _WEIGHT
        if name in tensors:
            raise _error(qweight, f"there is '{name}' too, in {tensors[name].path}")
        for part in (qweight, *tables.values()):
            del tensors[part.name]
        _, rows, words = qweight.shape
        shape = (rows, words * _WORD_BITS)
        tensors[name] = dataclasses.replace(
            qweight, name=name, dtype="F16", shape=shape, num_bytes=2 * shape[0] * shape[1]
        )
    return tensors


def packed_names(
    table: Sequence[Rule | Skip], tensors: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Target → the prefix X that it is packed under, by the rule for `X.weight`.

    `layers.3.experts.5.gate` is that of an expert; other linears have theirs, such as
    `layers.3.attention.q.weight`. Left out is what a rule skips, and what holds several targets
    (keys and values of latent attention): those are parts of its values, not of its codes.

    Args:
        table: of the family, see `families.tensor_rules`.
        tensors: those of the folder, not the shown ones.

    Raises CheckpointError unless one rule matches, and each target is packed once.
    """
    skips = [re.compile(rule.source) for rule in table if isinstance(rule, Skip)]
    compiled = [(re.compile(rule.source), rule) for rule in table if isinstance(rule, Rule)]
    names: dict[str, str] = {}
    for prefix in _prefixes(tensors):
        qweight, name = tensors[prefix + _CODES], prefix + _WEIGHT
        if any(skip.fullmatch(name) for skip in skips):
            continue
        matches = [(match, rule) for regexp, rule in compiled if (match := regexp.fullmatch(name))]
        if len(matches) != 1:
            raise _error(qweight, f"{len(matches)} rules match '{name}', needed one")
        match, rule = matches[0]
        if rule.layout is not None:
            continue
        target = match.expand(rule.target)
        if target in names:
            raise _error(qweight, f"is {target}, as '{names[target]}{_CODES}' is")
        names[target] = prefix
    return names


def expert_linears(
    source: Source, names: Mapping[str, str], layer: int, expert: int
) -> dict[str, PackedLinear]:
    """The linears of an expert by EXPERT_PARTS; `names` are the `packed_names` of the folder.

    Raises CheckpointError if one is not packed, or as `read_linear` does.
    """
    linears = {}
    for part in EXPERT_PARTS:
        target = f"layers.{layer}.experts.{expert}.{part}"
        if target not in names:
            raise CheckpointError(f"{source.folder}: no tensor *{_CODES} is {target}")
        linears[part] = read_linear(source, names[target])
    return linears


def _prefixes(tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [name.removesuffix(_CODES) for name in tensors if name.endswith(_CODES)]


def _parts(
    source: Source, prefix: str, widths: Scheme
) -> tuple[StoredTensor, dict[int, StoredTensor]]:
    """The codes and the tables of a linear, which fit each other and the scheme."""
    qweight = _tensor(source, prefix + _CODES)
    shape = qweight.shape
    fits = len(shape) == 3 and shape[0] == widths.parent_bits and min(shape) > 0
    if qweight.dtype != "I32" or not fits:
        raise _error(
            qweight,
            f"{qweight.dtype} {list(shape)}, needed I32 "
            f"[{widths.parent_bits}, rows, columns / {_WORD_BITS}]",
        )
    tables = {bits: _tensor(source, f"{prefix}.lut{bits}") for bits in widths.widths}
    for bits, table in tables.items():
        needed = (shape[1], 1 << bits)
        if (table.dtype, table.shape) != ("F16", needed):
            raise _error(table, f"{table.dtype} {list(table.shape)}, needed F16 {list(needed)}")
    return qweight, tables


def _tensor(source: Source, name: str) -> StoredTensor:
    if name not in source.tensors:
        raise CheckpointError(f"{source.folder}: no tensor '{name}'")
    return source.tensors[name]


def _read_table(source: Source, tensor: StoredTensor) -> Float16[np.ndarray, "rows entries"]:
    table = source.read(tensor.name)
    is_finite = np.isfinite(table)
    if not is_finite.all():
        row, code = np.argwhere(~is_finite)[0].tolist()
        raise _error(tensor, f"{table[row, code]} at {[row, code]}")
    falls = np.mean(table[:, 1:] < table[:, :-1])
    if falls > _MOST_FALLS:
        raise _error(tensor, f"{falls:.0%} of its steps fall: no tables in rising order")
    return table


def _check_width(linear: PackedLinear, bits: int) -> None:
    if not linear.seed_bits <= bits <= linear.parent_bits:
        raise ConfigError(
            f"{bits} bits: the packed weights have {linear.seed_bits} to {linear.parent_bits}"
        )


def _error(tensor: StoredTensor, problem: str) -> CheckpointError:
    return CheckpointError(f"tensor '{tensor.name}' in {tensor.path}: {problem}")
