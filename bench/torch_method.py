"""Training steps of one method in PyTorch: seconds and process peak. `bench/methods.py` runs it beside tightfit; alone:

    OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 python bench/torch_method.py models/smollm2-hf --method qlora

Token ids are random: what a step costs does not depend on them. Prints one JSON object to stdout, progress to stderr.
`process_peak_bytes` is `VmHWM`, reset once the model is loaded: it covers training only and, like any process figure,
the imported libraries. `process_peak_with_load_bytes` covers loading as well.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time

import torch_models
from torch_step import peak_bytes, reset_peak, rss_bytes


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", help="a Hugging Face folder")
    p.add_argument("--method", choices=torch_models.METHODS, required=True)
    p.add_argument("--dtype", choices=torch_models.DTYPES, default="auto")
    p.add_argument("--no-checkpointing", action="store_true")
    p.add_argument("--batch", type=int, default=4, help="rows per step")
    p.add_argument("--seq", type=int, default=512, help="tokens per row")
    p.add_argument("--steps", type=int, default=3, help="the first is left out of the median")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.steps < 2:
        p.error("--steps must be at least 2: the first step is left out of the median")
    return args


def main():
    args = parse_args()
    import torch

    args.dtype = torch_models.resolve(args.dtype)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = torch_models.load(args.model, args.method, args.dtype, not args.no_checkpointing)
    matrices, vectors = torch_models.trainable(model)
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    ids = torch.randint(model.config.vocab_size, (args.batch, args.seq))

    gc.collect()
    loaded, load_peak = rss_bytes(), peak_bytes()
    peak_is_training_only = reset_peak()
    seconds, cpu_seconds, losses = [], [], []
    for step in range(args.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with torch_models.autocast(args.dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        # Otherwise the last graph lives on into the next step's forward.
        del loss
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        print(f"torch step {step + 1}/{args.steps}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}",
              file=sys.stderr, flush=True)

    peak = peak_bytes()
    print(json.dumps({
        "method": args.method,
        "dtype": args.dtype,
        "checkpointing": not args.no_checkpointing,
        "seconds_per_step": statistics.median(seconds[1:]),
        "cpu_seconds_per_step": statistics.median(cpu_seconds[1:]),
        "process_peak_bytes": peak,
        "peak_is_training_only": peak_is_training_only,
        "process_peak_with_load_bytes": max(peak, load_peak),
        "rss_model_loaded_bytes": loaded,
        "seconds": seconds,
        "losses": losses,
        "trainable_parameters": sum(p.numel() for p in matrices + vectors),
        "batch": args.batch,
        "seq": args.seq,
        "threads": torch.get_num_threads(),
        "malloc_mmap_threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_"),
        **torch_models.capabilities(),
    }))


if __name__ == "__main__":
    main()
