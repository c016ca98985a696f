#!/usr/bin/env python3
"""f32 matrix products: tightfit-cpu against PyTorch, in one run, shape by shape.

    python bench/gemm.py [--threads 2] [--rounds 5] [--json FILE]

needs PyTorch and cargo. The shapes are those of a SmolLM2-135M-shaped training step of 4 x 512
tokens (576 hidden, 1536 intermediate, 3 x 64 key/value, 49152 vocabulary in chunks of rows) and of
smaller models. For each shape PyTorch and our benchmark program take turns; the medians over all
rounds are compared. The table gives GFLOP/s and the ratio ours / PyTorch, then its geometric mean,
minimum and maximum; the `gemm` and `matrixmultiply` crates stand beside as yardsticks.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import time

# A build of OpenBLAS that is told to be another machine's is no yardstick.
os.environ.pop("OPENBLAS_CORETYPE", None)

ROOT = pathlib.Path(__file__).resolve().parent.parent

T = 2048
SHAPES = (
    # Linear forward x[T, K] w[N, K]^T: (m, n, k) = (T, N, K).
    [("nt", T, n, k) for k, n in [(576, 576), (576, 192), (576, 1536), (1536, 576)]]
    + [("nt", 256, 49152, 576), ("nt", 512, 49152, 576)]
    # Input gradient dy[T, N] w[N, K].
    + [("nn", T, k, n) for k, n in [(576, 576), (576, 192), (576, 1536), (1536, 576)]]
    + [("nn", 256, 576, 49152)]
    # Weight gradient dy[T, N]^T x[T, K].
    + [("tn", n, k, T) for k, n in [(576, 576), (576, 192), (576, 1536), (1536, 576)]]
    + [("tn", 49152, 576, 256)]
    # Small models.
    + [("nt", t, n, 256) for t, n in [(2048, 256), (2048, 1024), (4096, 512)]]
    + [("nn", 4096, 256, 1024), ("tn", 1024, 256, 4096)]
)


def build():
    """Builds the benchmark program and returns its path."""
    command = ["cargo", "bench", "-p", "tightfit-cpu", "--bench", "gemm", "--no-run",
               "--message-format=json"]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [m["executable"] for m in messages if m.get("executable")][-1]


class Ours:
    """The benchmark program, asked one shape at a time."""

    def __init__(self, program, threads):
        self.process = subprocess.Popen(
            [program, "--stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "THREADS": str(threads)})

    def measure(self, shape):
        print(*shape, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def measure_torch(torch, shape, rounds=7, seconds=0.04):
    """Median GFLOP/s of torch.mm into an existing tensor."""
    layout, m, n, k = shape
    a = torch.rand(k, m).t() if layout == "tn" else torch.rand(m, k)
    b = torch.rand(n, k).t() if layout == "nt" else torch.rand(k, n)
    c = torch.empty(m, n)

    def run(repeats):
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=c)
        return (time.perf_counter() - start) / repeats

    run(1)
    repeats = math.ceil(seconds / run(1))
    return 2e-9 * m * n * k / statistics.median(run(repeats) for _ in range(rounds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", help="benchmark program, built already")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures here")
    args = parser.parse_args()

    ours = Ours(args.program or build(), args.threads)
    import torch  # Loads its libraries after OPENBLAS_CORETYPE is gone.

    torch.set_num_threads(args.threads)
    columns = ["ours", "torch", "gemm", "matrixmultiply"]
    print(f"PyTorch {torch.__version__}, {args.threads} threads, GFLOP/s (medians)")
    print(f"{'':4}{'m':>7}{'n':>7}{'k':>7}" + "".join(f"{c:>16}" for c in columns) + f"{'ratio':>8}")
    results = []
    for shape in SHAPES:
        samples = {column: [] for column in columns}
        for _ in range(args.rounds):
            samples["torch"].append(measure_torch(torch, shape))
            time.sleep(0.3)  # PyTorch's threads spin for a while after their work.
            figures = ours.measure(shape)
            time.sleep(0.1)  # So do those of the crates.
            for key, value in figures.items():
                if key in samples:
                    samples[key].append(value)
        row = {column: statistics.median(values) for column, values in samples.items()}
        row["ratio"] = row["ours"] / row["torch"]
        layout, m, n, k = shape
        results.append({"layout": layout, "m": m, "n": n, "k": k, **row})
        print(f"{layout:4}{m:7}{n:7}{k:7}" + "".join(f"{row[c]:16.1f}" for c in columns)
              + f"{row['ratio']:8.2f}", flush=True)
    ratios = [row["ratio"] for row in results]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"ours / PyTorch: geometric mean {mean:.2f}, min {min(ratios):.2f}, max {max(ratios):.2f}")
    if args.json:
        args.json.write_text(json.dumps({"geometric_mean": mean, "shapes": results}, indent=1))


if __name__ == "__main__":
    main()
