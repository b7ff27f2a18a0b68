"""Converts a Hugging Face folder into a checkpoint of moejax, a few tensors in memory at a time."""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Shaped

from moejax.arena import format, geometry
from moejax.checkpoint import CheckpointWriter, ExpertFile
from moejax.checkpoint.tensor_file import StoredTensor
from moejax.config import ModelConfig
from moejax.errors import CheckpointError
from moejax_converters import (
    any_precision,
    families,
    generation,
    packed,
    rules,
    staging,
    targets,
)
from moejax_converters.pieces import Piece
from moejax_converters.rules import Rule, Skip
from moejax_converters.source import DTYPES, Source

_log = logging.getLogger(__name__)
Weights = Source | packed.PackedSource
# Rows of two tensors that are compared at a time.
_ROWS = 4096


def convert(source: Path | str, target: Path | str, *, progress: bool = True) -> None:
    """Converts the folder `source` into the new folder `target`, or leaves nothing there.

    Values are kept as they are: float16 is stored as float32, which holds all of it. Parts that are
    not served, such as those for images, are left out, and a warning names them. Codes of a folder
    of Any-Precision LLM are taken as they are: what comes out is quantised. `progress` shows
    a bar where standard error is a terminal.
    """
    folder = Source(source)
    config = families.source_config(folder)
    is_packed = any_precision.is_any_precision(folder.config)
    quantization = packed.quantization(folder) if is_packed else None
    # What no engine could load is refused here, not after the work.
    geometry.choose_geometry(config, config.dtype, quantization)
    table = families.tensor_rules(config, folder.config)
    weights = packed.PackedSource(folder) if is_packed else folder
    # What tables hold is float16, whatever the model was made in.
    checked = dataclasses.replace(config, dtype="float32") if is_packed else config
    pieces = rules.resolve(weights.tensors, table, checked)
    _check_copies(weights, table, pieces)
    settings = generation.generation_settings(folder, config.vocab_size)
    if widened := _widened(pieces, config):
        _log.warning("%s weights are stored as float32, which holds them exactly", widened)
    if unserved := rules.unserved(folder.tensors, table):
        _log.warning("%s is not served: left out of %s", " and ".join(unserved), folder.folder)
    with staging.staged(Path(target)) as partial, _progress_bar(pieces, progress) as bar:
        writer = CheckpointWriter(partial, config, quantization)
        generation.copy_tokenizer(folder.folder, partial)
        for name, names in targets.dense_stacks(config).items():
            parts = [pieces[part] for part in names]
            writer.put_dense(name, _stack(weights, parts, config, stacked=name != names[0]))
            bar.update(sum(_num_bytes(part) for part in parts))
        codes = any_precision.packed_names(table, folder.tensors) if is_packed else {}
        for layer in config.moe_layers:
            with writer.expert_file(layer) as file:
                for expert in range(config.moe.router.num_experts):
                    parts = _expert_parts(pieces, layer, expert)
                    if is_packed:
                        packed.put_expert(folder, codes, file, layer, expert)
                    else:
                        _put_expert(folder, parts, file, expert, config)
                    bar.update(sum(_num_bytes(part) for part in parts))
        writer.finish(settings)


def _widened(pieces: Mapping[str, Piece], config: ModelConfig) -> str:
    narrow = {"F16": "float16"} | ({"BF16": "bfloat16"} if config.dtype == "float32" else {})
    stored = {piece.tensor.dtype for piece in pieces.values()}
    return " and ".join(name for dtype, name in narrow.items() if dtype in stored)


def _check_copies(
    folder: Weights, table: Sequence[Rule | Skip], pieces: Mapping[str, Piece]
) -> None:
    """Refuses a tensor that is skipped as a copy of another, and is not one."""
    for rule in table:
        if not isinstance(rule, Skip) or rule.copy_of is None:
            continue
        original = pieces[rule.copy_of].tensor
        for name, tensor in folder.tensors.items():
            if re.fullmatch(rule.source, name) and not _equal(folder, tensor, original):
                raise CheckpointError(
                    f"tensor '{name}' in {tensor.path}: differs from '{original.name}', "
                    f"but config.json says that it is {rule.reason}"
                )


def _equal(folder: Weights, a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    blocks = [(n, min(n + _ROWS, a.shape[0])) for n in range(0, a.shape[0], _ROWS)]
    return all(
        np.array_equal(folder.read(a.name, rows=rows), folder.read(b.name, rows=rows))
        for rows in blocks
    )


def _stack(
    folder: Weights, parts: list[Piece], config: ModelConfig, *, stacked: bool
) -> Shaped[np.ndarray, "..."]:
    """Tensors of several layers as one, in bfloat16 if all of them are, else in float32."""
    plain = config.dtype == "bfloat16" and all(part.tensor.dtype == "BF16" for part in parts)
    dtype = format.DTYPES["bfloat16" if plain else "float32"]
    stack = np.empty((len(parts), *parts[0].shape), dtype)
    for row, part in zip(stack, parts, strict=True):
        row[...] = _read(folder, [part])[0]
    return stack if stacked else stack[0]


def _expert_parts(pieces: Mapping[str, Piece], layer: int, expert: int) -> list[Piece]:
    """Its gate, up and down."""
    return [pieces[f"layers.{layer}.experts.{expert}.{part}"] for part in ("gate", "up", "down")]


def _put_expert(
    folder: Source, parts: list[Piece], file: ExpertFile, expert: int, config: ModelConfig
) -> None:
    dtype = format.DTYPES[config.dtype]
    gate, up, down = (array.astype(dtype, copy=False) for array in _read(folder, parts))
    file.put(expert, "gate_up", format.stack_halves(gate, up))
    file.put(expert, "down", down)


def _read(folder: Weights, pieces: Sequence[Piece]) -> list[Shaped[np.ndarray, "..."]]:
    """What these pieces hold. What several of them lie in is read once."""
    blocks: dict[Any, np.ndarray] = {}
    for piece in pieces:
        if piece.block not in blocks:
            name, index, rows = piece.block
            blocks[piece.block] = folder.read(name, index=index, rows=rows)
    return [piece.view.of(blocks[piece.block]) for piece in pieces]


def _num_bytes(piece: Piece) -> int:
    return math.prod(piece.shape) * DTYPES[piece.tensor.dtype].itemsize


def _progress_bar(pieces: Mapping[str, Piece], progress: bool) -> Any:
    return tqdm.tqdm(
        desc="converting",
        total=sum(_num_bytes(piece) for piece in pieces.values()),
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )
