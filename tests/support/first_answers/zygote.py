"""Run cases in new processes: forked from this one, which has imported torch only, or alone.

`python -m tests.support.first_answers.zygote` reads a JSON list of jobs from standard input and writes a list of
results. A job is a list of names of cases, which one child answers one after the other; "import NAME" imports a module.
A result has the `answers` and the `modules` that are imported at the end.
"""

import atexit
import faulthandler
import importlib
import json
import os
import sys
import tempfile
import threading
from typing import Any

import torch  # noqa: F401  what a case finds imported

TIMEOUT = 300  # seconds for a job
_IMPORT = "import "


def run_job(names: list[str]) -> dict[str, Any]:
    """Answer cases one after the other in this process."""
    from tests.support.first_answers.answers import answer

    answers = []
    for name in names:
        if name.startswith(_IMPORT):
            importlib.import_module(name.removeprefix(_IMPORT))
        else:
            answers.append(answer(name))
    return {"answers": answers, "modules": sorted(sys.modules)}


def run_forked(names: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            status = 1
            try:
                faulthandler.dump_traceback_later(TIMEOUT, exit=True)
                file.write(json.dumps(run_job(names)).encode())
                file.flush()
                atexit._run_exitfuncs()  # such as of pools of processes
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"{names} ended with status {status}")
        file.seek(0)
        result = json.loads(file.read())
        return result


def main():
    jobs = json.load(sys.stdin)
    forked = sys.argv[1:] != ["alone"]
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    assert threads == 1, "a fork would not have the other threads"
    output = os.dup(1)
    os.dup2(2, 1)  # what a case prints around Python's streams
    results = [run_forked(job) if forked else run_job(job) for job in jobs]
    with os.fdopen(output, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
