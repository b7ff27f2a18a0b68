"""Folders of Any-Precision LLM, written bit by bit, and what its CUDA kernel makes of them.

Both are spelled here a second time, one bit after the other, and know nothing of each other: the
packer goes from columns to words, the kernel from lanes and words to activations.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from converters import checkpoints
from moejax_converters import any_precision, families, rules
from moejax_converters.any_precision import PackedLinear
from moejax_converters.pieces import Piece
from moejax_converters.source import Source

EXPERTS = r".*\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
ALL_LINEARS = r".*(_proj|_proj_with_mqa|\.w[123]|gate)\.weight"
"""What the project packs if it is left to itself."""
SIZES: dict[str, dict[str, int]] = {
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    | {"intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 96, "intermediate_size": 128},
    "deepseek_v2": {"moe_intermediate_size": 32, "intermediate_size": 64}
    | {"kv_lora_rank": 32, "num_attention_heads": 4, "v_head_dim": 8},
}
"""Family → sizes with which all rows are made of whole words."""


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [bits, rows, columns / 32] of codes [rows, columns]."""
    rows, columns = codes.shape
    words = np.zeros((bits, rows, columns // 32), np.uint32)
    below = np.arange(bits - 1, -1, -1, dtype=np.uint32)[:, None]
    for column in range(columns):
        chunk, within = divmod(column, 1024)
        lanes = min(1024, columns - 1024 * chunk) // 32
        byte, rest = divmod(within, 8 * lanes)
        lane, bit = divmod(rest, 8)
        place = 31 - (8 * byte + bit)
        words[:, :, 32 * chunk + lane] |= (codes[None, :, column] >> below & 1) << place
    return words.view(np.int32)


def kernel_product(qweight: np.ndarray, table: np.ndarray, activations: np.ndarray) -> np.ndarray:
    """What a warp adds up for each row, in float64: the table's entries times the activations.

    Lanes run one after the other here. Activations are loaded as vectors of eight; the four that a
    lane loads in a chunk lie as many vectors apart as lanes are active. A lane takes the bytes of
    its words from the least significant one upwards, and with each byte, whose first code is in the
    most significant bits, the vector of that number.
    """
    bits, rows, words = qweight.shape
    memory, vectors = qweight.view(np.uint32).reshape(-1), activations.reshape(-1, 8)
    row = np.arange(rows)
    sums = np.zeros(rows)
    columns = 32 * words
    for chunk in range(-(-columns // 1024)):
        active = 32 if chunk < columns // 1024 else columns % 1024 // 32
        for lane in range(active):
            planes = [memory[(p * rows + row) * words + chunk * 32 + lane] for p in range(bits)]
            for byte in (3, 2, 1, 0):
                vector = vectors[active * byte + chunk * 128 + lane]
                for place in range(8):
                    code = np.zeros(rows, np.int64)
                    for plane in planes:
                        code = code << 1 | (plane >> (7 - place)) & 1
                    sums += table[row, code] * vector[place]
                planes = [plane >> 8 for plane in planes]
    return sums


def random_linear(
    rng: np.random.Generator, rows: int, columns: int, *, seed_bits: int = 3, parent_bits: int = 8
) -> PackedLinear:
    """Any codes, and tables that rise."""
    tables = {
        bits: np.sort(rng.standard_normal((rows, 1 << bits)), axis=1).astype(np.float16)
        for bits in range(seed_bits, parent_bits + 1)
    }
    codes = rng.integers(0, 1 << parent_bits, (rows, columns), np.uint8)
    return PackedLinear(codes=codes, tables=tables, seed_bits=seed_bits, parent_bits=parent_bits)


def tensors_of(prefix: str, linear: PackedLinear) -> dict[str, np.ndarray]:
    """A linear as a folder holds it."""
    tables = {f"{prefix}.lut{bits}": table for bits, table in linear.tables.items()}
    return {f"{prefix}.qweight": pack(linear.codes, linear.parent_bits)} | tables


def setting(seed_bits: int = 3, parent_bits: int = 8, **changes: Any) -> dict[str, Any]:
    """The `anyprec` of a config.json."""
    return {
        "seed_precision": seed_bits,
        "parent_precision": parent_bits,
        "group_count": 1,
        "arch_config": {"model_name": "model", "layers_name": "layers", "module_names": []},
    } | changes


def write(
    folder: Path,
    family: str,
    *,
    packed: str = EXPERTS,
    seed_bits: int = 3,
    parent_bits: int = 4,
    shards: int = 1,
    changed: dict[str, np.ndarray | None] | None = None,
) -> dict[str, PackedLinear]:
    """Writes a small model; returns what is packed, by prefix. Its names match `packed`.

    `changed` are tensors to write instead, or besides; None leaves one out.
    """
    hf = checkpoints.config_of(family, **SIZES[family], torch_dtype="float16")
    hf["anyprec"] = setting(seed_bits, parent_bits)
    model = checkpoints.model_tensors(hf, np.dtype(np.float16))
    rng = np.random.default_rng(1)
    tensors: dict[str, np.ndarray | None] = {}
    linears = {}
    for name, array in checkpoints.hf_tensors(model, family).items():
        if re.fullmatch(packed, name) is None:
            tensors[name] = array
            continue
        prefix = name.removesuffix(".weight")
        linears[prefix] = random_linear(
            rng, *array.shape, seed_bits=seed_bits, parent_bits=parent_bits
        )
        tensors |= tensors_of(prefix, linears[prefix])
    tensors |= changed or {}
    kept = {name: array for name, array in tensors.items() if array is not None}
    checkpoints.write_folder(folder, hf, kept, shards=shards)
    return linears


def names_of(source: Source) -> dict[str, str]:
    """The `packed_names` of a folder."""
    table = families.tensor_rules(families.source_config(source), source.config)
    return any_precision.packed_names(table, source.tensors)


def resolve(source: Source) -> dict[str, Piece]:
    """Where the targets lie, as a conversion would ask."""
    config = families.source_config(source)
    table = families.tensor_rules(config, source.config)
    return rules.resolve(any_precision.shown(source), table, config)
