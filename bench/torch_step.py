"""One full f32 AdamW training step of a SmolLM2-135M-shaped LLaMA in PyTorch: seconds and peak.

Weights and token ids are random, so nothing is downloaded. Prints one JSON object to stdout and
progress to stderr. `bench/step.py` runs this script next to `tightfit train`; alone it is

    OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 python bench/torch_step.py --batch 4 --seq 512 --threads 2

The process peak is `VmHWM`, reset once the model is built, so it covers training only (and, like
any process figure, the imported libraries). The memory allocator is glibc's, whose behaviour the
parent process may choose with `MALLOC_MMAP_THRESHOLD_`.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import time


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--batch", type=int, default=4, help="rows per step")
    p.add_argument("--seq", type=int, default=512, help="tokens per row")
    p.add_argument("--steps", type=int, default=4, help="the first is left out of the median")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--clip-norm", type=float, default=1.0, help="clip_grad_norm_; 0 leaves it out")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--adamw", choices=["fused", "foreach", "forloop"], default="fused",
                   help="torch.optim.AdamW's implementation: one update, the default the fastest")
    p.add_argument("--layers", type=int, default=30, help="decoder layers; fewer for a quick try")
    args = p.parse_args()
    if args.steps < 2:
        p.error("--steps must be at least 2: the first step is left out of the median")
    return args


def reset_peak():
    """Starts a new `VmHWM`; False where the kernel has no such thing."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return True
    except OSError:
        return False


def peak_bytes():
    """The process peak since `reset_peak`; `ru_maxrss` (since the start) outside Linux."""
    try:
        with open("/proc/self/status") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def rss_bytes():
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def build_model(args):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=max(2048, args.seq),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).float().train()


def main():
    args = parse_args()
    try:
        import torch
        import transformers
    except ImportError as e:
        sys.exit(f"torch_step.py: {e}; install with: pip install torch transformers")

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = build_model(args)
    # Weight decay spares the norm weights, as it does in tightfit.
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8,
        fused=args.adamw == "fused", foreach=args.adamw == "foreach",
    )
    ids = torch.randint(model.config.vocab_size, (args.batch, args.seq))

    gc.collect()
    built = rss_bytes()
    peak_is_training_only = reset_peak()
    seconds, cpu_seconds, losses = [], [], []
    for step in range(args.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(params, args.clip_norm)
        optimizer.step()
        losses.append(loss.item())
        # Otherwise the last graph lives on into the next step's forward.
        del loss
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        print(f"torch step {step + 1}/{args.steps}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}",
              file=sys.stderr, flush=True)

    median = statistics.median(seconds[1:])
    print(json.dumps({
        "seconds_per_step": median,
        "cpu_seconds_per_step": statistics.median(cpu_seconds[1:]),
        "tokens_per_second": args.batch * args.seq / median,
        "process_peak_bytes": peak_bytes(),
        "peak_is_training_only": peak_is_training_only,
        "rss_model_built_bytes": built,
        "seconds": seconds,
        "losses": losses,
        "parameters": sum(p.numel() for p in params),
        "batch": args.batch,
        "seq": args.seq,
        "steps": args.steps,
        "clip_norm": args.clip_norm,
        "adamw": args.adamw,
        "threads": torch.get_num_threads(),
        "malloc_mmap_threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }))


if __name__ == "__main__":
    main()
