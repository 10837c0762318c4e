#!/usr/bin/env python3
"""Builds all tests of the workspace, and runs the test binaries, several at once.

`cargo test` runs one binary after another, and most tests wait for other programs. The output of a
binary is printed when it has ended. Arguments are passed on to each binary. The tests `breaks` of
`crash`, which break each rule of the order on the disk in turn, have a process of their own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

# Seconds. A binary that takes longer is killed with what it has started, and has failed.
LIMIT = 1800

CORES = len(os.sched_getaffinity(0))

# The longest first.
FIRST = ["cli", "small_formats", "breaks", "crash", "sessions"]


def built():
    """The test binaries, each with the directory of its package, where cargo would run it, and its
    arguments."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    build = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    binaries = []
    for line in build.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["profile"]["test"]:
            folder = os.path.dirname(message["manifest_path"])
            name = message["target"]["name"]
            binaries.append((name, message["executable"], folder, sys.argv[1:]))
            if name == "crash":
                alone = ["breaks", "--ignored", "--nocapture"]
                binaries.append(("breaks", message["executable"], folder, alone))
    place = {name: n for n, name in enumerate(FIRST)}
    return sorted(binaries, key=lambda binary: place.get(binary[0], len(FIRST)))


def run(binary):
    name, executable, folder, arguments = binary
    start = time.monotonic()
    environment = dict(os.environ, CARGO_MANIFEST_DIR=folder)
    # Tests of the program mostly wait for others, and would be the last that run.
    environment.setdefault("RUST_TEST_THREADS", str(CORES * (3 if name == "cli" else 2)))
    test = subprocess.Popen([executable, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = test.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(test.pid, signal.SIGKILL)
        output, _ = test.communicate()
        output += b"killed: more than %d s\n" % LIMIT
    return name, test.returncode, output, time.monotonic() - start


def main():
    binaries = built()
    failed = []
    with ThreadPoolExecutor(max_workers=CORES) as workers:
        for done in as_completed([workers.submit(run, binary) for binary in binaries]):
            name, status, output, seconds = done.result()
            print(f"==== {name}, {seconds:.0f} s", flush=True)
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            if status != 0:
                failed.append(f"{name} (status {status})")
    if failed:
        sys.exit("failed: " + ", ".join(failed))


main()
