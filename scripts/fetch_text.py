"""Fetches the King James Bible as plain text (4.2 MiB) from Debian and prints where it is.

    python scripts/fetch_text.py [DIR]             DIR is models/ of this repository if not given

Makes DIR/kjv.txt: one verse per line, without its number, a blank line between chapters. The text is in
the Debian packages `bible-kjv-text` (compressed) and `bible-kjv` (the program that reads it). They are
downloaded and unpacked into a folder that is removed again: nothing is installed, and no root is needed
(root may have to run `apt-get update` once; this script does if root runs it).
Works on Debian and Ubuntu, needs Python 3.9. If the file is there already, nothing is downloaded. The
text is in the public domain outside the United Kingdom.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ["bible-kjv", "bible-kjv-text"]
NAME = "kjv.txt"
VERSES = 31102
# Of the text from version 4.38; fixtures/smollm2.json was made from it.
SHA256 = "6b40e3f13a6cf83937165995b4868d7eb1f429d0c96ddb8574bea5544101a914"
# `Ge1:1 In the beginning ...`: book, chapter, verse, text.
VERSE = re.compile(r"(\d?[A-Za-z]+\d+):\d+ +(\S.*?) *")


def fail(message):
    sys.exit(f"fetch_text.py: {message}")


def capture(command, folder):
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def run(command, folder, hint=""):
    """The command's standard output, as text."""
    done = capture(command, folder)
    if done.returncode != 0:
        fail(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}\n{hint}".rstrip())
    return done.stdout


def unpack(folder):
    """Downloads the packages into `folder` and unpacks them there, one over the other."""
    for tool in ["apt-get", "dpkg-deb"]:
        if not shutil.which(tool):
            fail(f"there is no {tool} here: this works on Debian and Ubuntu. Any other plain text "
                 "does for training; only the perplexity in fixtures/smollm2.json needs this one")
    download = ["apt-get", "download", *PACKAGES]
    if capture(download, folder).returncode != 0:
        # A fresh container has no list of packages yet; only root may make one.
        if os.geteuid() == 0:
            run(["apt-get", "update"], folder)
        run(download, folder, "Is there a network? Without a list of packages, run `apt-get update` as root first.")
    for package in sorted(folder.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(folder / "root")], folder)


def verses(folder):
    """The program's output: every verse with its place, one per line."""
    root = folder / "root/usr"
    return run(
        [str(root / "bin/bible"), "-p", str(root / "lib"), "-f", "gen1:1-rev22:21"],
        folder, "If a library is missing: it is in the package libreadline8 (or libreadline8t64).")


def plain(listing):
    lines, count, last_chapter = [], 0, None
    for line in listing.splitlines():
        match = VERSE.fullmatch(line)
        if not match:
            fail(f"not a verse: {line!r}")
        chapter, text = match.groups()
        if last_chapter not in (None, chapter):
            lines.append("")
        lines.append(text)
        count, last_chapter = count + 1, chapter
    if count != VERSES:
        fail(f"the program printed {count} verses, expected {VERSES}")
    return "\n".join(lines) + "\n"


def write(text, target):
    """Whole or not at all."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as sink:
            sink.write(text)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", nargs="?", type=pathlib.Path, default=ROOT / "models")
    args = parser.parse_args()

    target = args.dir / NAME
    try:
        if target.is_file():
            print("already there", file=sys.stderr)
        else:
            args.dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=args.dir, prefix=".fetch-") as folder:
                folder = pathlib.Path(folder).resolve()
                unpack(folder)
                write(plain(verses(folder)), target)
        found = hashlib.sha256(target.read_bytes()).hexdigest()
    except OSError as e:
        fail(e)
    if found != SHA256:
        # A later version of the package may mend a verse: still a text to train on.
        print(f"note: SHA-256 {found}, not that of the text that fixtures/smollm2.json was made from",
              file=sys.stderr)
    print(target)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
