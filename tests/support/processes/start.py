"""Run the ranks of a worker, which talk by gloo: forks of one process, since to import torch takes seconds of each.

`python -m tests.support.processes.start MODULE RANKS FOLDER ARGUMENT ...` calls the `main` of a module with each rank,
a folder that all ranks share, and the arguments. Several numbers of ranks, "2,4", run one after the other, each in a
folder of its number.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback

from tests.support.checkout import ROOT


def run_ranks(worker, ranks, folder, *arguments, timeout=300):
    """Run a module of this folder as some processes, or as several such groups; one that fails raises."""
    module = f"tests.support.processes.{worker}"
    command = [sys.executable, "-W", "ignore", "-m", __name__, module, str(ranks), str(folder), *arguments]
    # gloo's ranks compute on the CPU, also where there is a GPU. A fork has no threads but one.
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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


def fork_groups(module, numbers, folder, *arguments):
    """Run the ranks of each group, and return how many failed."""
    worker = importlib.import_module(module)
    if hasattr(worker, "prepare"):  # to import once what all ranks take
        worker.prepare()
    gc.freeze()  # what is imported is no garbage
    if "," not in numbers:
        return fork_ranks(worker, int(numbers), folder, *arguments)
    return sum(fork_ranks(worker, int(ranks), os.path.join(folder, ranks), *arguments) for ranks in numbers.split(","))


def fork_ranks(worker, ranks, folder, *arguments):
    """Run each rank, and return how many failed."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                run_rank(worker, rank, ranks, folder, arguments)
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
    worker.main(rank, folder, *arguments)
    if dist.is_initialized():  # a worker that goes on alone has left
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_groups(*sys.argv[1:]))
