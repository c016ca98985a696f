"""QLoRA, LoRA and full bf16 training of SmolLM2-135M: tightfit and PyTorch in turn, seconds per step and process peak.

    pip install torch transformers peft bitsandbytes accelerate gguf
    python scripts/fetch_smollm2.py && python scripts/fetch_text.py
    python scripts/to_hf.py models/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-hf
    cargo build --release
    python bench/methods.py                      # or: --jobs lora

Both start from the same folder and make one checkpoint for each block (tightfit: `--recompute block`):

    job     tightfit                                          PyTorch
    qlora   NF4 base, bf16-mixed, r = 16, all linear layers   PEFT, bitsandbytes' NF4 with bf16 compute, autocast
    lora    bf16 base, bf16-mixed, r = 16, all linear layers  PEFT on a bf16 base, autocast
    full    bf16 with stochastic rounding, 8-bit Adam,        f32 weights, bf16 autocast, fused AdamW
            updates in the backward

A round is tightfit, PyTorch, and PyTorch with MALLOC_MMAP_THRESHOLD_ set, which lowers its peak: the fair baseline for memory,
as the plain run is for time. Ratios are those of a round, so that a machine that gets slower or faster does so for all.

Peaks are `VmHWM`: tightfit's of the whole process, loading included, as it reports it itself and as seen from outside by
polling; PyTorch's from the loaded model on, which leaves out what it needs to load and quantise (the polled one has that in).

PyTorch computes in bf16 under autocast where the CPU has instructions for that, which is its fastest form there. Elsewhere
it emulates bf16 products at a small part of the speed of its f32 ones, so that it computes in f32 instead,
without autocast, on an f32 base for LoRA; --torch-dtype chooses. The capabilities of the CPU are printed with the results.
Exits 1 where a limit is missed.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
from dataclasses import dataclass

import torch_models
from child import check_tightfit, default_tightfit, run_json
from step import MALLOC_MMAP_THRESHOLD, ROOT

TORCH_METHOD = ROOT / "bench" / "torch_method.py"
MIB = 1 << 20
ADAPTER = ["--rank", "16", "--alpha", "32", "--dropout", "0", "--targets", "all-linear"]


@dataclass(frozen=True)
class Job:
    # What makes tightfit's job this one.
    flags: list
    # Of the whole process, and of tightfit's time to PyTorch's.
    most_mib: int
    most_ratio: float


JOBS = {
    "qlora": Job(["--method", "qlora", "--base", "nf4", "--precision", "bf16-mixed", "--optimizer", "adamw", *ADAPTER],
                 400, 0.6),
    "lora": Job(["--method", "lora", "--base", "bf16", "--precision", "bf16-mixed", "--optimizer", "adamw", *ADAPTER],
                550, 0.75),
    "full": Job(["--method", "full", "--precision", "bf16", "--optimizer", "adamw-8bit", "--update-in-backward"],
                875, 0.85),
}


def parse_args():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "smollm2-hf",
                   help="a Hugging Face folder (default: %(default)s)")
    p.add_argument("--data", type=pathlib.Path, default=ROOT / "models" / "kjv.txt",
                   help="what tightfit trains on (default: %(default)s)")
    p.add_argument("--jobs", default=",".join(JOBS), help="some of %(default)s")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=4, help="steps per run")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--torch-dtype", choices=torch_models.DTYPES, default="auto",
                   help="what PyTorch computes in; auto is bf16 where the CPU has it, which is the fastest (default: auto)")
    p.add_argument("--side", choices=["both", "tightfit", "torch"], default="both", help="leave the other out")
    p.add_argument("--no-tuned", action="store_true", help="leave out PyTorch's runs with MALLOC_MMAP_THRESHOLD_")
    p.add_argument("--tightfit", default=default_tightfit(), help="the binary (default: %(default)s)")
    p.add_argument("--python", default=sys.executable, help="an interpreter that has torch, peft and bitsandbytes")
    p.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write every run's output here")
    args = p.parse_args()
    args.jobs = args.jobs.split(",")
    if unknown := set(args.jobs) - set(JOBS):
        p.error(f"--jobs: no job {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    if args.rounds < 1:
        p.error("--rounds must be at least 1")
    if not (args.model / "config.json").is_file():
        p.error(f"no model in {args.model}; scripts/to_hf.py makes one (see --help)")
    if args.side != "torch" and not args.data.is_file():
        p.error(f"no text at {args.data}; scripts/fetch_text.py fetches it")
    return args


def tightfit_command(job, args):
    return [
        args.tightfit, "train", "--model", str(args.model), "--data", str(args.data),
        *JOBS[job].flags,
        "--recompute", "block", "--clip-norm", "none",
        "--batch", str(args.batch), "--seq", str(args.seq), "--steps", str(args.steps),
        "--eval-batches", "1", "--threads", str(args.threads), "--json",
    ]


def torch_command(job, args):
    return [
        args.python, str(TORCH_METHOD), str(args.model), "--method", job, "--dtype", args.torch_dtype,
        "--batch", str(args.batch), "--seq", str(args.seq), "--steps", str(args.steps),
        "--threads", str(args.threads),
    ]


def run_round(job, args):
    """The results of one round, by side."""
    results = {}
    if args.side != "torch":
        results["tightfit"] = run_json(
            tightfit_command(job, args), args.threads,
            ["seconds_per_step", "process_peak_bytes", "planned_peak_bytes", "measured_arena_peak_bytes"])
    if args.side != "tightfit":
        fields = ["seconds_per_step", "process_peak_bytes", "process_peak_with_load_bytes"]
        results["torch"] = run_json(torch_command(job, args), args.threads, fields)
        if not args.no_tuned:
            results["tuned"] = run_json(torch_command(job, args), args.threads, fields, tuned_malloc=True)
    return results


def ratios(rounds, side):
    """tightfit's seconds to those of a side, round by round; none where one of the two did not run."""
    return [r["tightfit"]["seconds_per_step"] / r[side]["seconds_per_step"]
            for r in rounds if "tightfit" in r and side in r]


def median(rounds, side):
    return statistics.median(r[side]["seconds_per_step"] for r in rounds)


def peak(rounds, side, field="process_peak_bytes"):
    return max(r[side][field] for r in rounds)


def summary(job, rounds):
    """Medians of times and ratios, the largest peaks, and whether the limits are kept."""
    result = {}
    for side in rounds[0]:
        result[side] = {
            "seconds_per_step": median(rounds, side),
            "process_peak_bytes": peak(rounds, side),
            "polled_peak_bytes": peak(rounds, side, "polled_peak_bytes"),
        }
        if side != "tightfit" and "tightfit" in rounds[0]:
            result[side]["ratios"] = ratios(rounds, side)
            result[side]["ratio"] = statistics.median(ratios(rounds, side))
    if "tightfit" in rounds[0]:
        ours = max(peak(rounds, "tightfit"), peak(rounds, "tightfit", "polled_peak_bytes"))
        result["within_memory"] = ours <= JOBS[job].most_mib * MIB
        result["arena_as_planned"] = all(
            r["tightfit"]["planned_peak_bytes"] == r["tightfit"]["measured_arena_peak_bytes"] for r in rounds)
        if "torch" in rounds[0]:
            result["within_time"] = result["torch"]["ratio"] <= JOBS[job].most_ratio
    return result


def print_job(job, rounds, result):
    row = "  {:>9}  {:>9}  {:>9}  {:>7}  {:>12}  {:>12}".format
    print(f"\n{job}: tightfit {' '.join(JOBS[job].flags)}")
    print(row("", "round", "s/step", "ratio", "peak MiB", "polled MiB"))
    for side in rounds[0]:
        for i, r in enumerate(rounds, 1):
            run = r[side]
            ratio = r["tightfit"]["seconds_per_step"] / run["seconds_per_step"] if "tightfit" in r else None
            print(row(side, i, f"{run['seconds_per_step']:.2f}", f"{ratio:.3f}" if ratio else "",
                      f"{run['process_peak_bytes'] / MIB:.0f}", f"{run['polled_peak_bytes'] / MIB:.0f}"))
    for side in rounds[0]:
        ratio = result[side].get("ratio")
        print(row(side, "overall", f"{result[side]['seconds_per_step']:.2f}", f"{ratio:.3f}" if ratio else "",
                  f"{result[side]['process_peak_bytes'] / MIB:.0f}",
                  f"{result[side]['polled_peak_bytes'] / MIB:.0f}") + "   medians, largest peaks")
    if "within_memory" in result:
        said = {True: "kept", False: "MISSED"}
        print(f"  at most {JOBS[job].most_mib} MiB: {said[result['within_memory']]}; "
              f"arena measured {'=' if result['arena_as_planned'] else 'NOT'} planned")
        if "within_time" in result:
            print(f"  at most {JOBS[job].most_ratio} of PyTorch's time: {said[result['within_time']]}")


def print_machine(args, rounds):
    print(f"{args.batch} x {args.seq} tokens, {args.threads} threads; tuned: "
          f"MALLOC_MMAP_THRESHOLD_={MALLOC_MMAP_THRESHOLD}; load average now {os.getloadavg()[0]:.1f}")
    if torch := rounds[0].get("torch"):
        print(f"PyTorch {torch['torch']}, {torch['dtype']}; CPU capability {torch['cpu_capability']}, mkldnn bf16 "
              f"{torch['mkldnn_bf16']}, AVX512-bf16 {torch['avx512_bf16']}, AMX-bf16 {torch['amx_bf16']}; peak MiB from "
              f"the loaded model on, polled MiB with the load")


def main():
    args = parse_args()
    if args.side != "torch":
        check_tightfit(args.tightfit)
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"note: load average is {load:.1f}; other processes will disturb the timing", file=sys.stderr)
    report = {"jobs": {}}
    for job in args.jobs:
        rounds = []
        for i in range(args.rounds):
            print(f"{job}, round {i + 1}/{args.rounds}", file=sys.stderr)
            rounds.append(run_round(job, args))
        result = summary(job, rounds)
        if not report["jobs"]:
            print_machine(args, rounds)
        print_job(job, rounds, result)
        sys.stdout.flush()
        report["jobs"][job] = {"tightfit_flags": tightfit_command(job, args)[1:], "rounds": rounds, "summary": result}
        # After each job: a run of hours that is stopped has not been in vain.
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    results = [entry["summary"] for entry in report["jobs"].values()]
    if not all(r.get(limit, True) for r in results for limit in ("within_memory", "within_time", "arena_as_planned")):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
