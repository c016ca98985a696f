"""Checks the JSON object of a run: planned is measured, the process stays within, generated text is learnt."""

import json
import sys

run = json.load(open(sys.argv[1]))
checks = {
    "the run is done": run["status"] == "done",
    "measured arena peak is the planned one": run["measured_arena_peak_bytes"] == run["planned_peak_bytes"],
    "the process stays within arena and reserve": run["process_peak_bytes"] <= run["arena_bytes"] + run["reserve_bytes"],
    "the placement is within 1 % of the bound": run["planned_peak_bytes"] <= 1.01 * run["lower_bound_bytes"],
    "there is a loss on held-out text": run["eval_loss"] > 0,
}
if run["entropy_floor"] is not None:
    closed = (run["loss_first"] - run["eval_loss"]) / (run["loss_first"] - run["entropy_floor"])
    checks[f"at least 90 % of the gap to the entropy is closed: {100 * closed:.1f} %"] = closed >= 0.9
for what, holds in checks.items():
    print("ok  " if holds else "FAIL", what)
sys.exit(not all(checks.values()))
