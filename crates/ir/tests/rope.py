"""Writes rope.json: inverse frequencies and rotary tables as Hugging Face's LLaMA computes them.

    python crates/ir/tests/rope.py

Needs torch and transformers. PyTorch's power is within one unit in the last place, which one depends on the machine; in
these cases it was the correctly rounded one on x86-64 with AVX2.
"""

import json
from pathlib import Path

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

POSITIONS = [1, 4097, 131071]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = [
    (64, 10_000.0, None),
    (128, 500_000.0, None),
    (64, 10_000.0, {"rope_type": "linear", "factor": 3.0}),
    (64, 500_000.0, {"rope_type": "llama3", "factor": 32.0, **LLAMA3}),
    (128, 500_000.0, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
]


def case(head_dim, theta, scaling):
    parameters = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, rope_parameters=parameters,
        max_position_embeddings=131072,
    )
    rope = LlamaRotaryEmbedding(config)
    cos, sin = rope(torch.zeros(1), torch.tensor([POSITIONS]))
    half = head_dim // 2
    if scaling:
        scaling = dict(scaling)
        scaling = {scaling.pop("rope_type"): scaling}
    return {
        "head_dim": head_dim,
        "theta": theta,
        "scaling": scaling,
        "inverse_frequencies": rope.inv_freq.tolist(),
        "table": torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).tolist(),
    }


made = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "positions": POSITIONS,
    "cases": [case(*c) for c in CASES],
}
# One case on a line.
text = json.dumps(made).replace('{"head_dim"', '\n{"head_dim"')
Path(__file__).with_suffix(".json").write_text(text + "\n")
