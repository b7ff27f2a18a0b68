"""Small Hugging Face folders of codes and scales."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moejax_converters.source import Source

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
NUMBERS = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
"""The codes of E4M3 that are not NaN."""


def fp8(rows, columns):
    return {"quant_method": "fp8", "weight_block_size": [rows, columns]}


def open_folder(folder, tensors, quantization, **config):
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({"model_type": "some"} | config))
    save_file(tensors, folder / "model.safetensors")
    return Source(folder)


def open_fp8(folder, codes, scales, block, **config):
    tensors = {
        "a.weight": np.asarray(codes, np.uint8).view(FP8),
        "a.weight_scale_inv": np.asarray(scales, np.float32),
    }
    return open_folder(folder, tensors, fp8(*block), **config)


def open_mxfp4(folder, codes, scales, **config):
    tensors = {"p_blocks": np.asarray(codes, np.uint8), "p_scales": np.asarray(scales, np.uint8)}
    return open_folder(folder, tensors, {"quant_method": "mxfp4"}, **config)
