"""What lowers the peak memory of a training step: each change is predicted anew, and its FLOPs are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.analysis.model_analysis import analysed_run, model_run
from fvflops.analysis.training_step import TrainingStepAnalysis
from fvflops.capture.model.meta_copy import cast_floats, copy_to_meta
from fvflops.capture.model.model import module_paths
from fvflops.capture.restore.interrupts import deferred, is_interrupt
from fvflops.capture.training_step import OptimizerMaker, checkpointed_modules
from fvflops.features.memory.compute import MemoryTimeline
from fvflops.features.memory.memory import predict_memory
from fvflops.features.memory.model import MemorySaving, MemorySavings
from fvflops.trace import Trace, TraceError
from fvflops.trace.module_tree import modules_above

CLASSES = 6  # classes of modules of which checkpointing is tried, those with most activations at the peak
# Name → an optimizer with less state than Adam's 8 bytes a float32 parameter: 4 for momentum, 0 without it, and for
# Adafactor a row and a column of each matrix.
OPTIMIZERS: Mapping[str, Callable[[Iterable[torch.Tensor]], Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
# Adafactor reads the norm of each parameter, which only scales its update.
_ADAFACTOR_NORM = "aten::_local_scalar_dense"


class _Attempt(NamedTuple):
    change: str
    name: str
    modules: tuple[str, ...]
    make: Callable[[], TrainingStepAnalysis]


def memory_savings(step: TrainingStepAnalysis, **options: Any) -> MemorySavings:
    """Return what lowers the peak memory of a training step, and the FLOPs that it costs.

    The step is predicted again with activation checkpointing of each class of repeated modules (non-reentrant; in a
    step that already has checkpoints, instead of these), with weights and inputs in bfloat16, and with each optimizer
    of OPTIMIZERS. Nothing is computed, and the model is not changed. `options` are those of `predict_memory`. An
    analysis of a Trace has no model, and raises TraceError.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)) for _ in range(4)))
    >>> savings = memory_savings(TrainingStepAnalysis(model, torch.ones(64, 8), loss=torch.sum, table="exact"))
    >>> [(saving.change, saving.name, saving.modules) for saving in savings.changes]
    [('dtype', 'bfloat16', ()), ('checkpoint', 'Sequential', ('0', '1', '2', '3'))]
    """
    run = model_run(step)
    model = None if run is None else run.model
    if not isinstance(model, nn.Module):
        raise TraceError("memory savings need a model: pass a TrainingStepAnalysis of one")
    base = predict_memory(step, **options)
    flops = step.total()
    classes = _rank_by_activations(base, repeated_modules(base.trace))
    present = _find_checkpointed(step, model)
    attempts = [
        *(
            _Attempt("checkpoint", name, names, partial(step.varied, checkpoint=names))
            for name, names in classes[:CLASSES]
            if set(names) != present
        ),
        *_other_dtypes(step, model),
        *_other_optimizers(step),
    ]
    tried, failed = [], {}
    for attempt in attempts:
        with deferred():
            try:
                changed = attempt.make()
                peak = predict_memory(changed, **options).peak
                added = changed.total() - flops
            except Exception as error:
                if is_interrupt(error):
                    raise
                failed[f"{attempt.change} {attempt.name}"] = " ".join(f"{type(error).__name__}: {error}".split())
            else:
                tried.append(MemorySaving(*attempt[:3], peak, base.peak - peak, added))
    convention = analysed_run(step).table
    tried.sort(key=lambda saving: (-saving.saved, saving.flops))
    return MemorySavings(
        peak=base.peak,
        flops=flops,
        table=convention.name if convention is not None else "",
        changes=tuple(saving for saving in tried if saving.saved > 0),
        useless=tuple(saving for saving in tried if saving.saved <= 0),
        failed=failed,
        untried=tuple(name for name, _ in classes[CLASSES:]),
    )


def repeated_modules(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Return class → names of its modules, for classes with submodules of which a run called several modules.

    A module within another of its class is not listed, nor is the model itself.
    """
    called = {region.name for region in trace.regions if region.kind == "module"}
    by_class: dict[str, list[str]] = {}
    for module in trace.modules.modules():
        has_children = any(path is not None for _, path in module.children)
        if module.name and module.name in called and module.has_forward and has_children:
            by_class.setdefault(module.class_name, []).append(module.name)
    outermost = {name: _outermost(names) for name, names in by_class.items()}
    return {name: modules for name, modules in outermost.items() if len(modules) > 1}


def _outermost(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not set(names).intersection(modules_above(name)))


def _rank_by_activations(
    timeline: MemoryTimeline, classes: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return the classes, those with most activations at the peak first; equal ones in the order of the model."""
    peak = timeline.at_peak().event
    activations: Counter[str] = Counter()
    for block in timeline.blocks:
        if block.kind == "activation" and block.begin <= peak and (block.end is None or peak < block.end):
            activations.update(dict.fromkeys((*modules_above(block.module), block.module), block.nbytes))
    return sorted(classes.items(), key=lambda item: -sum(activations[name] for name in item[1]))


def _find_checkpointed(step: TrainingStepAnalysis, model: nn.Module) -> set[str]:
    """Return the names of the modules whose activations the step recomputes already."""
    first_paths = {id(module): name for name, module in reversed(module_paths(model))}
    return {first_paths[id(module)] for module in checkpointed_modules(model, step.checkpoint)}


def _other_dtypes(step: TrainingStepAnalysis, model: nn.Module) -> Iterator[_Attempt]:
    if not any(parameter.dtype is torch.float32 for parameter in model.parameters()):
        return

    def make() -> TrainingStepAnalysis:
        run = model_run(step)
        assert run is not None
        args, kwargs = cast_floats(run.arguments(), torch.bfloat16)
        return step.varied(
            copy_to_meta(model).to(torch.bfloat16),
            args,
            kwargs=kwargs,
            optimizer=[_create_again(maker, model) for maker in step.optimizers],
            device=step.trace().info.device,
        )

    yield _Attempt("dtype", "bfloat16", (), make)


def _create_again(maker: OptimizerMaker, model: nn.Module) -> OptimizerMaker:
    """Return what creates an optimizer like the given one, for a copy of its model."""
    if not isinstance(maker, Optimizer):
        return maker
    updated = {id(parameter) for group in maker.param_groups for parameter in group["params"]}
    selected = [id(parameter) in updated for parameter in model.parameters()]
    create: Any = type(maker)
    return lambda parameters: create(list(compress(parameters, selected)), **maker.defaults)


def _other_optimizers(step: TrainingStepAnalysis) -> Iterator[_Attempt]:
    if not step.optimizers:
        return
    classes = [_class_of(maker) for maker in step.optimizers]
    if len(step.optimizers) == 1 and not isinstance(maker := step.optimizers[0], Optimizer):
        parameters = signature(maker).parameters
        if "fused" in parameters and not parameters["fused"].default:
            name = f"{getattr(_class_of(maker), '__name__', 'optimizer')}(fused=True)"
            create: Any = maker
            yield _Attempt("optimizer", name, (), partial(step.varied, optimizer=partial(create, fused=True)))
    assume = {_ADAFACTOR_NORM: 1.0, **(step.assume or {})}
    for name, maker in OPTIMIZERS.items():
        if _class_of(maker) not in classes:
            yield _Attempt("optimizer", name, (), partial(step.varied, optimizer=maker, assume=assume))


def _class_of(maker: OptimizerMaker) -> Any:
    """Return the class of an optimizer, or the function that creates it."""
    if isinstance(maker, Optimizer):
        return type(maker)
    return maker.func if isinstance(maker, partial) else maker
