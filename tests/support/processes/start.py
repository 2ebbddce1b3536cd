"""Start the ranks of a worker, which talk by gloo, as processes of their own."""

import os
import subprocess
import sys

from tests.support.checkout import ROOT


def run_ranks(worker, ranks, *arguments, timeout=300):
    """Run a module of this folder as some processes, each with its rank and the arguments; one that fails raises."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.support.processes.{worker}"]
    # gloo's ranks compute on the CPU, also where there is a GPU.
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [worker.communicate(timeout=timeout)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * ranks, "\n".join(errors)[-4000:]
