"""Closed standard streams, and SIGTERM."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fvflops.cli import main
from fvflops.cli.process import DiscardedOutput, Terminated, streams_opened, termination_raised
from fvflops.cli.progress import activity
from fvflops.sweep.counted_models import Journal
from fvflops.sweep.result_files import read_rows
from tests.support.checkout import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_closed_standard_output_loses_no_file_and_is_an_error_where_a_report_would_be_lost(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "stdout", None)
    output = tmp_path / "report.csv"
    assert main(["count", "zoo:lenet5", "--output", str(output), "--format", "csv"]) == 0
    assert output.read_text().startswith("module,")
    for command in (["count", "zoo:lenet5"], ["list", "zoo"], ["sweep", "zoo:lenet5", "--output", "-"]):
        assert main(command) == 2
        assert capsys.readouterr().err == "fvflops: error: standard output is closed: add --output FILE\n"
    assert sys.stdout is None


def test_a_closed_standard_error_loses_messages_alone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["count", "nothing"]) == 2
    assert main(["list", "formats"]) == 0


LOUD = """
import torch
from torch import nn

print("imported")

class Net(nn.Linear):
    def forward(self, x):
        print("ran")
        return super().forward(x)

def build(size=4):
    print("built")
    return Net(size, size), torch.ones(2, size)
"""


@pytest.mark.parametrize(
    "command",
    [
        "count {model}",
        "count {model} zoo:lenet5",
        "compare {model}",
        "diff {model} zoo:lenet5",
        "scale {model} --vary size=1..4",
        "memory {model}",
        "plan {model} --mesh dp=2",
        "roofline {model} --device H100",
        "profile {model}",
    ],
)
def test_what_a_model_prints_is_no_part_of_a_report(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.setattr("sys.path", list(sys.path))
    arguments = command.format(model=f"{tmp_path}/loud.py:build").split()
    assert main([*arguments, "--format", "json"]) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    assert {"imported", "built", "ran"} <= set(output.err.split())


def test_no_file_gets_the_descriptor_of_a_closed_stream():
    program = (
        "import os, sys\nfrom fvflops.cli.process import streams_opened\n"
        "with streams_opened():\n    file = open('/dev/zero')\n    assert file.fileno() > 2, file.fileno()\n"
        "    print('nowhere')\nassert sys.stdout is None and sys.stderr is None"
    )
    command = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == 0


def test_open_streams_stay():
    before = sys.stdout, sys.stderr
    with streams_opened():
        assert (sys.stdout, sys.stderr) == before and not isinstance(sys.stdout, DiscardedOutput)


def test_sigterm_is_raised_once_and_the_handler_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), termination_raised():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before
    entered = []

    def enter():
        with termination_raised():
            entered.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_sweep_that_is_terminated_writes_its_rows_and_leaves_nothing(tmp_path):
    output = str(tmp_path / "rows.csv")
    command = [sys.executable, "-m", "fvflops", "sweep", "zoo:*", "--output", output, "--workers", "1"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        deadline = time.monotonic() + 100
        while not Journal(output).read():
            assert sweep.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        sweep.terminate()
        _, errors = sweep.communicate(timeout=60)
    assert sweep.returncode == 143
    assert "leaked" not in errors and "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("fvflops: ")]
    assert line.startswith("fvflops: terminated: ") and line.endswith("models left; the same command continues")
    assert read_rows(output) and os.listdir(tmp_path) == ["rows.csv"]


def test_what_is_done_is_shown_on_a_terminal_after_a_while_and_erased(monkeypatch):
    monkeypatch.setattr("fvflops.cli.progress._MIN_SECONDS", 0.0)
    monkeypatch.setattr("fvflops.cli.progress._PERIOD", 0.001)
    terminal, file = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (terminal, file):
        with activity("loading zoo:gpt2", stream):
            time.sleep(0.1)
    first, *_, last = terminal.getvalue().split("\r")[1:]
    assert (first, last, file.getvalue()) == ("[0 s] loading zoo:gpt2\x1b[K", "\x1b[K", "")
