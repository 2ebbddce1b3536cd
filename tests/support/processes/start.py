"""Run the ranks of a worker, which talk by gloo: forks of one process, since to import torch takes seconds of each.

`python -m tests.support.processes.start MODULE FOLDER ARGUMENTS RANKS ...` calls the `main` of a module with each rank
and the arguments, a list in JSON. What it returns is FOLDER/RANKS/RANK.json. Several numbers of ranks run one after the
other.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.support.checkout import ROOT


def run_ranks(worker, ranks, *arguments, timeout=300):
    """Run a module of this folder as some processes, and return what each returned; one that fails raises.

    Of several numbers of processes a dict of each number's.
    """
    numbers = ranks if isinstance(ranks, tuple) else (ranks,)
    # gloo's ranks compute on the CPU, also where there is a GPU. A fork has no threads but one.
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", __name__, f"tests.support.processes.{worker}", folder]
        process = subprocess.Popen(
            [*command, json.dumps(arguments, default=str), *map(str, numbers)],
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
        found = {
            number: [json.loads(Path(folder, f"{number}/{rank}.json").read_text()) for rank in range(number)]
            for number in numbers
        }
    return found if isinstance(ranks, tuple) else found[ranks]


def selected_cases(request, *names):
    """Return the values of parameters, tuples of several, in selected tests that have all and a request's fixture."""
    tests = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    found = (item.callspec.params for item in tests if request.fixturename in item.fixturenames)
    rows = [tuple(params[name] for name in names) for params in found if set(names) <= set(params)]
    return list(dict.fromkeys(rows if len(names) > 1 else (row[0] for row in rows)))


def fork_groups(module, folder, arguments, *numbers):
    """Run the ranks of each group, and return how many failed."""
    worker = importlib.import_module(module)
    if hasattr(worker, "prepare"):  # to import once what all ranks take
        worker.prepare()
    gc.freeze()  # what is imported is no garbage
    return sum(fork_ranks(worker, int(ranks), Path(folder, ranks), json.loads(arguments)) for ranks in numbers)


def fork_ranks(worker, ranks, folder, arguments):
    """Run each rank, and return how many failed."""
    folder.mkdir()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                (folder / f"{rank}.json").write_text(json.dumps(run_rank(worker, rank, ranks, folder, arguments)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)  # gloo's threads may outlive the group
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def run_rank(worker, rank, ranks, folder, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = worker.main(rank, *arguments)
    if dist.is_initialized():  # a worker that goes on alone has left
        dist.barrier()
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    sys.exit(fork_groups(*sys.argv[1:]))
