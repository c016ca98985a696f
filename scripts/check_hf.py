"""Loads a folder with transformers and compares its logits with those that another program computed.

    pip install torch==2.15.0 transformers==5.24.0
    python scripts/check_hf.py OUTDIR LOGITS.safetensors [--tolerance 1e-3]

OUTDIR is a Hugging Face folder (config.json, safetensors, tokenizer), such as `tightfit train` writes.
LOGITS.safetensors holds `tokens` i32[T], one row from position 0, and `logits` f32[T, V]; fixtures/smollm2.py
--logits writes such a file. Exits 1 if a logit differs by more than the tolerance, or if the folder does not
load whole: weights missing, left over or of another shape, a tokenizer that loses text.
"""

import argparse
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def fail(message):
    sys.exit(f"check_hf.py: {message}")


def load_model(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    # transformers only warns, and makes random weights for what it misses.
    problems = {kind: found for kind, found in info.items() if found}
    if problems:
        fail(f"{folder} does not load whole: {problems}")
    return model


def check_tokenizer(folder, tokens):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    if tokenizer.encode(text, add_special_tokens=False) != tokens.tolist():
        fail(f"the tokenizer does not give the tokens of its own text {text[:60]!r}")
    if tokenizer.chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    return len(tokenizer), bool(tokenizer.chat_template)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("logits", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference (default %(default)g)")
    parser.add_argument("--no-tokenizer", action="store_true", help="the folder has none, or the tokens are no text")
    args = parser.parse_args()

    dump = load_file(args.logits)
    tokens, expected = dump["tokens"].long(), dump["logits"]
    model = load_model(args.folder)
    print(f"{args.folder}: {type(model).__name__}, {model.num_parameters()} parameters")
    if not args.no_tokenizer:
        count, template = check_tokenizer(args.folder, tokens)
        print(f"tokenizer: {count} tokens, {'a' if template else 'no'} chat template")
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0]
    if logits.shape != expected.shape:
        fail(f"logits of shape {list(logits.shape)}, expected {list(expected.shape)}")
    if not expected.isfinite().all():
        fail(f"{args.logits}: a logit is not finite")
    difference = (logits - expected).abs()
    row, column = divmod(difference.argmax().item(), logits.shape[1])
    worst = difference.max().item()
    same = (logits.argmax(-1) == expected.argmax(-1)).sum().item()
    print(f"logits: {list(logits.shape)}, largest difference {worst:.3g} (row {row}, id {column}), "
          f"mean {difference.mean():.3g}; the same most likely token in {same} of {len(tokens)} rows")
    # Written so that NaN fails, too.
    if not worst <= args.tolerance:
        fail(f"the largest difference is over {args.tolerance:g}")


if __name__ == "__main__":
    main()
