"""One of several processes that sweep into one output at a time: each line of input is an output and its models."""

import sys

from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings, ModelCount
from fvflops.sweep.counted_models import plan_sweep, run_sweep
from fvflops.sweep.result_files import ResultError
from fvflops.text import parse_json


def run_known(tasks, on_tick):
    return (ModelCount(task.name, flops=len(task.name), table="default") for task in tasks)


def main():
    for line in sys.stdin:
        output, *names = parse_json(line)
        try:
            list(run_sweep(plan_sweep(names, output, SourceOptions(), CountSettings()), run_known))
            print("done", flush=True)
        except ResultError as error:
            print("refused" if "open in another sweep" in str(error) else error, flush=True)


if __name__ == "__main__":
    main()
