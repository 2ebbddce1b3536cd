"""What is measured, by given times: saved Traces, a clock that ticks at each look, and kernels without their times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens import clock, nets
from goldens.counts import break_lines, quieten, sections
from goldens.features import add_up
from goldens.jobs import ROOT, Folder, Job, captured
from goldens.showing import show, shown
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
    cases: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "net": nets.net(),
        "encoder": nets.encoder(),
        "lenet5": (zoo.build("lenet5"), (torch.zeros(1, 1, 28, 28),)),
    }
    traces: dict[str, fvflops.Trace] = {}
    for name, (model, inputs) in cases.items():
        model.eval()
        analysis = quieten(fvflops.FlopCountAnalysis(model, inputs, table="exact", execution="real"))
        traces[name] = analysis.trace()
        step = fvflops.TrainingStepAnalysis(
            model.train(), inputs, loss=add_up, optimizer=torch.optim.SGD, table="exact"
        )
        traces[f"{name}-training"] = quieten(step).trace()
    for name, trace in traces.items():
        for memory in (True, False):
            title = name if memory else f"{name}-without-memory"
            _tell_profile(folder, title, measure(trace, _DURATIONS, memory=memory))
    saved = fvflops.Trace.from_json((ROOT / "tests" / "data" / "lenet5_training_trace.json").read_text())
    _tell_profile(folder, "saved", saved)


def _tell_profile(folder: Folder, name: str, trace: fvflops.Trace) -> None:
    profile = quieten(fvflops.ProfileAnalysis.from_trace(trace, table="exact"))
    sorts = ("time", "self", "calls", "flops", "rate", "bytes", "intensity", "memory", "peak", "mismatch", "name")
    texts: dict[str, Callable[[], Any]] = {
        "table": profile.table,
        "table by operator": partial(profile.table, by="operator"),
        "table, deep": partial(profile.table, depth=9),
        "table, H100": partial(profile.table, device="H100", sort="roofline"),
        "table by operator, H100": partial(profile.table, by="operator", device="H100"),
        **{f"table by {key}": partial(profile.table, sort=key, top=4) for key in sorts},
        **{f"table of {phase}": partial(profile.table, phase=phase) for phase in ("forward", "backward", "optimizer")},
        "op table": profile.op_table,
        **{
            f"op table by {key}": partial(profile.op_table, sort=key, top=4)
            for key in ("time", "flops", "memory", "peak")
        },
        "op calls": lambda: show(profile.op_calls()),
        "times": lambda: show(profile.times()),
        "lines": lambda: show(profile.measured().module_rows()),
        "to_dict": lambda: json.dumps(profile.to_dict(by="op")),
        "mfu": lambda: fvflops.mfu(profile, 1.0, device="H100"),
        "notebook": profile._repr_html_,
    }
    folder.write(f"{name}.txt", sections(texts))
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
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
            texts: dict[str, Callable[[], Any]] = {
                "table": profile.table,
                "by operator": partial(profile.table, by="operator"),
                "op table": profile.op_table,
            }
            folder.write(f"{name}.txt", sections(texts))
        for options in ({}, {"loss": add_up}, {"repeat": 7, "warmup": 0}, {"measure": {"time"}}):
            profile = quieten(fvflops.ProfileAnalysis(*nets.net(), **options))
            texts = {"table": profile.table, "op table": profile.op_table, "times": partial(_tell_times, profile)}
            folder.write(f"profile-{'-'.join(options) or 'default'}.txt", sections(texts))


def _tell_times(profile: Any) -> str:
    return show(profile.times())


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

    texts: dict[str, Callable[[], Any]] = {
        "report": profile,
        "not detailed": partial(profile, detailed=False),
        "cut": partial(profile, module_depth=1, top_modules=2, profile_step=10),
    }
    folder.write("deepspeed.txt", sections(texts))


def _write_kernels(folder: Folder) -> None:
    """Write what profiles of kernels count; their times are torch.profiler's and left out."""
    cases: dict[str, tuple[tuple[nn.Module, Any], Mapping[str, Any]]] = {
        "net": (nets.net(), {}),
        "net-training": (nets.net(), {"loss": add_up}),
        "encoder-exact": (nets.encoder(), {"loss": add_up, "table": "exact"}),
    }
    for name, ((model, inputs), options) in cases.items():
        torch.manual_seed(0)
        profile = fvflops.profile_kernels(model.train(), inputs, repeat=2, record_shapes=True, **options)
        texts: dict[str, Callable[[], Any]] = {
            "total": profile.total,
            "by name": partial(_tell_rows, profile),
            "by module": partial(_tell_rows, profile, group_by_module=True),
            "by shape": partial(_tell_rows, profile, group_by_module=True, group_by_input_shape=True),
            "ledger": partial(shown, profile.ledger),
            "analysis": partial(shown, profile.analysis().by_module_and_operator),
            "about, without numbers": partial(_tell_about, profile),
            "columns": partial(_tell_columns, profile),
            "sorted by what is not there": partial(profile.key_averages().table, sort_by="flosp"),
        }
        folder.write(f"{name}.txt", sections(texts))


def _tell_rows(profile: Any, **options: Any) -> str:
    rows = [
        f"{row.key} | {row.module} | {row.count} | {row.flops} | {row.self_flops} | {row.input_shapes}"
        for row in profile.key_averages(**options)
        if "::" in row.key
    ]
    return "\n".join(sorted(rows))


def _tell_about(profile: Any) -> str:
    return _NUMBER.sub("#", "\n".join(profile.about()))


def _tell_columns(profile: Any) -> str:
    lines = profile.key_averages(group_by_module=True).table().splitlines()
    return " | ".join(next(line for line in lines if line.split()[:1] == ["Name"]).split())
