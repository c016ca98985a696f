"""Whether steps take the time and the memory that `tightfit plan` says: small jobs at several budgets, on this machine's CPU.

    cargo build --release
    python bench/predict.py                      # or: --threads 1 --steps 12

Calibrates this machine first, then plans each of four jobs within five budgets, from one that is ample to less than half of
it, and runs each plan by `train --plan`. Exits 1 where a run measures other bytes than were planned, leaves its budget, or
where the median of |measured - predicted| / predicted of the time of a step is over 15 %. Run it on a machine that does
nothing else.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

from child import check_tightfit, default_tightfit, run_json
from step import environment

MIB = 1 << 20
MOST_OFF = 0.15
JOBS = [
    "--layers 6 --hidden-size 384 --heads 6 --kv-heads 2 --intermediate-size 1024 --batch 4 --seq 256",
    "--layers 4 --hidden-size 512 --heads 8 --kv-heads 8 --intermediate-size 1536 --batch 2 --seq 512 --precision f32",
    "--layers 10 --hidden-size 256 --heads 4 --kv-heads 2 --intermediate-size 768 --batch 8 --seq 128",
    "--layers 3 --hidden-size 640 --heads 10 --kv-heads 5 --intermediate-size 1792 --batch 4 --seq 384 --clip-norm none",
]
PERCENTS = [100, 85, 70, 55, 45]


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tightfit", default=default_tightfit(), help="the binary (default: %(default)s)")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--no-calibrate", action="store_true", help="use the calibration that there is")
    args = p.parse_args()
    check_tightfit(args.tightfit)
    return args


def plan(args, job, budget, file):
    """The plan's report; none where nothing fits."""
    command = [args.tightfit, "plan", *job.split(), "--method", "full", "--threads", str(args.threads), "--budget", str(budget),
               "--json", "--save", str(file)]
    done = subprocess.run(command, env=environment(args.threads, False), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode == 3:
        return None
    return run_json(command, args.threads, ["peak_bytes", "seconds_per_step"])


def run(args, file, budget):
    command = [args.tightfit, "train", "--plan", str(file), "--budget", str(budget), "--threads", str(args.threads),
               "--steps", str(args.steps), "--eval-batches", "1", "--json"]
    return run_json(command, args.threads, ["measured_arena_peak_bytes", "process_peak_bytes", "seconds_per_step"])


def main():
    args = parse_args()
    if not args.no_calibrate:
        subprocess.run([args.tightfit, "calibrate", "--threads", str(args.threads)], check=True, stdout=sys.stderr)
    off, wrong = [], 0
    print("| job | budget, MiB | mix | predicted, s | measured, s | difference | arena planned and measured, B | process, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"
        for index, job in enumerate(JOBS):
            roomy = plan(args, job, 8 << 30, file)
            for percent in PERCENTS:
                budget = roomy["reserve_bytes"] + roomy["arena_bytes"] * percent // 100
                planned = plan(args, job, budget, file)
                if planned is None:
                    print(f"| {index} | {budget / MIB:.0f} | nothing fits | | | | | |")
                    continue
                ran = run(args, file, budget)
                predicted, measured = planned["seconds_per_step"], ran["seconds_per_step"]
                off.append(abs(measured - predicted) / predicted)
                same = planned["peak_bytes"] == ran["measured_arena_peak_bytes"]
                wrong += not same or ran["process_peak_bytes"] > budget
                mix = planned["mix"]
                words = f"{mix['precision']} {mix['optimizer']}, micro-batches of {mix['micro_batch']}"
                words += ", streamed" if planned["host_bytes"] else ""
                print(f"| {index} | {budget / MIB:.0f} | {words} | {predicted:.3f} | {measured:.3f} "
                      f"| {100 * (measured - predicted) / predicted:+.0f} % "
                      f"| {planned['peak_bytes']}{'' if same else ' ≠ ' + str(ran['measured_arena_peak_bytes'])} "
                      f"| {ran['process_peak_bytes'] / MIB:.0f} |", flush=True)
    median = statistics.median(off)
    print(f"\n{len(off)} jobs; the median difference of time is {100 * median:.1f} %, at most {100 * MOST_OFF:g} %; "
          f"{wrong} with other bytes or over their budget")
    if wrong or median > MOST_OFF:
        sys.exit(1)


if __name__ == "__main__":
    main()
