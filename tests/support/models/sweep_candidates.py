"""Models that worker processes build by name: they fail in each of the ways in which a worker can."""

import os
import signal
import sys
import time
from functools import partial

import torch
from torch import nn


def linear(width):
    print("models print to standard output")
    print("and to standard error", file=sys.stderr)
    return nn.Linear(8, width), torch.ones(1, 8)


def hang():
    while True:
        time.sleep(1)


def exhaust():
    return nn.Linear(1, 1 << 44, device="cpu"), torch.ones(1, 1)


def crash():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_process():
    os._exit(3)


def __getattr__(name):
    """Return the factory that `slow_N` names: of a model of N outputs, built in a second."""
    if not name.startswith("slow_"):
        raise AttributeError(name)
    return partial(slow, int(name.removeprefix("slow_")))


def slow(width):
    """Return a small model with its inputs, after a second; its beginning and end go to the file $EVENTS."""
    for event in ("begin", "end"):
        with open(os.environ["EVENTS"], "a") as file:
            file.write(f"{os.environ.get('RAY_RAYLET_PID')} {event} {width}\n")
        if event == "begin":
            time.sleep(1)
    return linear(width)


CANDIDATES = {
    "w1": partial(linear, 1),
    "hangs": hang,
    "w2": partial(linear, 2),
    "exhausts": exhaust,
    "w3": partial(linear, 3),
    "crashes": crash,
    "exits": exit_process,
    "raises": partial(linear, -1),
    "w4": partial(linear, 4),
}
