"""What a quantised base costs in perplexity: `tightfit eval` of one model with each form of its weights.

    python scripts/fetch_smollm2.py && python scripts/fetch_text.py
    python scripts/to_hf.py models/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-hf
    cargo build --release
    python bench/perplexity.py

The text is the beginning of the King James Bible, in windows of 512 tokens. The weights come from a folder in f32; those of
SmolLM2's GGUF file are rounded to 4 bits already (Q4_1), so that what is lost here is lost beside that.
"""

import argparse
import json
import pathlib
import tempfile

from child import check_tightfit, default_tightfit, run_json
from step import ROOT

MIB = 1 << 20
BASES = ["as-is", "int8", "int4", "nf4"]


def parse_args():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "smollm2-hf",
                   help="a Hugging Face folder, or a .gguf file (default: %(default)s)")
    p.add_argument("--data", type=pathlib.Path, default=ROOT / "models" / "kjv.txt",
                   help="the text (default: %(default)s)")
    p.add_argument("--bytes", type=int, default=1 << 18, help="of the text, from its beginning (default: %(default)s)")
    p.add_argument("--bases", default=",".join(BASES), help="the first is what others are held against (default: %(default)s)")
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tightfit", default=default_tightfit(), help="the binary (default: %(default)s)")
    p.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the figures here")
    args = p.parse_args()
    if not args.model.exists():
        p.error(f"no model at {args.model}; scripts/to_hf.py makes one (see --help)")
    if not args.data.is_file():
        p.error(f"no text at {args.data}; scripts/fetch_text.py fetches it")
    check_tightfit(args.tightfit)
    return args


def beginning(path, count):
    """The whole lines in the first `count` bytes."""
    with open(path, "rb") as f:
        head = f.read(count)
    return head[:head.rfind(b"\n") + 1] or head


def evaluate(base, text, args):
    command = [args.tightfit, "eval", "--model", str(args.model), "--data", text, "--base", base,
               "--seq", str(args.seq), "--threads", str(args.threads), "--json"]
    return run_json(command, args.threads, ["loss", "perplexity", "tokens", "process_peak_bytes"])


def main():
    args = parse_args()
    results = {}
    with tempfile.NamedTemporaryFile(suffix=".txt") as text:
        text.write(beginning(args.data, args.bytes))
        text.flush()
        print("| base | loss | perplexity | difference | tokens | process, MiB |")
        print("|---|---|---|---|---|---|")
        for base in args.bases.split(","):
            result = results[base] = evaluate(base, text.name, args)
            first = next(iter(results.values()))
            change = result["perplexity"] / first["perplexity"] - 1
            print(f"| {base} | {result['loss']:.4f} | {result['perplexity']:.4f} | {100 * change:+.2f} % "
                  f"| {result['tokens']} | {result['process_peak_bytes'] / MIB:.0f} |", flush=True)
    if args.json:
        fields = ("loss", "perplexity", "tokens", "seq", "planned_peak_bytes", "process_peak_bytes")
        kept = {base: {field: result[field] for field in fields} for base, result in results.items()}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
