"""Other tools, each as a function from a model to the multiply-adds that the tool reports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comparing.cases import Subject


@dataclass(frozen=True, slots=True)
class Answer:
    """Report of a tool: multiply-adds (several, where it reports MACs and FLOPs), and the ops that it names.

    A figure that is FLOPs is halved by the one who makes the Answer.
    """

    macs: Sequence[float]
    uncounted: str = ""


@dataclass(frozen=True, slots=True)
class Counter:
    """A tool: the package that has its version, the module to import, how it is asked, and whether for a step too."""

    title: str
    package: str
    module: str
    ask: Callable[[Subject], Answer]
    step: bool = False


def run(subject: Subject) -> None:
    out = subject.model(*subject.args, **subject.kwargs)
    if subject.step:
        out.sum().backward()


def ask_fvflops(subject: Subject) -> Answer:
    import fvflops

    if subject.step:
        step = fvflops.TrainingStepAnalysis(
            subject.model, subject.args, kwargs=dict(subject.kwargs), loss=lambda out: out.sum()
        )
        return Answer([step.macs()])
    analysis = fvflops.FlopCountAnalysis(subject.model, subject.args, kwargs=dict(subject.kwargs))
    return Answer([analysis.macs()], " ".join(analysis.unsupported_ops()))


def ask_fvcore(subject: Subject) -> Answer:
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(subject.model, _positional(subject))
    return Answer([analysis.total()], " ".join(analysis.unsupported_ops()))


def ask_torch(subject: Subject) -> Answer:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.set_grad_enabled(subject.step), FlopCounterMode(display=False) as counter:
        run(subject)
    return Answer([counter.get_total_flops() / 2])


def ask_torch_profiler(subject: Subject) -> Answer:
    with (
        torch.set_grad_enabled(subject.step),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profile,
    ):
        run(subject)
    return Answer([sum(event.flops for event in profile.key_averages()) / 2])


def ask_accelerate(subject: Subject) -> Answer:
    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], with_flops=True)])
    with torch.set_grad_enabled(subject.step), accelerator.profile() as profile:
        run(subject)
    return Answer([sum(event.flops for event in profile.key_averages()) / 2])


def ask_deepspeed(subject: Subject) -> Answer:
    from deepspeed.profiling.flops_profiler import get_model_profile

    flops, macs, _ = get_model_profile(
        subject.model,
        args=[*subject.args],
        kwargs=dict(subject.kwargs),
        print_profile=False,
        as_string=False,
        warm_up=0,
    )
    return Answer([macs, flops / 2])


def ask_calflops(subject: Subject) -> Answer:
    from calflops import calculate_flops

    flops, macs, _ = calculate_flops(
        subject.model, args=[*subject.args], kwargs=dict(subject.kwargs), print_results=False, output_as_string=False
    )
    return Answer([macs, flops / 2])


def ask_ptflops(subject: Subject, backend: str) -> Answer:
    from ptflops import get_model_complexity_info

    def make_inputs(_: object) -> Any:
        return subject.args[0] if len(subject.args) == 1 else _by_name(subject)

    macs, _ = get_model_complexity_info(
        subject.model,
        (1,),
        input_constructor=make_inputs,
        as_strings=False,
        print_per_layer_stat=False,
        backend=backend,
    )
    if macs is None:
        raise RuntimeError("ptflops returned no count")
    return Answer([float(macs)])


def ask_thop(subject: Subject) -> Answer:
    import thop

    macs, _ = thop.profile(subject.model, _positional(subject), verbose=False)
    return Answer([macs])


def ask_torchinfo(subject: Subject) -> Answer:
    import torchinfo

    data = dict(subject.kwargs) if subject.kwargs else [*subject.args]
    result = torchinfo.summary(subject.model, input_data=data, verbose=0, device="cpu")
    return Answer([result.total_mult_adds])


def ask_torch_flops(subject: Subject) -> Answer:
    from torch_flops import TorchFLOPsByFX

    counter = TorchFLOPsByFX(subject.model, mem_func_name="memory_allocated")
    counter.propagate(*_positional(subject))
    return Answer([counter.print_total_flops(show=False) / 2])


def ask_torchprofile(subject: Subject) -> Answer:
    from torchprofile import profile_macs

    return Answer([profile_macs(subject.model, _positional(subject))])


def ask_torchlens(subject: Subject) -> Answer:
    import torchlens

    log = torchlens.trace(subject.model, subject.args, dict(subject.kwargs) or None)
    if subject.step:
        return Answer([int(log.total_macs_forward) + int(log.total_flops_backward) / 2])
    return Answer([int(log.total_macs_forward)], " ".join(map(str, log.unknown_flop_ops)))


def _positional(subject: Subject) -> tuple[Any, ...]:
    """Return the inputs in the order of the forward's parameters, for tools without keyword arguments."""
    bound = inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs)
    return bound.args


def _by_name(subject: Subject) -> dict[str, Any]:
    """Return the inputs by the names of the forward's parameters."""
    return dict(inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs).arguments)


COUNTERS = (
    Counter("fvflops", "fvflops", "fvflops", ask_fvflops, step=True),
    Counter("FlopCounterMode", "torch", "torch.utils.flop_counter", ask_torch, step=True),
    Counter("torch.profiler", "torch", "torch.profiler", ask_torch_profiler, step=True),
    Counter("Accelerate", "accelerate", "accelerate", ask_accelerate, step=True),
    Counter("fvcore", "fvcore", "fvcore.nn", ask_fvcore),
    Counter("DeepSpeed", "deepspeed", "deepspeed.profiling.flops_profiler", ask_deepspeed),
    Counter("calflops", "calflops", "calflops", ask_calflops),
    Counter("ptflops", "ptflops", "ptflops", lambda subject: ask_ptflops(subject, "pytorch")),
    Counter("ptflops, aten", "ptflops", "ptflops", lambda subject: ask_ptflops(subject, "aten")),
    Counter("thop", "thop", "thop", ask_thop),
    Counter("torchinfo", "torchinfo", "torchinfo", ask_torchinfo),
    Counter("torch_flops", "torch_flops", "torch_flops", ask_torch_flops),
    Counter("torchprofile", "torchprofile", "torchprofile", ask_torchprofile),
    Counter("TorchLens", "torchlens", "torchlens", ask_torchlens, step=True),
)
