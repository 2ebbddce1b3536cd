"""The first answer of a process: for each feature equal to a later one, and to one of a process that did all else.

Importing torch takes seconds: cases run in children forked from a process that has imported torch only and has one
thread. Whether that is as good as a new process is checked for some cases, which run in really new ones: their answers
and the modules imported at the end are equal. The marker `long` runs all cases in both ways; otherwise a sample is
chosen by the commit's name, so that it rotates, and a failure is repeatable.
"""

import json
import os
import random
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT
from tests.support.first_answers.answers import KINDS, cases_of, differences

NAMES = [f"{kind}: {name}" for kind in KINDS for name in cases_of(kind)]
# What programs import before they count.
IMPORTS = (
    *("sympy", "torch._dynamo", "torch._inductor.config", "torch.export", "torch.fx.experimental.proxy_tensor"),
    *(
        "functorch.experimental.control_flow",
        "torch.nn.attention.flex_attention",
        "torch.nested._internal.nested_tensor",
    ),
    *("torch.distributed.tensor", "torch._subclasses.fake_tensor", "numpy"),
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_jobs(jobs, *options):
    """Run jobs by the zygote; see there."""
    command = [sys.executable, "-m", "tests.support.first_answers.zygote", *options]
    environment = {
        **os.environ,
        **ONE_THREAD,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    process = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, cwd=ROOT, env=environment)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def draw():
    """Return a case of each of three kinds, chosen by the commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout  # "" outside a repository
    choice = random.Random(commit.strip())
    return [f"{kind}: {choice.choice([*cases_of(kind)])}" for kind in choice.sample(KINDS, 3)]


def compare_all(names, alone):
    """Return name and kind of comparison → differences, of cases that answer differently."""
    imports = [f"import {name}" for name in IMPORTS]
    *first, warm = run_jobs([*([name, name] for name in names), [*imports, *names[::-1], *names]])
    new = dict(zip(alone, [run_jobs([[name, name]], "alone")[0] for name in alone], strict=True))
    found = {}
    for index, (name, result) in enumerate(zip(names, first, strict=True)):
        answer, second = result["answers"]
        found[f"{name}, second"] = [*differences(answer, second)]
        found[f"{name}, warm"] = [*differences(answer, warm["answers"][len(names) + index])]
        if name in new:
            found[f"{name}, alone"] = [*differences(result, new[name])]
    return {name: told for name, told in found.items() if told}


def test_there_are_enough_cases_of_each_kind():
    assert len(NAMES) == len(set(NAMES)) >= 150
    assert min(len(cases_of(kind)) for kind in KINDS) > 10


@pytest.fixture(scope="module")
def sample():
    """Return what differs of the drawn cases and of the faults, which share the process that did all else."""
    names = draw()
    assert names == draw() and set(names) <= set(NAMES)
    return compare_all([*names, *(f"faults: {name}" for name in cases_of("faults"))], names[:1])


def test_the_first_answer_of_a_process_is_that_of_the_tenth(sample):
    assert {name: told for name, told in sample.items() if not name.startswith("faults: ")} == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_all_first_answers_of_a_kind(kind):
    names = [name for name in NAMES if name.startswith(f"{kind}: ")]
    assert compare_all(names, names) == {}


def test_a_different_answer_is_seen(sample):
    found = {name: told for name, told in sample.items() if name.startswith("faults: ")}
    assert set(found) == {
        *("faults: calls, second", "faults: calls, warm", "faults: import, warm"),
        *("faults: warning, second", "faults: warning, warm"),
    }
    assert found["faults: import, warm"] == [".returned: 'False' / 'True'"]
