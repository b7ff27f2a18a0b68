"""A folder of Any-Precision LLM becomes a quantised checkpoint with the same weights."""

import numpy as np
import pytest

from converters import apl_packing
from moejax.checkpoint import Checkpoint
from moejax.errors import CheckpointError
from moejax.models.whole import read_linear
from moejax_converters import any_precision, inspection
from moejax_converters.convert import convert
from moejax_converters.source import Source


@pytest.mark.shows(
    "quantised experts", "folders of any-precision-llm are read, codes and tables as they are"
)
@pytest.mark.parametrize("packed", [apl_packing.EXPERTS, apl_packing.ALL_LINEARS])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_every_width_is_that_of_the_folder(family, packed, tmp_path):
    linears = apl_packing.write(tmp_path / "source", family, packed=packed)
    convert(tmp_path / "source", tmp_path / "target")
    names = apl_packing.names_of(Source(tmp_path / "source"))
    checkpoint = Checkpoint.open(tmp_path / "target")
    of = checkpoint.quantization
    assert of is not None
    assert (of.seed_bits, of.parent_bits, of.gate_up_rows_per_table) == (3, 4, 1)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.moe.router.num_experts):
            checkpoint.verify_expert(layer, expert)
            for width in of.widths:
                gate_up, down = (
                    np.asarray(read_linear(checkpoint, layer, expert, which, width, "float32"))
                    for which in (0, 1)
                )
                parts = {"gate": gate_up[0], "up": gate_up[1], "down": down[0]}
                for part, weights in parts.items():
                    linear = linears[names[f"layers.{layer}.experts.{expert}.{part}"]]
                    np.testing.assert_array_equal(weights, any_precision.values(linear, width))


def test_packed_dense_linears_have_the_weights_of_the_largest_width(tmp_path):
    linears = apl_packing.write(tmp_path / "source", "mixtral", packed=apl_packing.ALL_LINEARS)
    convert(tmp_path / "source", tmp_path / "target")
    checkpoint = Checkpoint.open(tmp_path / "target")
    q = np.asarray(checkpoint.read_dense("segments.0.0.attention.q.weight", "float32"))
    for layer, weights in enumerate(q):
        linear = linears[f"model.layers.{layer}.self_attn.q_proj"]
        np.testing.assert_array_equal(weights, any_precision.values(linear, 4))


def test_nobody_knows_what_its_widths_cost(tmp_path):
    apl_packing.write(tmp_path / "source", "mixtral")
    convert(tmp_path / "source", tmp_path / "target")
    checkpoint = Checkpoint.open(tmp_path / "target")
    assert not checkpoint.has_sensitivity
    with pytest.raises(CheckpointError, match="imported as codes, without the weights"):
        checkpoint.sensitivity()
    assert "3 to 4 bits" in inspection.table(tmp_path / "target")
