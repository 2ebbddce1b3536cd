"""Changes that lower the peak memory of a training step: each is predicted anew, and its FLOPs are counted."""

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

from fvflops.analysis.model_analysis import model_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.training_step_analysis import TrainingStepAnalysis
from fvflops.capture.errors.model_check import not_analysis
from fvflops.capture.model.meta_copy import cast_floats, copy_to_meta
from fvflops.capture.model.model_index import read_modules
from fvflops.capture.model.read_module_tree import module_paths
from fvflops.capture.restore.interrupts import deferred, is_interrupt
from fvflops.capture.run import choose_device
from fvflops.capture.training_step import OptimizerMaker, checkpointed_modules
from fvflops.formulas import FormulaTable
from fvflops.plan.memory.memory_report import MemorySaving, MemorySavings
from fvflops.plan.memory.predict_memory import predict_memory
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.plan.pipeline_stages import Inputs
from fvflops.text import explaining_arguments
from fvflops.trace import ModuleTree, Trace, TraceError
from fvflops.trace.module_tree import modules_above

CLASSES = 6  # classes of modules of which checkpointing is tried, by their activations at the peak
# Name → an optimizer with less state than Adam's 8 bytes a float32 parameter: 4 for momentum, 0 without it, and for
# Adafactor a row and a column of each matrix.
OPTIMIZERS: Mapping[str, Callable[[Iterable[torch.Tensor]], Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
# Assumption for a step of Adafactor: it reads the norm of each parameter, which only scales its update.
ADAFACTOR_ASSUMES: Mapping[str, float] = {"aten::_local_scalar_dense": 1.0}


class PredictedStep(NamedTuple):
    """The memory of a training step and its FLOPs."""

    memory: MemoryTimeline
    flops: int


# A change, its name and its modules, and the prediction of the changed step.
_Attempt = tuple[tuple[str, str, tuple[str, ...]], Callable[[], PredictedStep]]


@explaining_arguments
def memory_savings(step: TrainingStepAnalysis, **options: Any) -> MemorySavings:
    """Return changes that lower the peak memory of a training step, and the FLOPs that they cost.

    The step is predicted again with activation checkpointing of each class of repeated modules (non-reentrant; in a
    step that already has checkpoints, instead of these), with weights and inputs in bfloat16, with the forward pass in
    autocast to bfloat16, with a fused optimizer, and with each optimizer of OPTIMIZERS. Nothing is computed, and the
    model is not changed. `options` are as for `predict_memory`. An analysis of a Trace has no model, and raises
    TraceError.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)) for _ in range(4)))
    >>> savings = memory_savings(TrainingStepAnalysis(model, torch.ones(64, 8), loss=torch.sum, table="exact"))
    >>> [(saving.change, saving.name) for saving in savings.changes]
    [('dtype', 'bfloat16'), ('autocast', 'bfloat16'), ('checkpoint', 'Sequential')]
    """
    if not isinstance(step, TrainingStepAnalysis):
        raise not_analysis(step, "TrainingStepAnalysis(model, inputs, loss=...)")
    run = model_run(step)
    model = None if run is None else run.model
    if run is None or not isinstance(model, nn.Module):
        raise TraceError("memory savings need a model: pass a TrainingStepAnalysis of one")
    table = step.table
    device = choose_device(run.options["device"], [parameter.device for parameter in model.parameters()])

    def predict(**changes: Any) -> PredictedStep:
        changed = step.varied(**changes, device=device)
        memory = predict_memory(changed, **options)
        return PredictedStep(memory, _count(changed, memory.trace, table))

    return find_savings(
        predict,
        model,
        run.arguments(),
        optimizers=step.optimizers,
        checkpointed=checkpointed_modules(model, step.checkpoint),
        in_autocast=step.options["autocast"] is not None,
        assume=step.assume,
        table=table.name,
    )


def _count(step: TrainingStepAnalysis, trace: Trace, table: FormulaTable) -> int:
    """Return the FLOPs of a step whose memory was predicted from a Trace."""
    try:
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False).total()
    except TraceError:  # it has decomposed an op that the table counts as a whole
        return step.total()


def find_savings(
    predict: Callable[..., PredictedStep],
    model: nn.Module,
    inputs: Inputs,
    *,
    optimizers: Sequence[OptimizerMaker],
    checkpointed: Sequence[nn.Module] = (),
    in_autocast: bool = False,
    assume: Mapping[str, Any] | None = None,
    table: str,
) -> MemorySavings:
    """Return changes that lower the peak memory of the training step that `predict` predicts.

    `predict` takes the changes to the step, with the names of TrainingStepAnalysis: `model`, `inputs`, `kwargs`,
    `checkpoint`, `optimizer`, `autocast` and `assume`. The other arguments describe the unchanged step.
    """
    base = predict()
    classes = _rank_by_activations(base.memory, repeated_modules(base.memory.trace, read_modules(model)))
    first_paths = {id(module): name for name, module in reversed(module_paths(model))}
    present = {first_paths[id(module)] for module in checkpointed}
    attempts: list[_Attempt] = [
        (("checkpoint", name, names), partial(predict, checkpoint=names))
        for name, names in classes[:CLASSES]
        if set(names) != present
    ]
    attempts += _other_dtypes(predict, model, inputs, optimizers, in_autocast)
    attempts += _other_optimizers(predict, optimizers, assume)
    tried, failed = [], {}
    for change, make in attempts:
        with deferred():
            try:
                changed = make()
            except Exception as error:
                if is_interrupt(error):
                    raise
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                failed[" ".join(change[:2])] = " ".join(f"{kind}{error}".split())
            else:
                peak = changed.memory.peak
                tried.append(MemorySaving(*change, peak, base.memory.peak - peak, changed.flops - base.flops))
    tried.sort(key=lambda saving: (-saving.saved, saving.flops))
    return MemorySavings(
        peak=base.memory.peak,
        flops=base.flops,
        table=table,
        changes=tuple(saving for saving in tried if saving.saved > 0),
        useless=tuple(saving for saving in tried if saving.saved <= 0),
        failed=failed,
        untried=tuple(f"checkpoint {name}" for name, _ in classes[CLASSES:]),
    )


def repeated_modules(trace: Trace, modules: ModuleTree) -> dict[str, tuple[str, ...]]:
    """Return class → names of its modules, for classes with submodules and several called modules.

    A module within another of its class is not listed, nor is the model itself. The classes are taken from `modules`, a
    model that is not sharded: FSDP2 replaces them.
    """
    called = {region.name for region in trace.regions if region.kind == "module"}
    by_class: dict[str, list[str]] = {}
    for module in trace.modules.modules():
        has_children = any(path is not None for _, path in module.children)
        if module.name and module.name in called and module.has_forward and has_children:
            original = modules.by_name.get(module.name, module)
            by_class.setdefault(original.class_name, []).append(module.name)
    outermost = {}
    for class_name, names in by_class.items():
        outermost[class_name] = tuple(name for name in names if not set(names).intersection(modules_above(name)))
    return {name: modules for name, modules in outermost.items() if len(modules) > 1}


def _rank_by_activations(
    timeline: MemoryTimeline, classes: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return the classes by activations at the peak, the most first; equal ones in the order of the model."""
    peak = timeline.at_peak().event
    activations: Counter[str] = Counter()
    for block in timeline.blocks:
        if block.kind == "activation" and block.is_alive(peak):
            activations.update(dict.fromkeys((*modules_above(block.module), block.module), block.nbytes))
    return sorted(classes.items(), key=lambda item: -sum(activations[name] for name in item[1]))


def _other_dtypes(
    predict: Callable[..., PredictedStep],
    model: nn.Module,
    inputs: Inputs,
    optimizers: Sequence[OptimizerMaker],
    in_autocast: bool,
) -> Iterator[_Attempt]:
    if all(parameter.dtype is not torch.float32 for parameter in model.parameters()):
        return

    def make() -> PredictedStep:
        args, kwargs = cast_floats(inputs, torch.bfloat16)
        makers = [_create_again(maker, model) for maker in optimizers]
        copied = copy_to_meta(model).to(torch.bfloat16)
        return predict(model=copied, inputs=args, kwargs=kwargs, optimizer=makers, autocast=None)

    yield ("dtype", "bfloat16", ()), make
    if not in_autocast:
        yield ("autocast", "bfloat16", ()), partial(predict, autocast=torch.bfloat16)


def _create_again(maker: OptimizerMaker, model: nn.Module) -> OptimizerMaker:
    if not isinstance(maker, Optimizer):
        return maker
    updated = {id(parameter) for group in maker.param_groups for parameter in group["params"]}
    selected = [id(parameter) in updated for parameter in model.parameters()]
    create: Any = type(maker)
    accepted = signature(create).parameters
    options = {name: value for name, value in maker.defaults.items() if name in accepted}
    return lambda parameters: create(list(compress(parameters, selected)), **options)


def _other_optimizers(
    predict: Callable[..., PredictedStep], optimizers: Sequence[OptimizerMaker], assume: Mapping[str, Any] | None
) -> Iterator[_Attempt]:
    if not optimizers:
        return
    classes = [_class_of(maker) for maker in optimizers]
    if len(optimizers) == 1 and not isinstance(maker := optimizers[0], Optimizer):
        parameters = signature(maker).parameters
        if "fused" in parameters and not parameters["fused"].default:
            create: Any = maker
            name = f"{getattr(classes[0], '__name__', 'optimizer')}(fused=True)"
            yield ("optimizer", name, ()), partial(predict, optimizer=partial(create, fused=True))
    assumed = {**ADAFACTOR_ASSUMES, **(assume or {})}
    for name, maker in OPTIMIZERS.items():
        if _class_of(maker) not in classes:
            yield ("optimizer", name, ()), partial(predict, optimizer=maker, assume=assumed)


def _class_of(maker: OptimizerMaker) -> Any:
    made = type(maker) if isinstance(maker, Optimizer) else maker
    return made.func if isinstance(made, partial) else made


CHUNKED = "chunked"
# Names of the module that computes a language model's logits, where the model does not name it.
_HEADS = ("lm_head", "output", "head", "embed_out")


def compute_loss_in_chunks(model: nn.Module) -> None:
    """Let a language model return its loss in place of its logits, from its output projection on, by `ChunkedLoss`.

    >>> model = nn.ModuleDict({"lm_head": nn.Linear(8, 100, bias=False)})
    >>> compute_loss_in_chunks(model)
    >>> model.lm_head(torch.zeros(1, 16, 8)).ndim
    0
    """
    head = find_head(model)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"--loss chunked: no output projection without a bias is known of {type(model).__name__}: pass a function"
        )
    # A copy of the model has the class too, unlike an attribute `forward`.
    head.__class__ = ChunkedLossHead


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes a language model's logits, None where none is known."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)


class ChunkedLossHead(nn.Linear):
    """An output projection that returns the cross entropy of its logits; the labels are zeros."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if hasattr(weight, "device_mesh"):  # a DTensor
            raise ValueError("--loss chunked is not supported with tp, which divides the output projection")
        hidden, kind = input.flatten(0, -2), input.device.type
        if torch.is_autocast_enabled(kind):
            hidden, weight = (item.to(torch.get_autocast_dtype(kind)) for item in (hidden, weight))
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=input.device)
        with torch.autocast(kind, enabled=False):
            loss: torch.Tensor = ChunkedLoss.apply(hidden, weight, labels)
        return loss


def size_of_chunk(tokens: int, width: int, vocabulary: int) -> int:
    """Return the tokens of a chunk, whose logits take about the memory of the hidden states.

    As in liger's fused linear cross entropy, and torch's `LinearCrossEntropyOptions("aspect_ratio")`.

    >>> size_of_chunk(8192, 4096, 128256)
    256
    """
    wanted = -(-tokens // -(-vocabulary // width))
    return min(1 << (wanted - 1).bit_length(), tokens)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of hidden states times a weight; the forward pass computes the gradients, chunk by chunk.

    Source: Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.2. The loss and its gradient are in the memory of
    the chunk's logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        size = size_of_chunk(len(hidden), hidden.shape[1], len(weight))
        for begin in range(0, len(hidden), size):
            chunk = slice(begin, begin + size)
            logits = hidden[chunk] @ weight.t()
            logits.sub_(logits.amax(-1, keepdim=True))
            label = labels[chunk].unsqueeze(1)
            of_label = logits.gather(1, label)
            total = logits.exp_().sum(-1, keepdim=True)
            losses[chunk] = (total.log() - of_label).squeeze(1)
            logits.div_(total).scatter_add_(1, label, torch.full_like(of_label, -1.0)).div_(len(hidden))
            torch.mm(logits, weight, out=of_hidden[chunk])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), hidden[chunk])
        ctx.gradients = of_hidden, of_weight
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_hidden, of_weight = ctx.gradients
        return of_hidden.mul_(gradients[0]), None if of_weight is None else of_weight.mul_(gradients[0]), None
