"""`fvflops profile`: command lines, outputs and written files, also when a run fails."""

import io
import json
from pathlib import Path

import pytest

from fvflops.cli import main
from fvflops.cli.progress import Progress

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    runs = 0
    def __init__(self, limit=None, error=RuntimeError):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.limit, self.error = limit, error
    def forward(self, x):
        Net.runs += 1
        if self.limit is not None and Net.runs > self.limit:
            raise self.error("no more")
        return self.fc(x)

def build():
    return Net(), torch.ones(2, 8)

# A warm-up run, and two measured runs, each of which is repeated to time the modules.
def raising():
    return Net(1 + 2 * 2), torch.ones(2, 8)

def interrupted():
    return Net(1 + 2 * 2, KeyboardInterrupt), torch.ones(2, 8)

def interrupted_at_once():
    return Net(0, KeyboardInterrupt), torch.ones(2, 8)
"""
LENET = ["zoo:lenet5", "--warmup", "0", "--repeat", "1"]


@pytest.fixture
def factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(FACTORY)


def run(capsys, *argv):
    code = main(["profile", *argv])
    return code, *capsys.readouterr()


def columns(text):
    return next(line for line in text.splitlines() if line.lstrip().startswith(("module ", "operator ", "# "))).split()


def test_a_profile_by_module_operator_and_op(capsys):
    code, text, err = run(capsys, *LENET)
    assert (code, err) == (0, "")
    assert text.startswith("LeNet5 on float32[1, 1, 28, 28], forward pass, on cpu (")
    words = " ".join(text.split())
    assert "Convention: default (1 FLOP per multiply-add). FLOP/s, FLOP/byte and roofline have 2" in words
    backward = [*LENET, "--backward", "--phase", "backward", "--by", "operator"]
    assert "\naten::convolution_backward," in run(capsys, *backward, "--format", "csv")[1]
    header = run(capsys, *LENET, "--backward", "--format", "csv")[1].splitlines()[0]
    assert header.endswith(",seconds,self_seconds,forward_seconds,backward_seconds")
    _, text, _ = run(capsys, *backward)
    assert " in the backward phase " in " ".join(text.split()) and "forward" not in columns(text)


def test_deepspeeds_report(capsys):
    _, text, _ = run(capsys, *LENET, "--deepspeed", "--depth", "1")
    assert "fwd FLOPS = fwd flops / fwd latency:" in text and "counted by the table deepspeed" in text
    assert "416.52 KMACs" in text and "depth 2" not in text


def test_files_are_written_beside_the_report(capsys, tmp_path):
    paths = {option: tmp_path / option for option in ("trace", "speedscope", "flamegraph", "output")}
    options = [part for option, path in paths.items() for part in (f"--{option}", str(path))]
    assert run(capsys, *LENET, *options, "--weight", "flops") == (0, "", "")
    assert json.loads(paths["trace"].read_text())["otherData"]["weight"] == "flops"
    assert json.loads(paths["speedscope"].read_text())["exporter"].startswith("fvflops")
    stacks = paths["flamegraph"].read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in stacks) == 416_520
    assert paths["output"].read_text().startswith("LeNet5 on")


def test_a_schedule_measures_its_active_steps(capsys, factory):
    _, text, _ = run(capsys, "nets.py:build", "--schedule", "skip_first=1,wait=1,active=2,repeat=1", "--steps", "5")
    assert "The mean of 2 runs, the active steps among 5." in text


def test_a_profile_on_cuda_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, text, err = run(capsys, *LENET, "--device", "cuda")
    assert code == 2 and not text
    assert err.startswith("fvflops: error: argument --device: device 'cuda': this torch (") and "omit the device" in err


@pytest.mark.parametrize(
    ("name", "message", "failure"),
    [
        (
            "raising",
            "fvflops: error: Net on float32[2, 8]: RuntimeError: no more (nets.py:",
            "raised RuntimeError: no more",
        ),
        (
            "interrupted",
            "fvflops: interrupted: the report covers the 2 runs before\n",
            "raised KeyboardInterrupt: no more",
        ),
    ],
)
def test_runs_measured_before_an_error_are_written(capsys, factory, name, message, failure):
    code, text, err = run(capsys, f"nets.py:{name}", "--trace", "run.json", "--flamegraph", "run.txt")
    assert code == (130 if name == "interrupted" else 2) and err.startswith(message)
    assert "The mean of 2 runs after 1 warm-up run" in text
    assert f"Run 4 of 6 {failure}; the profile covers the runs before." in " ".join(text.split())
    assert "broken off" in json.loads(Path("run.json").read_text())["otherData"]
    assert Path("run.txt").read_text().startswith("forward;Net")


def test_an_interrupt_before_anything_was_measured_leaves_nothing(capsys, factory):
    code, text, err = run(capsys, "nets.py:interrupted_at_once", "--trace", "run.json")
    assert (code, text) == (130, "") and not Path("run.json").exists()
    assert err == "fvflops: interrupted: no run was completed\n"


@pytest.mark.parametrize(("seconds", "is_terminal", "drawn"), [(1.0, True, 4), (0.4, True, 0), (1.0, False, 0)])
def test_a_progress_bar_is_drawn_for_long_runs_on_a_terminal(seconds, is_terminal, drawn):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    times = iter(seconds * step for step in range(6))
    bar = Progress(stream, clock=lambda: next(times))
    for done in range(1, 5):
        bar.show(done, 4)
    bar.clear()
    lines = stream.getvalue().split("\r")[1:]
    assert len(lines) == drawn + bool(drawn)
    if drawn:
        assert lines[1] == "[###############---------------] run 2 of 4, about 2 s left\x1b[K"
        assert lines[-1] == "\x1b[K"


def test_every_file_that_could_not_be_written_is_named(capsys, factory, monkeypatch):
    def fail(path, pieces):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr("fvflops.paths.write_text", fail)
    code, text, err = run(capsys, "nets.py:build", "--repeat", "1", "--trace", "a.json", "--html", "b.html")
    assert code == 2 and text.startswith("Net on ") and err.count("\n") == 1
    assert "No space left on device: 'a.json'; [Errno 28] No space left on device: 'b.html'" in err


def test_the_loss_and_the_precision_of_a_training_loop(capsys, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        "def loss(y): return y.float().cosh().sum()\n"
    )
    options = ["--loss", f"{tmp_path}/net.py:loss", "--precision", "bf16-mixed", "--by", "operator", "--repeat", "1"]
    assert main(["profile", f"{tmp_path}/net.py:build", *options]) == 0
    text = capsys.readouterr().out
    assert (
        "forward and backward passes, on cpu" in text
        and "autocast to bf16" in text
        and "\ncosh " in text
        and "backward" in text
    )
