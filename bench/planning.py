"""How long planning takes, and how much memory: models from 1 to 70 billion parameters, on a card that need not be here.

    cargo build --release
    python bench/planning.py                     # or: --rounds 5 --device h100-sxm

For each model one mix is planned by itself (everything but what is recomputed is fixed), and the best mix is searched for. A
card of 24 GB holds the first of them; the others are streamed, for which a plan moves more. Medians of all rounds, in seconds;
the peak is of the whole process. Time for each thousand operations tells whether planning grows faster than what is planned.
"""

import argparse
import json
import os
import statistics
import subprocess

from child import check_tightfit, default_tightfit

MODELS = ["llama-3.2-1b", "llama-2-7b", "llama-2-13b", "llama-2-70b"]
ONE = ["--method", "qlora", "--precision", "bf16", "--optimizer", "adamw", "--micro-batch", "1", "--update-in-backward", "false",
       "--loss-chunk", "auto", "--mlp-tile", "none", "--base", "nf4"]
MIB = 1 << 20


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tightfit", default=default_tightfit(), help="the binary (default: %(default)s)")
    p.add_argument("--device", default="a5000")
    p.add_argument("--host-memory", default="256GiB")
    p.add_argument("--batch", default="4")
    p.add_argument("--seq", default="2048")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    check_tightfit(args.tightfit)
    return args


def plan(args, model, flags):
    """The report, and the most memory that the process had, in bytes."""
    command = [args.tightfit, "plan", model, "--device", args.device, "--host-memory", args.host_memory, "--batch", args.batch,
               "--seq", args.seq, "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 3):
        raise SystemExit(f"exit code {code} from: {' '.join(command)}")
    return json.loads(out), usage.ru_maxrss * 1024


def main():
    args = parse_args()
    print("| model | operations | one plan, s | ms for 1000 operations | search, s | mixes planned | with levers, s | peak, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        ones, searches, peaks = [], [], []
        for _ in range(args.rounds):
            one, one_peak = plan(args, model, ONE)
            found, peak = plan(args, model, ["--method", "auto"])
            ones.append(one["search_seconds"])
            searches.append((found["search_seconds"], found["planning_seconds"]))
            peaks.append(max(one_peak, peak))
        seconds = statistics.median(ones)
        search, whole = (statistics.median(column) for column in zip(*searches))
        print(f"| {model} | {one['nodes']} | {seconds:.2f} | {1e6 * seconds / one['nodes']:.1f} | {search:.2f} "
              f"| {len(found['tried'])} | {whole:.2f} | {max(peaks) / MIB:.0f} |", flush=True)


if __name__ == "__main__":
    main()
