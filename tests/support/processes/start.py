"""Run the ranks of a worker, which talk by gloo: forks of one process, since to import torch takes seconds of each."""

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fvflops", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"])


def run_ranks(worker, ranks, *arguments, timeout=300):
    """Run a module of this folder as some processes, and return what each returned; one that fails raises.

    Its `main` is called with the rank and the arguments. Of several numbers of processes a dict of each number's.
    """
    numbers = ranks if isinstance(ranks, tuple) else (ranks,)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        process = FORKS.Process(target=run_groups, args=(f"{__package__}.{worker}", folder, arguments, numbers))
        # gloo's ranks compute on the CPU, also where there is a GPU. A fork has no threads but one.
        for variable, value in {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }.items():
            patch.setenv(variable, value)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.exitcode == 0, (folder / "errors").read_text()[-4000:]
        found = {
            number: [json.loads((folder / f"{number}/{rank}.json").read_text()) for rank in range(number)]
            for number in numbers
        }
    return found if isinstance(ranks, tuple) else found[ranks]


def selected_cases(request, *names):
    """Return the values of parameters, tuples of several, in selected tests that have all and a request's fixture."""
    tests = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    found = (item.callspec.params for item in tests if request.fixturename in item.fixturenames)
    rows = [tuple(params[name] for name in names) for params in found if set(names) <= set(params)]
    return list(dict.fromkeys(rows if len(names) > 1 else (row[0] for row in rows)))


def run_groups(module, folder, arguments, numbers):
    """Run the ranks of each group, and write what each returned to FOLDER/RANKS/RANK.json."""
    os.setsid()
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    worker = importlib.import_module(module)
    if hasattr(worker, "prepare"):  # to import once what all ranks take
        worker.prepare()
    gc.freeze()  # what is imported is no garbage
    os._exit(sum(fork_ranks(worker, ranks, folder / str(ranks), arguments) for ranks in numbers))


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
