"""The replay of measured requests: errors are measured on what it is said to be, and the fit goes downhill."""

from tests.support.checkout import ROOT
from tests.support.tools import load_tool

FILE = ROOT / "tests/data/serving/llama_8b_requests.csv"
FIGURES = "0.01276,3.85e-5,1.028e-7,1.501e-7,6.2e-10"
tool = load_tool("serving_replay.py")
SETTINGS = tool.engine_settings("vllm", 500_000, max_sequences=128)


def test_a_replay_of_a_simulation_has_no_errors():
    times = tool.LinearStepTimes(*(float(figure) for figure in FIGURES.split(",")))
    simulated = tool.replay(tool.read_measured(FILE), SETTINGS, times)
    # A request arrives when the loop takes it, so the second replay is the first one again.
    again = tool.replay(simulated, SETTINGS, times)
    for errors in tool.replay_errors(again, simulated, range(60)).values():
        assert errors == tool.Errors(0, 0, 0)


def test_errors_are_relative_and_of_the_requests_that_are_asked_for():
    measured, simulated = tool.read_measured(FILE), tool.read_measured(FILE)
    late = simulated.queued[3] + 1.5 * (simulated.first_token[3] - simulated.queued[3])
    simulated.first_token[3] = late
    assert tool.replay_errors(simulated, measured, range(4, 60))["TTFT"] == tool.Errors(0, 0, 0)
    errors = tool.replay_errors(simulated, measured, [3])
    assert abs(errors["TTFT"].each - 0.5) < 1e-9
    assert errors["end to end"].each == 0


def test_the_descent_finds_the_least_loss():
    found = tool.descend(lambda figures: abs(figures[0] - 3) + abs(figures[1] - 0.02), [1.0, 1.0])
    assert abs(found[0] - 3) < 0.02
    assert abs(found[1] - 0.02) < 0.001


def test_the_program_prints_errors_of_both_halves(capsys):
    assert tool.main([str(FILE), "--max-sequences", "128", "--step-times", FIGURES]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LinearStepTimes(step=0.01276")
    assert out.count("half") == 6
