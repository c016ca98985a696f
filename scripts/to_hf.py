"""Writes a GGUF checkpoint as a Hugging Face folder in f32: what the quantised weights stand for.

    pip install torch==2.15.0 transformers==5.24.0 gguf==0.19.0 accelerate
    python scripts/to_hf.py models/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-hf

It is the other side of the comparisons with PyTorch (fixtures/smollm2.py, bench/finetune.py).
transformers reads the file by itself. What it gets wrong is mended here (see `mend_tokenizer` and
`mend_config`), and then the folder is read back and compared with the file: every weight, bit for bit,
with gguf's own dequantisation; every token; every number of the configuration that the file states.
LLaMA-like architectures only.
"""

import argparse
import json
import pathlib
import sys

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

# The pre-tokenizers of the original tokenizer.json, by `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]),
}


def fail(message):
    sys.exit(f"to_hf.py: {message}")


def check(right, what):
    if not right:
        fail(f"the folder is not the file: {what}")


class File:
    """A GGUF file: metadata by key, tensors by name."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in reader.tensors}
        self.fields = reader.fields
        self.architecture = self.get("general.architecture")

    def get(self, key):
        """The value of `key`; {arch} stands for the architecture. None if absent."""
        if "{arch}" in key:
            key = key.format(arch=self.architecture)
        field = self.fields.get(key)
        return field and field.contents()

    def weight(self, name):
        tensor = self.tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)


def mend_tokenizer(tokenizer, file):
    """transformers ignores `tokenizer.ggml.pre`: it would not split digits from spaces before them."""
    if file.get("tokenizer.ggml.model") != "gpt2":
        return
    pre = file.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        fail(f"tokenizer.ggml.pre is {pre!r}: add the pre-tokenizer of its tokenizer.json to PRE_TOKENIZERS")
    tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()


def mend_config(config):
    """transformers leaves marks of the quantised file in a configuration whose weights are f32."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def convert(path, out):
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    mend_tokenizer(tokenizer, File(path))
    # A model that was loaded quantised refuses to be saved as what it is now.
    model.hf_quantizer, model.is_quantized = None, False
    mend_config(model.config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def heads_apart(weight, heads):
    """Undoes the order of q and k rows in GGUF: pairs (2i, 2i+1) of a head become (i, i + d/2)."""
    d = weight.shape[0] // heads
    order = [h * d + 2 * (i % (d // 2)) + i // (d // 2) for h in range(heads) for i in range(d)]
    return weight[order]


def compare_weights(out, file):
    saved = load_file(out / "model.safetensors")
    layers = file.get("{arch}.block_count")
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == file.architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    heads = {"attn_q": file.get("{arch}.attention.head_count"),
             "attn_k": file.get("{arch}.attention.head_count_kv")}
    left = set(file.tensors)
    for name, weight in saved.items():
        stem, suffix = name.rsplit(".", 1)
        stored = f"{names.get_name(stem)}.{suffix}"
        check(stored in left, f"{name} has no counterpart in the file")
        left.remove(stored)
        expected = file.weight(stored)
        if (count := heads.get(stored.split(".")[-2])) and file.architecture == "llama":
            expected = heads_apart(expected, count)
        check(weight.dtype == np.float32 and weight.shape == expected.shape, f"type or shape of {name}")
        check(np.array_equal(weight.view(np.uint32), expected.astype(np.float32).view(np.uint32)), name)
    check(not left, f"missing weights {sorted(left)}")
    return len(saved), sum(w.size for w in saved.values())


def compare_config(out, file):
    config = json.loads((out / "config.json").read_text())
    stated = {
        "num_hidden_layers": "{arch}.block_count",
        "max_position_embeddings": "{arch}.context_length",
        "hidden_size": "{arch}.embedding_length",
        "intermediate_size": "{arch}.feed_forward_length",
        "num_attention_heads": "{arch}.attention.head_count",
        "num_key_value_heads": "{arch}.attention.head_count_kv",
        "head_dim": "{arch}.rope.dimension_count",
        "rms_norm_eps": "{arch}.attention.layer_norm_rms_epsilon",
        "vocab_size": "{arch}.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }
    for field, key in stated.items():
        check(file.get(key) in (None, config[field]), f"{field} is {config[field]}, {key} is {file.get(key)}")
    rope = config["rope_parameters"]
    check(rope == {"rope_theta": file.get("{arch}.rope.freq_base"), "rope_type": "default"}, f"{rope}")
    check(config["tie_word_embeddings"] == ("output.weight" not in file.tensors), "tie_word_embeddings")
    check("quantization_config" not in config, "config.json claims to be quantised")


def compare_tokenizer(out, file):
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = file.get("tokenizer.ggml.tokens")
    check(len(tokenizer) == len(tokens), f"{len(tokenizer)} tokens, expected {len(tokens)}")
    check(tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens, "the tokens")
    merges = json.loads((out / "tokenizer.json").read_text())["model"]["merges"]
    check([" ".join(m) for m in merges] == file.get("tokenizer.ggml.merges"), "the merges")
    check(tokenizer.chat_template == file.get("tokenizer.chat_template"), "the chat template")
    text = "It is  3 o'clock:\n\n  1024 bytes, naïve  你好 🙂 "
    check(tokenizer.decode(tokenizer.encode(text)) == text, "text does not survive encoding")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    if not args.gguf.is_file():
        fail(f"there is no {args.gguf}; scripts/fetch_smollm2.py fetches it")
    convert(args.gguf, args.out)
    file = File(args.gguf)
    weights, parameters = compare_weights(args.out, file)
    compare_config(args.out, file)
    compare_tokenizer(args.out, file)
    print(f"{args.out}: {weights} weights, {parameters} parameters, each equal to the file's, bit for bit")


if __name__ == "__main__":
    main()
