"""Checks the JSON object of the README's run: planned is measured, the process stays within, the text is learnt."""

import json
import sys

run = json.load(open(sys.argv[1]))
closed = (run["loss_first"] - run["eval_loss"]) / (run["loss_first"] - run["entropy_floor"])
checks = {
    "the run is done": run["status"] == "done",
    "measured arena peak is the planned one": run["measured_arena_peak_bytes"] == run["planned_peak_bytes"],
    "the process stays within arena and reserve": run["process_peak_bytes"] <= run["arena_bytes"] + run["reserve_bytes"],
    "the placement is within 1 % of the bound": run["planned_peak_bytes"] <= 1.01 * run["lower_bound_bytes"],
    "at least 90 % of the gap to the entropy is closed": closed >= 0.9,
}
for what, holds in checks.items():
    print("ok  " if holds else "FAIL", what)
print(f"gap closed: {100 * closed:.1f} %")
sys.exit(not all(checks.values()))
