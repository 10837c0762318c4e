#!/usr/bin/env python3
"""usage: run-tests.py BUILD [ARGUMENT...]

Runs the test binaries of the workspace, several at once. BUILD is the file into which
`cargo test --workspace --no-run --message-format=json-render-diagnostics` writes, perhaps still: the
longest binary starts as soon as it and the program are built, the others at the end of the build.

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
FIRST = ["convert", "remote", "servers", "cli", "qcow2", "formats", "small_formats", "breaks", "crash", "sessions",
         "backup"]
# These mostly wait for programs.
WAITING = {"backup", "cli", "convert", "formats", "qcow2", "remote", "servers"}


def messages(path):
    """What cargo says of the build, until it has ended."""
    with open(path, encoding="utf-8") as build:
        line = ""
        while True:
            line += build.readline()
            if not line.endswith("\n"):
                time.sleep(0.2)
                continue
            message = json.loads(line)
            line = ""
            yield message
            if message["reason"] == "build-finished":
                return


def built(message):
    """The test binary of a message, if it has one: its name, path, arguments, and the directory of
    its package, where cargo would run it."""
    if message.get("executable") and message["profile"]["test"]:
        name = message["target"]["name"]
        folder = os.path.dirname(message["manifest_path"])
        yield name, message["executable"], folder, sys.argv[2:]
        if name == "crash":
            yield "breaks", message["executable"], folder, ["breaks", "--ignored", "--nocapture"]


def is_program(message):
    """Whether `zebu` itself, which the tests run, has been built."""
    return bool(message.get("executable")) and message["target"]["kind"] == ["bin"] and \
        message["target"]["name"] == "zebu" and not message["profile"]["test"]


# The processes that run.
TESTS = set()


def descendants(session):
    """The processes of a session: what each is, its state, and the names of its threads, which in a
    test binary begin as the tests do."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) != session:
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace")
            threads = []
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/comm") as comm, open(f"/proc/{pid}/task/{task}/wchan") as wchan:
                    threads.append(f"{comm.read().strip()} ({wchan.read()})")
            yield f"{pid}: {command}: {', '.join(threads)}"
        except OSError:
            pass


def unfinished(output):
    """The tests that libtest has said to take long, and has not said to have ended."""
    lines = output.decode(errors="replace").splitlines()
    ended = {line.split(" ... ")[0] for line in lines if " ... " in line}
    for line in lines:
        name, long, _ = line.partition(" has been running for over")
        if long and name not in ended:
            yield name


def end_all():
    """Kills what runs, with what it has started."""
    for test in list(TESTS):
        os.killpg(test.pid, signal.SIGKILL)


def run(binary):
    name, executable, folder, arguments = binary
    start = time.monotonic()
    environment = dict(os.environ, CARGO_MANIFEST_DIR=folder)
    environment.setdefault("RUST_TEST_THREADS", str(CORES * (3 if name in WAITING else 2)))
    test = subprocess.Popen([executable, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    TESTS.add(test)
    try:
        output, _ = test.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        processes = list(descendants(test.pid))
        os.killpg(test.pid, signal.SIGKILL)
        output, _ = test.communicate()
        why = [f"killed: more than {LIMIT} s", *unfinished(output), *processes]
        output += ("\n".join(why) + "\n").encode()
    TESTS.remove(test)
    return name, test.returncode, output, time.monotonic() - start


def main():
    # A shell starts what it runs in the background with these ignored, and programs keep that.
    for stop in signal.SIGHUP, signal.SIGINT, signal.SIGQUIT:
        signal.signal(stop, signal.SIG_DFL)
    failed = []
    with ThreadPoolExecutor(max_workers=CORES) as workers:
        running, waiting = [], []
        first, program = None, False
        for message in messages(sys.argv[1]):
            if not message.get("success", True):
                end_all()
                sys.exit("the build has failed")
            program = program or is_program(message)
            for binary in built(message):
                if binary[0] == FIRST[0]:
                    first = binary
                else:
                    waiting.append(binary)
            # cargo may link tests before the program that they run.
            if first and program:
                running.append(workers.submit(run, first))
                first = None
        waiting += [first] if first else []
        place = {name: n for n, name in enumerate(FIRST)}
        waiting.sort(key=lambda binary: place.get(binary[0], len(FIRST)))
        running += [workers.submit(run, binary) for binary in waiting]
        for done in as_completed(running):
            name, status, output, seconds = done.result()
            print(f"==== {name}, {seconds:.0f} s", flush=True)
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            if status != 0:
                failed.append(f"{name} (status {status})")
    if failed:
        sys.exit("failed: " + ", ".join(failed))


main()
