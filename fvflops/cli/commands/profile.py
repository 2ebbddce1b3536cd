"""`fvflops profile`: measure time and memory of a model, and report them with its counts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fvflops.analysis.steps import Schedule, schedule
from fvflops.analysis.trace_file import save_trace
from fvflops.cli import shared_options
from fvflops.cli.argument_values import refuse
from fvflops.cli.open_analysis import load_subject
from fvflops.cli.outputs import check_exports, write, write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning.step_options import choose_loss
from fvflops.cli.progress import Progress
from fvflops.compat.deepspeed_profile import read_profile
from fvflops.compat.deepspeed_profile import render as render_deepspeed
from fvflops.devices.devices import Device, load_peaks
from fvflops.formulas import FormulaTable, load_table
from fvflops.formulas.schema import schemas_of
from fvflops.measure.profile_analysis import ProfileAnalysis
from fvflops.measure.profile_report import check_profile_sort
from fvflops.reports.call_tables import SORTS as CALL_SORTS
from fvflops.sources.load import is_built_on_meta
from fvflops.sources.loaded_model import with_input_hint
from fvflops.text import nearest, suggest
from fvflops.trace import PHASES
from fvflops.units import format_quantity
from fvflops.views.ranking import check_sort

EXAMPLES = (
    "fvflops profile zoo:lenet5",
    "fvflops profile zoo:lenet5 --backward --by operator --sort time --top 5",
    "fvflops profile zoo:lenet5 --peaks H100 --html profile.html",
)
FIRST = ("--device", "--batch", "--backward", "--by", "--sort")
RARE = ("--schedule",)
_SCHEDULE_KEYS = ("skip_first", "wait", "warmup", "active", "repeat")


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Options checked before the run: the table, the peaks, and path → format of files."""

    table: FormulaTable
    peaks: Device | None
    files: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser, None, note="default, or deepspeed with --deepspeed")
    shared_options.add_model(parser, assume=False)
    run = find_group(parser, "run")
    run.add_argument("--device", choices=("cpu", "cuda"), help="device of the run; default: the model's device")
    run.add_argument("--train", action="store_true", help="run the model in training mode, not in eval mode")
    shared_options.add_backward(
        parser, "the model's, else cross entropy of a language model's logits, else the sum of its outputs"
    )
    add_options(
        parser,
        """
        run:
        --precision  run the forward pass and the loss in torch.autocast to bfloat16; default: the model's
        number of runs:
        --warmup N  warm-up runs; default: 1
        --repeat N  measured runs; default: 5
        --schedule KEY=N,...  instead of --warmup and --repeat: skip_first, wait, warmup, active and repeat of
            torch.profiler.schedule
        --steps N  with --schedule: number of runs
        report:
        --by  one row per module (default), operator (all its calls summed) or op call
        --phase PHASE  one phase: forward, recompute or backward; default: all
        """,
        choices={"precision": ("bf16-mixed",), "by": ("module", "operator", "op"), "phase": PHASES},
        type={"warmup": int, "repeat": int, "steps": int},
        default={"by": "module"},
    )
    shared_options.add_depth(parser)
    shared_options.add_report(
        parser,
        sort="time, self (without submodules), calls, flops, rate (FLOP/s), bytes, intensity (FLOP/byte), roofline, "
        "memory (retained), peak, mismatch (share of the time / share of the FLOPs), a phase or name; with --by op "
        "by time, flops, memory, peak or name",
    )
    add_options(
        parser,
        """
        report:
        --peaks DEVICE  show the share of a device's roofline: H100, FILE.yaml or FILE.yaml:NAME
        --ignore OP ...  exclude an op, or a module class counted as a whole, from --by op; may be repeated
        --deepspeed  show DeepSpeed's report instead, as text
        """,
    )
    files = find_group(parser, "additional files")
    shared_options.add_exports(files, weights="time (default), flops, macs, bytes, memory")
    shared_options.add_save_trace(files)
    files.add_argument("--html", metavar="PATH", help="also write the page of --format html")


def run(arguments: argparse.Namespace) -> int:
    """Profile the model and write the report and the files; where a run raises, of the runs before it."""
    checked = _check(arguments)
    options = _read_runs(arguments)
    device = arguments.device or ("cpu" if is_built_on_meta(arguments.model) else None)
    subject = load_subject(arguments.model, shared_options.model_options(arguments, device=device), arguments)
    for name in arguments.ignore:
        full = name if "::" in name else f"aten::{name}"
        if name.islower() and not schemas_of(full):  # else it may be a module's class, known after the run
            near = nearest(full, checked.table.rows)
            raise ValueError(f"--ignore {name}: there is no such op" + (f"; the nearest is {near}" if near else ""))
    progress = Progress()
    profile = ProfileAnalysis(
        subject.model,
        subject.inputs,
        kwargs=subject.kwargs,
        loss=choose_loss(arguments, subject.model) if arguments.backward else None,
        autocast=torch.bfloat16 if arguments.precision else None,
        table=checked.table,
        on_run=progress.show,
        warn=False,
        **options,
    )
    try:
        with_input_hint(subject, profile.trace)
    except BaseException as error:
        progress.clear()
        runs = profile.measured_runs
        if runs:
            _write(profile.salvage(), arguments, checked)
        if isinstance(error, KeyboardInterrupt):
            reason = f"the report covers the {format_quantity(runs, 'run')} before" if runs else "no run was completed"
            raise KeyboardInterrupt(reason) from error
        raise
    progress.clear()
    _write(profile, arguments, checked)
    return 0


def _check(arguments: argparse.Namespace) -> CheckedOptions:
    """Return the checked options; raise ValueError or OSError for errors found before the model is built."""
    if arguments.sort is not None:
        if arguments.by == "op":
            check_sort(arguments.sort, CALL_SORTS)
        else:
            check_profile_sort(arguments.sort)
    if arguments.phase in ("recompute", "backward") and not arguments.backward:
        raise ValueError(f"--phase {arguments.phase}: no backward pass is run; add --backward")
    phase = arguments.phase
    if phase in ("optimizer", "other"):
        raise ValueError(f"--phase {phase}: profile runs no optimizer; fvflops.record measures a training loop")
    if arguments.ignore and arguments.by != "op":
        raise ValueError("--ignore excludes ops from the list of op calls: add --by op")
    if arguments.peaks is not None and arguments.by == "op":
        raise ValueError("--peaks shows the share of a roofline by module or operator: omit --by op")
    if arguments.sort == "roofline" and arguments.peaks is None:
        raise ValueError("--sort roofline: add the device, such as --peaks H100")
    if arguments.deepspeed:
        if arguments.by != "module" or arguments.phase or arguments.sort or arguments.peaks:
            raise ValueError("--deepspeed writes DeepSpeed's report: omit --by, --phase, --sort and --peaks")
        if arguments.format != "text":
            raise ValueError(f"--format {arguments.format}: --deepspeed writes DeepSpeed's text; omit --format")
    message = "{} is for tables, and --format html is a page with all views: omit it"
    refuse(arguments, (arguments.format == "html", ("by", "phase", "depth", "sort", "top"), message))
    peaks = None if arguments.peaks is None else load_peaks(arguments.peaks, "--peaks")
    table = load_table(arguments.table or ("deepspeed" if arguments.deepspeed else "default"))
    others = {arguments.html: "html", arguments.save_trace: "trace"}
    files = {**check_exports(arguments), **{path: format for path, format in others.items() if path is not None}}
    return CheckedOptions(table, peaks, files)


def _read_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.schedule is None:
        if arguments.steps is not None:
            raise ValueError("--steps is the number of runs of a --schedule; without one use --warmup and --repeat")
        numbers = {"warmup": arguments.warmup, "repeat": arguments.repeat}
        return {name: number for name, number in numbers.items() if number is not None}
    if arguments.warmup is not None or arguments.repeat is not None:
        raise ValueError("--schedule has its own warmup and repeat: omit --warmup and --repeat")
    if arguments.steps is None:
        raise ValueError("--schedule needs --steps N, the number of runs")
    return {"schedule": parse_schedule(arguments.schedule), "steps": arguments.steps}


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that a text such as `wait=1,active=2` describes; a mistake raises ValueError.

    >>> [parse_schedule("wait=1,active=1")(step) for step in range(2)]
    ['none', 'record_and_save']
    """
    numbers: dict[str, int] = {}
    for item in text.split(","):
        key, _, number = item.partition("=")
        if key not in _SCHEDULE_KEYS:
            hint = suggest(key, _SCHEDULE_KEYS)
            raise ValueError(f"--schedule keys must be among {', '.join(_SCHEDULE_KEYS)}; got {key!r}{hint}")
        if not number.isdecimal():
            raise ValueError(f"--schedule {text}: {key} must be an integer of at least 0; got {number!r}")
        if key in numbers:
            raise ValueError(f"--schedule {text}: {key} is repeated")
        numbers[key] = int(number)
    if "active" not in numbers:
        raise ValueError(f"--schedule {text}: add the number of measured steps, such as active=1")
    return schedule(**numbers)


def _write(profile: ProfileAnalysis, arguments: argparse.Namespace, checked: CheckedOptions) -> None:
    """Write the report and the files; an OSError for files that cannot be written is raised after the others."""
    failures: list[OSError] = []
    for path, format in {arguments.output: "report", **checked.files}.items():
        try:
            if format == "report":
                _write_report(profile, arguments, checked)
            elif format == "html":
                profile.to_html(path, name=arguments.model, device=checked.peaks)
            elif format == "trace":
                save_trace(profile.trace(), path)
            else:
                profile.export(path, format=format, weight=arguments.weight)
        except BrokenPipeError:
            raise
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0] if len(failures) == 1 else OSError("; ".join(map(str, failures)))


def _write_report(profile: ProfileAnalysis, arguments: argparse.Namespace, checked: CheckedOptions) -> None:
    if arguments.format == "html":
        write(profile.to_html(name=arguments.model, device=checked.peaks), arguments.output)
        return
    if arguments.deepspeed:
        text = render_deepspeed(
            read_profile(profile.trace(), table=checked.table),
            profile_step=int(profile.trace().about.get("warmup", 0)),
            module_depth=-1 if arguments.depth is None else arguments.depth,
            top_modules=arguments.top or 1,
        )
        write(text, arguments.output)
        return
    options = {"phase": arguments.phase, "sort": arguments.sort, "top": arguments.top}
    if arguments.by == "op":
        report = profile.call_report(ignore=arguments.ignore, **options)
        arguments.sort = None  # the table is ranked already, by keys that are not columns
    else:
        report = profile.report(by=arguments.by, depth=arguments.depth, device=checked.peaks, **options)
    write_report(report, arguments)
