"""`fvflops scale`: count a model at several sizes and fit the polynomial of its cost."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fvflops import paths
from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.model.input_specs import InputSpec, make_arguments, parse_input
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.cli import shared_options
from fvflops.cli.argument_values import parse_assumptions, refuse
from fvflops.cli.open_analysis import backward_loss, without_weights
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import built_on, runs_on
from fvflops.cli.progress import activity
from fvflops.comparison import scaling_plot
from fvflops.comparison.cost_functions import CostExpression
from fvflops.comparison.decoder import check_generation_metric, generation_cost
from fvflops.comparison.scaling import Range, cost_of, read_axis
from fvflops.comparison.scaling_report import generation_report, scaling_report
from fvflops.counting.metrics import METRICS
from fvflops.formulas import FormulaTable, load_table
from fvflops.reports.document import Document
from fvflops.reports.escaping import printable
from fvflops.reports.pictures import picture
from fvflops.sources.call_arguments import call_with, parse_arguments
from fvflops.sources.imports import load_function
from fvflops.sources.load import SOURCES, add_paths, check_applies, load_model
from fvflops.sources.loaded_model import LoadedModel
from fvflops.units import format_quantity

EXAMPLES = (
    "fvflops scale zoo:resnet50 --vary batch=1..64 --vary size=224..448:32",
    "fvflops scale zoo:gpt2 --generate prompt=128,new=64",
)
FIRST = ("--vary", "--generate", "--metric", "--backward", "--plot")


@dataclass(frozen=True, slots=True)
class Template:
    """An input shape in which some sizes are names."""

    name: str | None
    axes: tuple[str | int, ...]
    dtype: str

    def fill(self, sizes: Mapping[str, int]) -> InputSpec:
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)
        return InputSpec(self.name, shape, self.dtype)

    def __str__(self) -> str:
        name = f"{self.name}=" if self.name else ""
        return f"{name}{','.join(map(str, self.axes))}:{self.dtype}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    shared_options.add_model(parser)
    shared_options.add_run(parser)
    add_options(
        parser,
        f"""
        sizes:
        --vary NAME=A..B[:STEP] ...  a size to vary, such as batch=1..64 or size=224..1024:32: a name in place of a
            number of --input, an argument of FACTORY, or a size of the default inputs of a library's model; may be
            repeated
        --generate KEY=N,...  cost of text generation by a language model instead, such as prompt=128,new=256,batch=1
        report:
        --metric METRIC  {", ".join(METRICS)}; default: flops
        """,
        choices={"metric": tuple(METRICS)},
        default={"metric": "flops"},
    )
    shared_options.add_backward(parser)
    shared_options.add_depth(parser, default=1)
    shared_options.add_report(parser)
    shared_options.add_plot(parser)


def run(arguments: argparse.Namespace) -> int:
    """Report how the cost of a model scales; return the exit code."""
    if arguments.generate is not None:
        check_generation_metric(arguments.metric)
    kind = None if arguments.plot is None else picture.file_type(arguments.plot)
    table = load_table(arguments.table)
    with activity(f"counting {arguments.model} at several sizes"):
        document, costs = (_scale if arguments.generate is None else _generate)(arguments, table)
    if kind is not None:
        paths.write_bytes(arguments.plot, scaling_plot.draw_scaling(costs, kind=kind, title=arguments.model))
    write_report(document, arguments)
    return 0


def _scale(arguments: argparse.Namespace, table: FormulaTable) -> tuple[Document, list[CostExpression]]:
    vary = parse_sizes(arguments.vary)
    device, emulated = runs_on(arguments)
    model, inputs, kwargs = _find_source(arguments, vary)
    with emulated():
        cost = cost_of(
            model,
            inputs,
            vary=vary,
            kwargs=kwargs,
            metric=arguments.metric,
            table=table,
            execution=arguments.execution,
            device=device,
            assume=parse_assumptions(arguments.assume),
            loss=backward_loss(arguments),
        )
    what = "a forward and a backward pass" if arguments.backward else "a forward pass"
    return scaling_report(cost, title=_write_title(arguments, table, what), depth=arguments.depth), [cost]


def _generate(arguments: argparse.Namespace, table: FormulaTable) -> tuple[Document, list[CostExpression]]:
    refuse(arguments, (True, ("vary", "input", "assume"), "--generate creates the model's inputs: omit {}"))
    if arguments.backward:
        raise ValueError("--generate has no backward pass: omit --backward")
    sizes = parse_generation(arguments.generate)
    subject = _load_model(arguments, ["1,1:int64"])
    device, emulated = runs_on(arguments)
    with emulated():
        cost = generation_cost(
            subject.model,
            prompt=sizes["prompt"],
            new=sizes["new"],
            batch=sizes.get("batch", 1),
            metric=arguments.metric,
            table=table,
            execution="shapes" if arguments.execution == "auto" else arguments.execution,
            device=device,
        )
    batch = "" if cost.batch == 1 else f", batch {cost.batch:,}"
    what = f"generating {format_quantity(cost.new, 'token')} after a prompt of {cost.prompt:,}{batch}"
    return generation_report(cost, title=_write_title(arguments, table, what)), [cost.prefill, cost.decode]


def _write_title(arguments: argparse.Namespace, table: FormulaTable, what: str) -> str:
    if arguments.metric == "parameters":
        return f"{printable(arguments.model)}: parameters"
    unit = "" if arguments.metric != "flops" else f" (a MAC is {format_quantity(table.multiply_add, 'FLOP')})"
    metric = METRICS[arguments.metric].title
    return f"{printable(arguments.model)}: {metric} of {what}, convention {printable(table.name)}{unit}"


def parse_sizes(texts: Sequence[str]) -> dict[str, Range]:
    """Return the sizes of `--vary` texts; a mistake raises ValueError.

    >>> parse_sizes(["batch=1..64", "size=224..1024:32"])
    {'batch': (1, 64, 1), 'size': (224, 1024, 32)}
    """
    if not texts:
        raise ValueError("scale needs sizes to vary, such as --vary batch=1..64, or --generate prompt=128,new=256")
    sizes: dict[str, Range] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        match = re.fullmatch(r"(\d+)\.\.(\d+)(?::(\d+))?", rest)
        if not name.isidentifier() or match is None:
            raise ValueError(f"--vary {text}: write a name and its first and last size, such as batch=1..64")
        if name in sizes:
            raise ValueError(f"--vary {text}: {name} is varied already; pass it once")
        first, last, step = (int(number) for number in match.groups(default="1"))
        read_axis(name, (first, last, step))
        sizes[name] = (first, last, step)
    return sizes


def parse_generation(text: str) -> dict[str, int]:
    """Return the sizes of a `--generate` text.

    >>> parse_generation("prompt=128,new=256")
    {'prompt': 128, 'new': 256}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, number = part.partition("=")
        if key not in ("prompt", "new", "batch") or not number.isdecimal():
            raise ValueError(f"--generate {text}: must be one of prompt=N, new=N, batch=N; got {part!r}")
        sizes[key] = int(number)
    for key in ("prompt", "new"):
        if key not in sizes:
            raise ValueError(f"--generate {text}: {key} is missing: write prompt=128,new=256")
    return sizes


def parse_template(text: str, names: Sequence[str]) -> Template:
    """Return the input of `[NAME=]SHAPE[:DTYPE]`, in which sizes may be names.

    >>> parse_template("ids=batch,seq:int64", ["batch", "seq"])
    Template(name='ids', axes=('batch', 'seq'), dtype='int64')
    """
    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.partition(":")
    parts = re.split(r",|(?<=\d)x(?=\d)", shape)
    for part in parts:
        if part.isidentifier() and part not in names:
            raise ValueError(f"--input {text}: {part!r} is not varied: add --vary {part}=1..64, or write a number")
    numbers = ",".join("1" if part in names else part for part in parts)
    try:
        spec = parse_input(f"{name}{equals}{numbers}{colon}{dtype}")
    except ValueError as error:
        raise ValueError(f"--input {text}: {str(error).partition(': ')[2]}") from None
    axes = tuple(part if part in names else size for part, size in zip(parts, spec.shape, strict=True))
    return Template(spec.name, axes, spec.dtype)


def _find_source(arguments: argparse.Namespace, vary: Mapping[str, Range]) -> tuple[Any, Any, Any]:
    """Return the model, its inputs and its keyword arguments, fixed or as functions of the sizes."""
    templates = [parse_template(text, list(vary)) for text in arguments.input]
    options = shared_options.model_options(arguments, device=built_on(arguments))
    add_paths(options.paths)
    factory = _find_factory(arguments.model, vary)
    if factory is None:
        subject, templates = _load(arguments, templates, vary)
        _check_used(vary, (), templates)
        tensors = tensors_of((subject.inputs, dict(subject.kwargs)))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        return subject.model, *_fill_functions(templates, device)
    function, arguments_varied = factory
    _check_used(vary, arguments_varied, templates)
    check_applies(options, "", arguments.model)
    fixed = parse_arguments(options.args)
    for name in arguments_varied:
        if name in fixed:
            raise ValueError(f"--arg {name}: --vary {name} sets it: omit one")

    def build(**sizes: int) -> Any:
        varied = {name: sizes[name] for name in arguments_varied}
        result = call_with(function, {**fixed, **varied}, arguments.model)
        model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        model.train(arguments.train)
        return model if templates else (model, inputs)

    return build, *(_fill_functions(templates, torch.device("cpu")) if templates else (None, None))


def _find_factory(model: str, vary: Mapping[str, Range]) -> tuple[Callable[..., Any], list[str]] | None:
    """Return MODEL's function and the varied sizes among its arguments, or None where there are none."""
    if model.partition(":")[0] in SOURCES or not model.rpartition(":")[0]:
        return None
    function = load_function(model, "MODEL")
    if isinstance(function, torch.nn.Module):
        return None
    names = [name for name in inspect.signature(function).parameters if name in vary]
    return (function, names) if names else None


def _load(
    arguments: argparse.Namespace, templates: list[Template], vary: Mapping[str, Range]
) -> tuple[LoadedModel, list[Template]]:
    """Return the model and the templates of its inputs: passed ones, or its library's default shapes."""
    smallest = {name: sizes[0] for name, sizes in vary.items()}
    subject = _load_model(arguments, [str(replace(item, axes=item.fill(smallest).shape)) for item in templates])
    if not templates:
        args, kwargs = bind_inputs(subject.model, subject.inputs, subject.kwargs)
        inputs = [*((None, value) for value in args), *kwargs.items()]
        if not all(isinstance(value, torch.Tensor) for _, value in inputs):
            raise ValueError(f"the inputs of {arguments.model} are not all tensors: pass --input, with names of sizes")
        templates = [name_axes(name, value, list(vary)) for name, value in inputs]
    return subject, templates


def _load_model(arguments: argparse.Namespace, texts: list[str]) -> LoadedModel:
    options = shared_options.model_options(arguments, inputs=texts, device=built_on(arguments))
    subject = load_model(arguments.model, without_weights(arguments.model, options, arguments.execution))
    subject.train(arguments.train, option="--train")
    return subject


def name_axes(name: str | None, value: torch.Tensor, names: Sequence[str]) -> Template:
    """Return a template of an input: varied axes have their conventional names, the others their sizes.

    Text is (batch, seq), or (batch, target) for a decoder's; images are (batch, channels, size, size), or with height
    and width where one is varied; videos have frames before height; else the last axis is frames or samples.

    >>> name_axes(None, torch.zeros(1, 3, 224, 224), ["size"]).axes
    (1, 3, 'size', 'size')
    """
    sides = ("height", "width") if {"height", "width"} & set(names) else ("size", "size")
    layouts: dict[int, tuple[str, ...]]
    layouts = {2: ("samples",), 3: ("channels", "frames"), 4: ("channels", *sides), 5: ("channels", "frames", *sides)}
    if not value.dtype.is_floating_point:
        layouts[2] = ("target" if (name or "").startswith("decoder") else "seq",)
    others = layouts.get(value.ndim, tuple(f"axis{index}" for index in range(1, value.ndim)))
    labelled = zip(("batch", *others), value.shape, strict=True)
    axes = tuple(label if label in names else size for label, size in labelled)
    return Template(name, axes, str(value.dtype).removeprefix("torch."))


def _check_used(vary: Mapping[str, Range], among: Sequence[str], templates: Sequence[Template]) -> None:
    """Raise ValueError for a varied size that is neither in an input nor `among` the arguments."""
    used = {*among, *(axis for template in templates for axis in template.axes)}
    for name in vary:
        if name not in used:
            shown = " ".join(f"--input {template}" for template in templates) or "--input"
            raise ValueError(
                f"--vary {name}: no input or argument has this size: write {name} instead of a number in {shown}"
                + (", or use one of the names batch, seq, size, height, width, frames" if templates else "")
            )


def _fill_functions(templates: Sequence[Template], device: torch.device) -> tuple[Any, Any]:
    def fill(named: bool) -> Callable[..., Any]:
        chosen = [template for template in templates if (template.name is not None) is named]
        return lambda **sizes: make_arguments([template.fill(sizes) for template in chosen], device)[named]

    return fill(False), fill(True)
