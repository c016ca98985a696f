"""tightfit and PyTorch in turn on the same training step: seconds per step and process peak.

    pip install torch transformers
    cargo build --release
    python bench/step.py

Full f32 AdamW training of a SmolLM2-135M-shaped LLaMA with random weights, 4 x 512 tokens,
gradients clipped at norm 1, 2 threads; PyTorch uses scaled_dot_product_attention and its fused
AdamW, the fastest of its three on a CPU. Runs A B A B ..., so that a machine that gets slower or
faster does so for both, and reports the ratio of each pair. One more PyTorch run sets
MALLOC_MMAP_THRESHOLD_, which lowers its peak: the fair baseline for memory, as the plain run is for
time.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH_STEP = ROOT / "bench" / "torch_step.py"
MALLOC_MMAP_THRESHOLD = "1048576"


def tightfit_command(args):
    return [
        args.tightfit, "train",
        "--hidden-size", "576",
        "--intermediate-size", "1536",
        "--num-hidden-layers", str(args.layers),
        "--num-attention-heads", "9",
        "--num-key-value-heads", "3",
        "--vocab-size", "49152",
        "--rope-theta", "100000",
        "--batch", str(args.batch),
        "--seq", str(args.seq),
        "--steps", str(args.steps),
        "--threads", str(args.threads),
        "--clip-norm", "1.0",
        "--json",
    ]


def torch_command(args):
    return [
        args.python, str(TORCH_STEP),
        "--layers", str(args.layers),
        "--batch", str(args.batch),
        "--seq", str(args.seq),
        "--steps", str(args.steps),
        "--threads", str(args.threads),
        "--clip-norm", "1.0",
    ]


def parse_args():
    default_target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=4, help="steps per run")
    p.add_argument("--layers", type=int, default=30, help="fewer for a quick try")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tightfit", default=str(pathlib.Path(default_target) / "release" / "tightfit"),
                   help="the binary (default: %(default)s)")
    p.add_argument("--python", default=sys.executable, help="an interpreter that has torch")
    p.add_argument("--no-tuned", action="store_true",
                   help="leave out PyTorch's run with MALLOC_MMAP_THRESHOLD_")
    p.add_argument("--json", metavar="FILE", help="also write every run's output here")
    args = p.parse_args()
    if args.pairs < 1:
        p.error("--pairs must be at least 1")
    return args


def check_prerequisites(args):
    if not os.access(args.tightfit, os.X_OK):
        sys.exit(f"step.py: no tightfit binary at {args.tightfit}; build it with:\n"
                 "    cargo build --release")
    probe = (
        "import importlib.util as u, sys; "
        "sys.exit(not all(u.find_spec(m) for m in ('torch', 'transformers')))"
    )
    try:
        found = subprocess.run([args.python, "-c", probe]).returncode == 0
    except OSError as e:
        sys.exit(f"step.py: cannot run {args.python}: {e}")
    if not found:
        sys.exit(f"step.py: {args.python} has no torch and transformers; install them with:\n"
                 f"    {args.python} -m pip install torch transformers")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: load average is {load:.1f}; other processes will disturb the timing",
              file=sys.stderr)


def environment(threads, tuned_malloc):
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    env.pop("OPENBLAS_CORETYPE", None)
    env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    if tuned_malloc:
        env["MALLOC_MMAP_THRESHOLD_"] = MALLOC_MMAP_THRESHOLD
    return env


def run(command, threads, tuned_malloc=False):
    """Runs one side; the JSON object that it printed to stdout."""
    env = environment(threads, tuned_malloc)
    # The children's progress goes straight to our stderr.
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"step.py: exit code {done.returncode} from: {' '.join(command)}")
    try:
        result = json.loads(done.stdout)
        result["seconds_per_step"], result["process_peak_bytes"]
    except (ValueError, KeyError) as e:
        sys.exit(f"step.py: no result in the output ({e!r}) of: {' '.join(command)}\n{done.stdout}")
    return result


def gib(n):
    return f"{n / 2**30:.2f}"


def print_table(pairs, tuned, args):
    row = "{:>8}  {:>12}  {:>12}  {:>7}  {:>12}  {:>12}".format
    seconds = [(a["seconds_per_step"], b["seconds_per_step"]) for a, b in pairs]
    peaks = [(a["process_peak_bytes"], b["process_peak_bytes"]) for a, b in pairs]
    ratios = [a / b for a, b in seconds]
    print(f"{args.layers} layers, {args.batch} x {args.seq} tokens, {args.threads} threads, "
          f"torch {pairs[0][1]['torch']} ({pairs[0][1]['cpu_capability']})")
    print(row("", "tightfit", "PyTorch", "ratio", "tightfit", "PyTorch"))
    print(row("pair", "s/step", "s/step", "", "peak GiB", "peak GiB"))
    for i, ((a, b), ratio, (pa, pb)) in enumerate(zip(seconds, ratios, peaks), 1):
        print(row(i, f"{a:.2f}", f"{b:.2f}", f"{ratio:.3f}", gib(pa), gib(pb)))
    a, b = (statistics.median(side) for side in zip(*seconds))
    pa, pb = (max(side) for side in zip(*peaks))
    print(row("overall", f"{a:.2f}", f"{b:.2f}", f"{statistics.median(ratios):.3f}",
              gib(pa), gib(pb)) + "   medians, largest peaks")
    if tuned:
        print(row("tuned", "", f"{tuned['seconds_per_step']:.2f}", "", "",
                  gib(tuned["process_peak_bytes"]))
              + f"   MALLOC_MMAP_THRESHOLD_={MALLOC_MMAP_THRESHOLD}")


def main():
    args = parse_args()
    check_prerequisites(args)
    pairs = []
    for i in range(args.pairs):
        print(f"pair {i + 1}/{args.pairs}", file=sys.stderr)
        ours = run(tightfit_command(args), args.threads)
        theirs = run(torch_command(args), args.threads)
        pairs.append((ours, theirs))
    tuned = None
    if not args.no_tuned:
        print(f"PyTorch with MALLOC_MMAP_THRESHOLD_={MALLOC_MMAP_THRESHOLD}", file=sys.stderr)
        tuned = run(torch_command(args), args.threads, tuned_malloc=True)
    print_table(pairs, tuned, args)
    if args.json:
        report = {
            "tightfit_command": tightfit_command(args)[1:],
            "pairs": [{"tightfit": a, "torch": b} for a, b in pairs],
            "torch_tuned_malloc": tuned,
        }
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
