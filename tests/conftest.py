"""What every test needs: one thread in each of several workers, torchvision's schemas before its import, no colours,
and the same random numbers and cases of property tests in every run.
"""

import gc
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.support import random_cases  # noqa: F401  its profiles
from tests.support.long_files import LONG_FILES
from tests.support.old_torch import forget_later_formulas
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

# Workers share the cores: with as many threads each as there are cores, they spend more time waiting than computing.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

define_torchvision_schemas()
forget_later_formulas()
settings.load_profile("fixed")  # before the tests are imported; --hypothesis-profile is read later and wins
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # set by some CI systems, inherited by the commands that tests start
    os.environ.pop(name, None)


def draw_the_same_numbers():
    """Seed torch, NumPy and Python, so that a test draws what it draws alone, in any order and in any worker."""
    # torch.manual_seed formats the stack, and keeps it, for each kind of device that is not initialised: 1 ms or more.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)
    random.seed(0)


def pytest_collection_modifyitems(items):
    """Run the longest files first."""
    ranks = {f"tests/{file}": rank for rank, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


def pytest_collectstart(collector):
    draw_the_same_numbers()


gc.set_threshold(20_000, 20, 20)  # models and traces are many objects: by default each test collects often in vain
frozen = {"file": "", "modules": 0}  # when garbage collections last left out all that there was


def pytest_runtest_setup(item):
    """Draw the same numbers; leave what libraries hold, a million objects, out of garbage collections."""
    draw_the_same_numbers()
    if item.path != frozen["file"] or len(sys.modules) > frozen["modules"] + 100:
        frozen.update(file=item.path, modules=len(sys.modules))
        gc.collect()
        gc.freeze()


def pytest_runtest_call(item):
    draw_the_same_numbers()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
