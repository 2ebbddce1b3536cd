"""`fvflops roofline`: what bounds a model on a device, by the device's peaks as published or as measured here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fvflops.analysis import FlopCountAnalysis, TrainingStepAnalysis
from fvflops.capture.recorder.signature import tensors_of
from fvflops.cli.commands.count import parse_assumptions, with_input_hint, write
from fvflops.cli.models import LoadedModel, load_model
from fvflops.features.roofline import plot as roofline_plot
from fvflops.features.roofline import report
from fvflops.features.roofline.compute import roofline
from fvflops.features.utilisation.device_benchmark import PRODUCTS, measure_device, write_device
from fvflops.features.utilisation.devices import Device, find_device, load_devices, short_dtype
from fvflops.formulas import FormulaTable, load_table
from fvflops.reports.pictures import picture


def run(arguments: argparse.Namespace) -> int:
    """Draw the roofline of the model that the arguments name, or measure this machine; return the exit code."""
    if arguments.plot is not None:
        if arguments.model is None:
            raise ValueError(f"--plot {arguments.plot}: without a MODEL there is nothing to draw")
        picture.prepare(arguments.plot)
    if arguments.model is None:
        if not arguments.measure:
            raise ValueError("roofline wants a MODEL and a --device such as H100, or --measure")
        write(write_device(measure_device(arguments.device)), arguments.output)
        return 0
    dtype = None if arguments.dtype is None else _read_dtype(arguments.dtype)
    table = load_table(arguments.table)
    if not arguments.measure:
        if arguments.device is None:
            raise ValueError("roofline needs --device, such as H100 or FILE.yaml, or --measure for this machine")
        device = load_peaks(arguments.device, "--device")
    subject = load_model(arguments.model, arguments.input, config=arguments.config, device=arguments.build)
    subject.model.train(arguments.train)
    if dtype is not None:
        subject = _cast(subject, PRODUCTS[dtype])
    analysis = _analyse(subject, table, arguments)
    with_input_hint(subject, analysis.trace)
    if arguments.measure:
        device = measure_device(arguments.device)
    drawn = roofline(analysis, device=device, table=table, float32_matmul="tf32" if dtype == "tf32" else None)
    if arguments.plot is not None:
        roofs = {name: device.peak(name) for name in device.dtypes()}
        roofline_plot.save(drawn, arguments.plot, by=arguments.by, depth=arguments.depth, roofs=roofs)
    write(report.render(drawn, by=arguments.by, depth=arguments.depth, shown=arguments.top), arguments.output)
    return 0


def load_peaks(text: str, option: str) -> Device:
    """Return the device that an option names, of the shipped ones or of a file."""
    for ending in (".yaml", ".yml"):
        file, separator, name = text.partition(ending + ":")
        if separator:
            return find_device(name, file=file + ending)
        if text.endswith(ending):
            first, *others = load_devices(text)
            if others:
                named = ", ".join(device.name for device in (first, *others))
                raise ValueError(f"{option} {text}: there are {named}: write {text}:{first.name}")
            return first
    return find_device(text)


def _read_dtype(text: str) -> str:
    dtype = short_dtype(text)
    if dtype not in PRODUCTS:
        raise ValueError(f"--dtype {text}: a model is cast to {', '.join(PRODUCTS)}")
    return dtype


def _cast(subject: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Return a subject whose floating-point weights and inputs are of a dtype."""
    inputs, kwargs = _cast_floats((subject.inputs, dict(subject.kwargs)), dtype)
    return replace(subject, model=subject.model.to(dtype), inputs=inputs, kwargs=kwargs)


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast_floats(item, dtype) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast_floats(item, dtype) for item in value)
    return value


def _analyse(subject: LoadedModel, table: FormulaTable, arguments: argparse.Namespace) -> FlopCountAnalysis:
    assume = parse_assumptions(arguments.assume)
    if not arguments.backward:
        return FlopCountAnalysis(
            subject.model,
            subject.inputs,
            kwargs=subject.kwargs,
            table=table,
            execution=arguments.execution,
            assume=assume,
        )
    if arguments.execution == "real":
        raise ValueError("--backward is run by shapes, not for real: leave --execution out")
    return TrainingStepAnalysis(
        subject.model, subject.inputs, kwargs=subject.kwargs, loss=sum_results, table=table, assume=assume
    )


def sum_results(result: Any) -> torch.Tensor:
    """Return the sum of all that a model returns, where it has a gradient."""
    sums = [tensor.float().sum() for tensor in tensors_of(result) if tensor.requires_grad]
    if not sums:
        raise ValueError("--backward: nothing that the model returns has a gradient")
    return torch.stack(sums).sum()
