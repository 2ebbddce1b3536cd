"""Run the ranks of a worker, which talk by gloo: forks of one process, since to import torch takes seconds of each.

`python -m tests.support.processes.start MODULE RANKS ARGUMENT ...` runs a module as a program in so many forks, each
with its rank and the arguments.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback

from tests.support.checkout import ROOT


def run_ranks(worker, ranks, *arguments, timeout=300):
    """Run a module of this folder as some processes, each with its rank and the arguments; one that fails raises."""
    module = f"tests.support.processes.{worker}"
    command = [sys.executable, "-W", "ignore", "-m", __name__, module, str(ranks), *map(str, arguments)]
    # gloo's ranks compute on the CPU, also where there is a GPU.
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    own["OPENBLAS_NUM_THREADS"] = "1"  # a fork has no other threads
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]


def main(module, ranks, *arguments):
    """Fork the ranks, and return how many failed."""
    importlib.import_module(module)
    children = []
    for rank in range(int(ranks)):
        child = os.fork()
        if not child:
            status = 1
            try:
                sys.argv = [module, str(rank), *arguments]
                runpy.run_module(module, run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
