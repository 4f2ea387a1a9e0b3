"""Real processes that use the box, which tests start, stop, kill and listen to."""

import subprocess
import sys
import time

import numpy as np

# What every child begins with. It says how far it is, a line each.
PRELUDE = """
import os, sys, time
import numpy as np
from tf_smb import Client, DeltaAveraging, ElasticAveraging, Server, errors

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once

def quiet(line):
    pass

LAYOUT = [("w", (100_000,)), ("b", (3,))]

def zeros(value=0.0):
    return [np.full(shape, value, np.float32) for _, shape in LAYOUT]

def attach(num_workers):
    client = Client(sys.argv[1], job_id="job")
    return client.create("run", LAYOUT, num_workers=num_workers, exchange_threads=1)
"""
DEADLINE_S = 60
LAYOUT = [("w", (100_000,)), ("b", (3,))]


class Child:
    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text):
        """Reads lines until one begins with `text`; returns the rest of it."""
        for line in self.process.stdout:
            if line.startswith(text):
                return line.removeprefix(text).strip()
        raise AssertionError(f"the child ended ({self.process.wait()}) without saying {text!r}")

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()

    def exit_code(self):
        rest = self.process.stdout.read()
        code = self.process.wait(DEADLINE_S)
        assert code == 0, rest
        return code


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def zeros(value=0.0):
    return [np.full(shape, value, np.float32) for _, shape in LAYOUT]
