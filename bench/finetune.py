"""Fine-tunes a checkpoint in PyTorch on tightfit's own batches, and compares the loss curves.

    pip install torch==2.15.0 transformers==5.24.0
    python bench/finetune.py MODEL BATCHES.safetensors --lr 1e-4 --warmup-steps 10 \\
        --out torch.jsonl --compare runs/a/metrics.jsonl

MODEL is a Hugging Face folder (scripts/to_hf.py makes one from a GGUF file). BATCHES.safetensors holds, all
i32[steps, T], what a step reads, T rows of tokens:

    tokens      ids
    targets     the id that follows, -100 where none counts
    positions   for RoPE               (without it: 0, 1, ... T - 1)
    doc_start   the first row of the document that a row belongs to, which sees nothing before it
                                       (without it: 0)

Several sequences of one batch are several documents, as they are in tightfit. All weights in f32, or by --method
adapters on them (see torch_models.py), which --adapter takes from a PEFT folder; AdamW with decay on
matrices only; gradients clipped by their global norm; the learning rate of tightfit's schedule. The options
have tightfit's names and defaults. --held-out names a file like BATCHES to evaluate on after the last step.

Writes one line {"step", "loss", "grad_norm", "lr", "seconds", "eval_loss"} per step, as tightfit's metrics.jsonl does.
--compare exits 1 where a step's loss differs by more than --tolerance of PyTorch's. To compare an earlier --out
without training again:

    python bench/finetune.py --curve torch.jsonl --compare runs/a/metrics.jsonl
"""

import argparse
import json
import math
import os
import pathlib
import sys
import time

import torch_models

IGNORE_INDEX = -100


def fail(message):
    sys.exit(f"finetune.py: {message}")


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=pathlib.Path, nargs="?")
    p.add_argument("batches", type=pathlib.Path, nargs="?")
    p.add_argument("--method", choices=torch_models.METHODS, default="full")
    p.add_argument("--dtype", choices=torch_models.DTYPES, default="f32", help="bf16 runs under autocast")
    p.add_argument("--adapter", type=pathlib.Path, metavar="DIR", help="start from this PEFT adapter")
    p.add_argument("--held-out", type=pathlib.Path, metavar="FILE", help="batches to evaluate on at the end")
    p.add_argument("--steps", type=int, help="stop after this many (default: all batches)")
    p.add_argument("--total-steps", type=int, help="steps of the learning rate schedule (default: the batches)")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup-steps", type=int, default=20)
    p.add_argument("--decay", choices=["cosine", "linear", "constant"], default="cosine")
    p.add_argument("--min-lr-ratio", type=float, default=0.1)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--adam-eps", type=float, default=1e-8)
    p.add_argument("--clip-norm", default="1.0", help="a number, or none")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=pathlib.Path, help="write the metrics here as well as to standard output")
    p.add_argument("--compare", type=pathlib.Path, metavar="METRICS", help="tightfit's metrics.jsonl")
    p.add_argument("--curve", type=pathlib.Path, metavar="FILE", help="an earlier --out: compare, do not train")
    p.add_argument("--tolerance", type=float, default=0.01, help="largest relative difference (default %(default)g)")
    args = p.parse_args()
    if args.curve and not args.compare:
        p.error("--curve needs --compare")
    if not args.curve and not (args.model and args.batches):
        p.error("MODEL and BATCHES.safetensors are needed to train")
    if args.adapter and args.method == "full":
        p.error("--adapter needs --method lora or qlora")
    return args


def learning_rate(step, total, args):
    """tightfit's schedule, `step` from 0 (crates/tightfit/src/lr.rs)."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / (args.warmup_steps + 1)
    progress = 1.0 if step >= total else (step - args.warmup_steps) / (total - args.warmup_steps)
    if args.decay == "constant":
        return args.lr
    height = 0.5 * (1 + math.cos(math.pi * progress)) if args.decay == "cosine" else 1 - progress
    return args.lr * (args.min_lr_ratio + (1 - args.min_lr_ratio) * height)


def read_batches(path):
    """The four tensors as i64; checks what would otherwise fail far from its cause."""
    import torch
    from safetensors.torch import load_file

    batches = {name: t.long() for name, t in load_file(path).items()}
    for name in ("tokens", "targets"):
        if name not in batches:
            fail(f"{path} has no `{name}`")
    shape = batches["tokens"].shape
    rows = torch.arange(shape[1]).expand(shape)
    batches.setdefault("positions", rows)
    batches.setdefault("doc_start", torch.zeros(shape, dtype=torch.long))
    for name, tensor in batches.items():
        if tensor.shape != shape or len(shape) != 2:
            fail(f"{path}: `{name}` is {list(tensor.shape)}, `tokens` {list(shape)}; expected [steps, T] both")
    if ((batches["doc_start"] < 0) | (batches["doc_start"] > rows)).any():
        fail(f"{path}: a `doc_start` is negative or after its row")
    if (batches["targets"] == IGNORE_INDEX).all(1).any():
        fail(f"{path}: a step has no target")
    return batches


def document_mask(doc_start):
    """Boolean mask [1, 1, query, key]: what lies between the start of a row's document and the row."""
    import torch

    row = torch.arange(len(doc_start))
    return ((row[None, :] <= row[:, None]) & (row[None, :] >= doc_start[:, None]))[None, None]


def batch_loss(model, batches, index, dtype):
    """The mean loss of one batch; logits become f32 first."""
    import torch.nn.functional as F

    batch = {name: tensor[index] for name, tensor in batches.items()}
    with torch_models.autocast(dtype):
        logits = model(
            input_ids=batch["tokens"][None],
            position_ids=batch["positions"][None],
            attention_mask=document_mask(batch["doc_start"]),
            use_cache=False,
        ).logits[0]
    return F.cross_entropy(logits.float(), batch["targets"], ignore_index=IGNORE_INDEX)


def evaluate(model, batches, dtype):
    """The mean loss over the targets of all batches."""
    import torch

    total = tokens = 0
    model.eval()
    with torch.no_grad():
        for index, targets in enumerate(batches["targets"]):
            counted = int((targets != IGNORE_INDEX).sum())
            total += batch_loss(model, batches, index, dtype).item() * counted
            tokens += counted
    model.train()
    return total / tokens


def train(args):
    """The metrics of each step; the loss and norm are those before its update."""
    import torch

    args.dtype = torch_models.resolve(args.dtype)
    torch.set_num_threads(args.threads)
    batches = read_batches(args.batches)
    held_out = read_batches(args.held_out) if args.held_out else None
    model = torch_models.load(args.model, args.method, args.dtype, checkpointing=False, adapter=args.adapter)
    matrices, vectors = torch_models.trainable(model)
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(args.beta1, args.beta2), eps=args.adam_eps, fused=True,
    )
    max_norm = math.inf if args.clip_norm == "none" else float(args.clip_norm)
    available = len(batches["tokens"])
    total = args.total_steps or available
    steps = min(args.steps or available, available)
    for step in range(steps):
        start = time.perf_counter()
        lr = learning_rate(step, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = batch_loss(model, batches, step, args.dtype)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(matrices + vectors, max_norm)
        optimizer.step()
        seconds = time.perf_counter() - start
        last = step + 1 == steps
        yield {
            "step": step + 1,
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": lr,
            "seconds": round(seconds, 3),
            "eval_loss": evaluate(model, held_out, args.dtype) if held_out and last else None,
        }


def read_metrics(path):
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line]
    except (OSError, ValueError) as e:
        fail(f"{path}: {e}")


def compare(ours, theirs, tolerance):
    """Prints how far `ours` (tightfit) is from `theirs` (PyTorch); whether it is near enough."""
    if len(ours) < len(theirs):
        fail(f"tightfit has {len(ours)} steps, PyTorch {len(theirs)}")
    pairs = list(zip(ours, theirs))
    for a, b in pairs:
        # tightfit's learning rate is an f32 by the time it is used.
        if "lr" in a and not math.isclose(a["lr"], b["lr"], rel_tol=1e-6):
            fail(f"step {b['step']}: the learning rate is {a['lr']} in tightfit, {b['lr']} in PyTorch; "
                 "give both the same options")
    differences = [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs]
    differences = [math.inf if math.isnan(d) else d for d in differences]
    worst = max(range(len(pairs)), key=lambda i: differences[i])
    print(f"loss: PyTorch {pairs[0][1]['loss']:.4f} -> {pairs[-1][1]['loss']:.4f}, "
          f"tightfit {pairs[0][0]['loss']:.4f} -> {pairs[-1][0]['loss']:.4f}; relative difference over "
          f"{len(pairs)} steps: mean {sum(differences) / len(pairs):.2e}, largest {differences[worst]:.2e} "
          f"(step {pairs[worst][1]['step']}), tolerance {tolerance:g}", file=sys.stderr)
    return differences[worst] <= tolerance


def run(args):
    """Trains, and writes each step's metrics as soon as there are some."""
    curve = []
    with open(args.out or os.devnull, "w") as out:
        for metrics in train(args):
            curve.append(metrics)
            line = json.dumps(metrics)
            print(line, flush=True)
            print(line, file=out, flush=True)
    return curve


def main():
    args = parse_args()
    curve = read_metrics(args.curve) if args.curve else run(args)
    if args.compare and not compare(read_metrics(args.compare), curve, args.tolerance):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
