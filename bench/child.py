"""Running one side of a comparison as a child process. A library for the scripts beside it."""

import json
import os
import pathlib
import subprocess
import sys
import threading

from step import ROOT, environment

POLL_SECONDS = 0.02


def default_tightfit():
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return str(pathlib.Path(target) / "release" / "tightfit")


def check_tightfit(program):
    if not os.access(program, os.X_OK):
        sys.exit(f"no tightfit binary at {program}; build it with:\n    cargo build --release")


class PeakPoll(threading.Thread):
    """The highest `VmHWM` that another process has shown; 0 where the system shows none.

    The kernel keeps the maximum, so that what a poll can miss is growth in the last moments only.
    """

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.path = f"/proc/{pid}/status"
        self.bytes = 0
        self.over = threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(POLL_SECONDS):
            try:
                with open(self.path) as f:
                    lines = [line for line in f if line.startswith("VmHWM:")]
            except OSError:
                return
            for line in lines:
                self.bytes = max(self.bytes, int(line.split()[1]) * 1024)

    def finish(self):
        self.over.set()
        self.join()
        return self.bytes


def run_json(command, threads, fields, tuned_malloc=False):
    """Runs a command to its end: the JSON object that it printed to stdout, which has `fields`, and what was seen of it.

    `polled_peak_bytes` is `VmHWM` of the whole process, from its start, as seen from outside. Progress goes to our stderr.
    Exits with a message where there is no such object.
    """
    process = subprocess.Popen(
        command, env=environment(threads, tuned_malloc), stdout=subprocess.PIPE, text=True)
    poll = PeakPoll(process.pid)
    try:
        out, _ = process.communicate()
    except BaseException:
        process.kill()
        raise
    polled = poll.finish()
    words = " ".join(map(str, command))
    if process.returncode != 0:
        sys.exit(f"exit code {process.returncode} from: {words}")
    try:
        result = json.loads(out)
    except ValueError as e:
        sys.exit(f"no JSON object ({e}) in the output of: {words}\n{out}")
    if missing := [field for field in fields if result.get(field) is None]:
        sys.exit(f"no {', '.join(missing)} in the result of: {words}")
    result["polled_peak_bytes"] = polled
    return result
