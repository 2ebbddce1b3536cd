"""What is measured, by given times: saved Traces, a clock that ticks at each look, and kernels without their times."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

import fvflops
from fvflops import zoo
from goldens import clock, nets
from goldens.expressions import break_lines, evaluate, quieten, sections
from goldens.features import add_up
from goldens.jobs import ROOT, Folder, Job, captured
from tests.support.reports.timed_traces import measure

_DURATIONS = {"aten::relu": 6000, "aten::gelu": 250, "aten::convolution": 20_000, "aten::linear": 3000}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def jobs() -> list[Job]:
    return [
        Job("timed/traces", _write_traces),
        Job("timed/loops", _write_loops),
        Job("timed/deepspeed", _write_deepspeed),
        Job("timed/kernels", _write_kernels),
    ]


def _write_traces(folder: Folder) -> None:
    lenet = zoo.build("lenet5"), (torch.zeros(1, 1, 28, 28),)
    for name, (model, inputs) in {"net": nets.net(), "encoder": nets.encoder(), "lenet5": lenet}.items():
        analysis = fvflops.FlopCountAnalysis(model.eval(), inputs, table="exact", execution="real")
        step = partial(fvflops.TrainingStepAnalysis, loss=add_up, optimizer=torch.optim.SGD, table="exact")
        traces = {name: quieten(analysis).trace(), f"{name}-training": quieten(step(model.train(), inputs)).trace()}
        for title, trace in traces.items():
            _tell_profile(folder, title, measure(trace, _DURATIONS, memory=True))
            _tell_profile(folder, f"{title}-without-memory", measure(trace, _DURATIONS, memory=False))
    saved = fvflops.Trace.from_json((ROOT / "tests" / "data" / "lenet5_training_trace.json").read_text())
    _tell_profile(folder, "saved", saved)


def _tell_profile(folder: Folder, name: str, trace: fvflops.Trace) -> None:
    profile = quieten(fvflops.ProfileAnalysis.from_trace(trace, table="exact"))
    folder.write(f"{name}.txt", evaluate("profile", profile=profile))
    folder.write(f"{name}.html", profile.to_html())
    for weight in ("time", "flops", "macs", "bytes", "memory"):
        for format, ending in (("chrome-trace", "json"), ("speedscope", "json"), ("flame-graph", "txt")):
            path = f"{name}-{format}-{weight}.{ending}"
            try:
                profile.export(path, format=format, weight=weight)
            except ValueError as error:
                folder.write(path, f"{type(error).__name__}: {error}")
                continue
            with open(path) as file:
                folder.write(path, break_lines(file.read()))


def _write_loops(folder: Folder) -> None:
    """Measure by a clock that ticks at each look: how often fvflops looks at it is part of the numbers."""

    def loop(measure: set[str]) -> Any:
        torch.manual_seed(0)
        model, inputs = nets.net()
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        with fvflops.record(model, measure=measure, table="exact") as run:
            for _ in range(2):
                add_up(model(*inputs)).backward()
                optimizer.step()
                run.step()
        return quieten(run)

    with clock.ticking():
        for measure in ({"time"}, {"memory"}, {"time", "memory"}):
            run = loop(measure)
            name = "-".join(sorted(measure))
            folder.write(f"{name}.json", break_lines(run.steps[-1].to_json()))
            profile = quieten(fvflops.ProfileAnalysis.from_trace(run.steps[-1], table="exact"))
            folder.write(f"{name}.txt", evaluate("loop", profile=profile))
        for options in ({}, {"loss": add_up}, {"repeat": 7, "warmup": 0}, {"measure": {"time"}}):
            profile = quieten(fvflops.ProfileAnalysis(*nets.net(), **options))
            folder.write(f"profile-{'-'.join(options) or 'default'}.txt", evaluate("loop", profile=profile))


def _write_deepspeed(folder: Folder) -> None:
    """Write DeepSpeed's report of a run by the clock that ticks."""

    def profile(**options: Any) -> str:
        torch.manual_seed(0)
        model, inputs = nets.net()
        profiler = fvflops.FlopsProfiler(model)
        with clock.ticking():
            profiler.start_profile()
            add_up(model(*inputs)).backward()
            profiler.stop_profile()
        _, out, _ = captured(lambda: profiler.print_model_profile(**options))
        _, top, _ = captured(lambda: profiler.print_model_aggregated_profile(top_modules=3))
        profiler.end_profile()
        return f"{out}\n{top}"

    cases: list[dict[str, Any]] = [{}, {"detailed": False}, {"module_depth": 1, "top_modules": 2, "profile_step": 10}]
    folder.write("deepspeed.txt", sections((str(options), partial(profile, **options)) for options in cases))


def _write_kernels(folder: Folder) -> None:
    """Write what profiles of kernels count; their times are torch.profiler's and left out."""

    def rows(**options: Any) -> list[str]:
        found = [row for row in profile.key_averages(**options) if "::" in row.key]
        return sorted(f"{row.key} {row.module} {row.count} {row.flops} {row.input_shapes}" for row in found)

    def about() -> str:
        lines = profile.key_averages(group_by_module=True).table().splitlines()
        columns = next(line for line in lines if line.split()[:1] == ["Name"])
        return _NUMBER.sub("#", "\n".join([*profile.about(), *columns.split()]))

    for name, of, options in (
        ("net", nets.net(), {}),
        ("net-training", nets.net(), {"loss": add_up}),
        ("encoder-exact", nets.encoder(), {"loss": add_up, "table": "exact"}),
    ):
        torch.manual_seed(0)
        profile = fvflops.profile_kernels(of[0].train(), of[1], repeat=2, record_shapes=True, **options)
        folder.write(f"{name}.txt", evaluate("kernels", profile=profile, rows=rows, about=about))
