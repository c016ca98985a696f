"""What each technique that changes the numbers costs in quality: held-out loss after the same training on real text.

    pip install torch transformers peft bitsandbytes accelerate gguf
    python scripts/fetch_smollm2.py && python scripts/fetch_text.py
    python scripts/to_hf.py models/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-hf
    cargo build --release
    python bench/quality.py                          # hours; or some rows at a time:
    python bench/quality.py --only f32,adamw-8bit
    python bench/quality.py --only lora,peft-lora --lr lora=1e-4 --lr peft-lora=1e-4
    python bench/quality.py --only none              # the table of what there is

Every row starts from the weights of the same folder and sees the same batches in the same order: 200 steps of 1 x 512 tokens
of the King James Bible, gradients clipped at norm 1, a warm-up of 20 steps and half a cosine after it, no weight decay; then
the same held-out rows. Beside rows of tightfit there are two of PyTorch: PEFT's LoRA and QLoRA (bitsandbytes' NF4), on the
batches that tightfit exports and from the adapter that tightfit begins with, which it saves in PEFT's format.

A row that is done is kept in DIR/results.json and not run again until its command changes. Learning rates are those of
LEARNING_RATES below unless --lr says otherwise. The table has each row's loss against its reference's, f32 AdamW or PEFT, and
for adapters how far the losses of all steps are from PEFT's. Exits 1 where a limit is missed.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import torch_models
from child import check_tightfit, default_tightfit, run_json
from finetune import read_metrics
from step import ROOT, environment

FINETUNE = ROOT / "bench" / "finetune.py"
MIB = 1 << 20
REFERENCE = "f32"
ADAPTER = ["--rank", "16", "--alpha", "32", "--dropout", "0", "--targets", "all-linear"]
MIXED = ["--precision", "bf16-mixed"]


@dataclass(frozen=True)
class Row:
    # tightfit's flags; for a row of PyTorch none.
    flags: list
    # The row that it is held against, and how far from that one it may be, where that is limited.
    against: str = REFERENCE
    most: float = None
    # What PyTorch trains; its adapter is that of tightfit's row of this name.
    peft: str = None


ROWS = {
    "f32": Row([]),
    "bf16-mixed": Row(MIXED, most=0.01),
    "f16-mixed": Row(["--precision", "f16-mixed"], most=0.01),
    "bf16": Row(["--precision", "bf16"], most=0.02),
    "adamw-8bit": Row(["--optimizer", "adamw-8bit"], most=0.01),
    "adafactor": Row(["--optimizer", "adafactor"]),
    "lion": Row(["--optimizer", "lion"]),
    "apollo": Row(["--optimizer", "apollo"]),
    "sgd": Row(["--optimizer", "sgd"]),
    "peft-lora": Row([], peft="lora"),
    "lora": Row(["--method", "lora", "--base", "as-is", *MIXED, *ADAPTER], against="peft-lora", most=0.01),
    "peft-qlora": Row([], peft="qlora"),
    "qlora": Row(["--method", "qlora", "--base", "nf4", *MIXED, *ADAPTER], against="peft-qlora", most=0.01),
}

# Fine-tuning rates of AdamW, and what corresponds: Lion's updates are of size lr in every element, several times AdamW's; SGD's
# are as large as the clipped gradient and its momentum make them; adapters take more than whole matrices.
LEARNING_RATES = {
    "f32": 5e-5, "bf16-mixed": 5e-5, "f16-mixed": 5e-5, "bf16": 5e-5, "adamw-8bit": 5e-5,
    "adafactor": 5e-5, "lion": 1e-5, "apollo": 5e-5, "sgd": 1e-2,
    "lora": 2e-4, "peft-lora": 2e-4, "qlora": 2e-4, "peft-qlora": 2e-4,
}


def parse_args():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "smollm2-hf",
                   help="a Hugging Face folder (default: %(default)s)")
    p.add_argument("--data", type=pathlib.Path, default=ROOT / "models" / "kjv.txt",
                   help="the text (default: %(default)s)")
    p.add_argument("--dir", type=pathlib.Path, default=ROOT / "runs" / "quality",
                   help="results, batches and adapters (default: %(default)s)")
    p.add_argument("--only", default=",".join(ROWS), help="rows to run, or none (default: %(default)s)")
    p.add_argument("--again", action="store_true", help="run these rows even if they are done")
    p.add_argument("--lr", action="append", default=[], metavar="ROW=X", help="a row's learning rate; may be repeated")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--eval-batches", type=int, default=64, help="batches of held-out text")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--torch-dtype", choices=torch_models.DTYPES, default="auto",
                   help="what PEFT's rows compute in; auto is bf16 where the CPU has it (default: auto)")
    p.add_argument("--tightfit", default=default_tightfit(), help="the binary (default: %(default)s)")
    p.add_argument("--batches-program", help="the example `batches`, if it is built already")
    p.add_argument("--python", default=sys.executable, help="an interpreter that has torch, peft and bitsandbytes")
    args = p.parse_args()
    args.only = [] if args.only == "none" else args.only.split(",")
    args.rates = dict(LEARNING_RATES)
    try:
        args.rates.update((name, float(rate)) for name, rate in (pair.split("=") for pair in args.lr))
    except ValueError:
        p.error("--lr takes ROW=X, such as lion=1e-5")
    if unknown := (set(args.only) | set(args.rates)) - set(ROWS):
        p.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if args.only:
        if not (args.model / "config.json").is_file():
            p.error(f"no model in {args.model}; scripts/to_hf.py makes one (see --help)")
        if not args.data.is_file():
            p.error(f"no text at {args.data}; scripts/fetch_text.py fetches it")
        check_tightfit(args.tightfit)
    return args


def shared_flags(args):
    """What all rows of tightfit have in common."""
    return [
        "--model", str(args.model), "--data", str(args.data), "--batch", str(args.batch), "--seq", str(args.seq),
        "--steps", str(args.steps), "--eval-batches", str(args.eval_batches), "--seed", str(args.seed),
        "--clip-norm", "1.0", "--warmup-steps", "20", "--decay", "cosine", "--weight-decay", "0",
        "--threads", str(args.threads),
    ]


def tightfit_command(name, args):
    return [args.tightfit, "train", *shared_flags(args), *ROWS[name].flags, "--lr", str(args.rates[name])]


def torch_command(name, args):
    method = ROWS[name].peft
    return [
        args.python, str(FINETUNE), str(args.model), str(args.dir / "batches.safetensors"),
        "--held-out", str(args.dir / "held-out.safetensors"), "--adapter", str(args.dir / f"{method}-init"),
        "--method", method, "--dtype", args.torch_dtype, "--lr", str(args.rates[name]),
        "--clip-norm", "1.0", "--warmup-steps", "20", "--decay", "cosine", "--weight-decay", "0",
        "--threads", str(args.threads),
    ]


def call(command, args, **options):
    done = subprocess.run(command, env=environment(args.threads, False), **options)
    if done.returncode != 0:
        sys.exit(f"quality.py: exit code {done.returncode} from: {' '.join(map(str, command))}")
    return done


def export_batches(args):
    """Writes the batches of training and evaluation, unless those of the same settings are there."""
    command = [args.tightfit, "train", *shared_flags(args), "--print-config"]
    config = call(command, args, stdout=subprocess.PIPE, text=True).stdout
    path = args.dir / "batches.toml"
    files = [args.dir / "batches.safetensors", args.dir / "held-out.safetensors"]
    if path.is_file() and path.read_text() == config and all(f.is_file() for f in files):
        return
    for stale in (path, *files):
        stale.unlink(missing_ok=True)
    job = args.dir / "job.toml"
    job.write_text(config)
    program = [args.batches_program] if args.batches_program else [
        "cargo", "run", "--release", "-p", "tightfit", "--example", "batches", "--"]
    call([*program, str(job.resolve()), *(str(f.resolve()) for f in files)], args, cwd=ROOT)
    # The name says that the batches are complete.
    job.rename(path)


def export_adapter(name, args):
    """Saves the adapter that tightfit's row `name` begins with: one step at a learning rate of 0."""
    folder = args.dir / f"{name}-init"
    call([*tightfit_command(name, args), "--steps", "1", "--lr", "0", "--eval-batches", "1", "--out", str(folder),
          "--overwrite"], args, stdout=sys.stderr)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            sys.exit(f"quality.py: tightfit has written no {file} to {folder}")


def run_tightfit(name, args):
    folder = args.dir / f"{name}-run"
    command = [*tightfit_command(name, args), "--out", str(folder), "--overwrite", "--keep", "1", "--json"]
    result = run_json(command, args.threads, ["eval_loss", "seconds_per_step", "process_peak_bytes"])
    curve = read_metrics(folder / "metrics.jsonl")
    # Half a gigabyte of weights and more that nobody asks for.
    shutil.rmtree(folder)
    return {
        "eval_loss": result["eval_loss"],
        "losses": [step["loss"] for step in curve],
        "seconds_per_step": result["seconds_per_step"],
        "process_peak_bytes": result["process_peak_bytes"],
    }


def run_torch(name, args):
    export_batches(args)
    export_adapter(ROWS[name].peft, args)
    metrics = args.dir / f"{name}.jsonl"
    call([*torch_command(name, args), "--out", str(metrics)], args, stdout=sys.stderr)
    curve = read_metrics(metrics)
    return {
        "eval_loss": curve[-1]["eval_loss"],
        "losses": [step["loss"] for step in curve],
        "seconds_per_step": sorted(step["seconds"] for step in curve)[len(curve) // 2],
        "process_peak_bytes": None,
    }


def settings(name, args):
    """What a row's result depends on: all of its command but where the program lies."""
    command = torch_command(name, args) if ROWS[name].peft else tightfit_command(name, args)
    return [str(part) for part in command[1:]] + (shared_flags(args) if ROWS[name].peft else [])


def relative(a, b):
    return (a - b) / b


def distance(row, reference):
    """Mean and largest relative difference of two curves' losses, step by step."""
    differences = [abs(relative(a, b)) for a, b in zip(row["losses"], reference["losses"])]
    return sum(differences) / len(differences), max(differences)


def compared(row, result, reference):
    """A row's cells beside its reference, and whether its limit is kept: by the loss, and by PEFT's curve where that is it."""
    change = relative(result["eval_loss"], reference["eval_loss"])
    distances, curve = [abs(change)], ""
    if ROWS[row.against].peft:
        mean, largest = distance(result, reference)
        distances.append(mean)
        curve = f"{mean:.2e}, {largest:.2e}"
    kept = row.most is None or max(distances) <= row.most
    most = "" if row.most is None else f"{100 * row.most:g} %" + ("" if kept else " MISSED")
    return [row.against, f"{100 * change:+.2f} %", most, curve], kept


def print_table(results):
    """Prints what there is; whether all limits are kept."""
    print("| row | learning rate | held-out loss | against | difference | at most | steps' losses: mean, largest difference "
          "| s/step | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    all_kept = True
    for name, row in ROWS.items():
        if not (result := results.get(name)):
            continue
        cells = [""] * 4
        if row.against != name and row.against in results:
            cells, kept = compared(row, result, results[row.against])
            all_kept &= kept
        peak = f"{result['process_peak_bytes'] / MIB:.0f}" if result["process_peak_bytes"] else ""
        print(f"| {name} | {result['lr']:g} | {result['eval_loss']:.4f} | {' | '.join(cells)} "
              f"| {result['seconds_per_step']:.2f} | {peak} |")
    return all_kept


def main():
    args = parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    path = args.dir / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    for name in args.only:
        wanted = settings(name, args)
        if not args.again and results.get(name, {}).get("settings") == wanted:
            print(f"{name}: done before", file=sys.stderr)
            continue
        print(f"{name}: {args.steps} steps", file=sys.stderr)
        start = time.time()
        result = run_torch(name, args) if ROWS[name].peft else run_tightfit(name, args)
        results[name] = {"lr": args.rates[name], "settings": wanted, "seconds": time.time() - start, **result}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(partial, path)
    if not print_table(results):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
