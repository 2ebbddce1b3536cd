"""Measure each part of the benchmark."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarking.contenders import CASES, CONTENDERS, FLOP_COUNTER_MODE, GROWTHS, RATIOS, STEPS, NoOpMode, Subjects
from benchmarking.contenders import count_cold as cold
from benchmarking.measuring import Effort, Run, Section
from benchmarking.processes import measure_first, measure_imports, measure_repeats, run_apart
from fvflops import FlopCountAnalysis, StepMeter, count_many, record
from fvflops.sources import SourceOptions
from fvflops.sources.meta import build_on_meta
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from tests.support.models.whole_models import MODELS
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_contenders(case: str, step: str, effort: Effort) -> Section:
    section, subjects = Section(f"{case}, {step}"), Subjects(CASES[case], step)
    contenders = {name: partial(make, subjects) for name, make in CONTENDERS.items()}
    section.add_times(section.run_rounds(contenders, effort), RATIOS)
    return section


def start_afresh(case: str, step: str, effort: Effort) -> Section:
    """Time the first count and the first bare run of new processes, in turn, and the memory that they take."""
    section = Section(f"{case}, {step}, in a new process")
    names = ("bare", "fvflops")
    found = [{name: run_apart(measure_first, case, step, name) for name in names} for _ in range(effort.processes)]
    seconds = {f"first {name}": [item[name]["seconds"] for item in found] for name in names}
    section.add_times(seconds, [("first fvflops", "first bare")])
    section.add("peak memory, MB", [item["fvflops"]["megabytes"] for item in found])
    return section


def count_first(name: str, effort: Effort) -> Section:
    """Time `import fvflops` and the first count of new processes beside `import torch`."""
    section = Section(f"first count: {name}")
    measured = [run_apart(measure_imports, name) for _ in range(1 + effort.processes)][1:]  # the first writes bytecode
    imports, ours, counts, modules = zip(*(one.values() for one in measured), strict=True)
    both = [sum(pair) for pair in zip(ours, counts, strict=True)]
    times = {"import torch": imports, "import fvflops": ours, "import fvflops and count": both, "first count": counts}
    section.add_times(times, [(name, "import torch") for name in ("import fvflops", "import fvflops and count")])
    section.add("modules imported by the count", [max(modules)])
    return section


def measure_growth(quantity: str, effort: Effort) -> Section:
    """Time counts of growing sizes of a model or its input; all sizes take part in each round."""
    section, (sizes, make_case) = Section(f"growth with {quantity}"), GROWTHS[quantity]
    subjects = {size: Subjects(make_case(size), "forward") for size in sizes}
    warm = [subject.weightless for subject in subjects.values()]
    runs: dict[str, Callable[[], Run]] = {}
    for size, subject in subjects.items():
        runs[f"bare, {size}"] = subject.meta.bare
        runs[f"cold, {size}"] = partial(cold, subject.weightless, warm)
        runs[f"warm, {size}"] = partial(Run, subject.weightless.count)
    pairs = [(f"{name}, {size}", f"{name}, {sizes[0]}") for name in ("warm", "cold", "bare") for size in sizes[1:]]
    section.add_times(section.run_rounds(runs, effort), pairs)
    return section


def repeat_analyses(name: str, step: str, times: int, effort: Effort) -> Section:
    """Time many analyses in a row in a process of their own, and observe its memory."""
    section = Section(f"repeated: {name}, {step}")
    result = run_apart(measure_repeats, name, step, max(20, int(times * effort.share)))
    seconds = {name: [result[name]] for name in ("first tenth", "last tenth")}
    section.add_times(seconds, [("last tenth", "first tenth")])
    section.add("growth of Python's objects", [result["objects"]])
    section.add("growth of memory, MB", [result["megabytes"]])
    return section


class Trained:
    """A copy of a model that is trained on one batch."""

    def __init__(self, model: nn.Module, make_optimizer: Any, batch: torch.Tensor, labels: torch.Tensor) -> None:
        self.model, self._batch, self._labels = copy.deepcopy(model).train(), batch, labels
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self._batch).flatten(0, -2), self._labels).backward()
        self.optimizer.step()


def _resnet() -> tuple[Any, ...]:
    optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return build("resnet50"), optimizer, torch.randn(8, 3, 224, 224), torch.zeros(8, dtype=torch.int64)


def _small_gpt() -> tuple[Any, ...]:
    model = GPT2(GPT2Config(vocab_size=512, positions=128, width=256, layers=6, heads=4, dropout=0.0))
    tokens = torch.randint(0, 512, (2, 128))
    return model, partial(torch.optim.AdamW, fused=True), tokens, tokens.flatten()


# Model that is trained → how it is built, and on how many cores it runs.
TRAINED = {"resnet50, batch 8": (_resnet, os.cpu_count()), "small GPT": (_small_gpt, 1)}


def train_really(subject: str, effort: Effort) -> Section:
    """Time the overhead of recording, metering, a no-op mode and other tools in a real training step."""
    section, (make, cores) = Section(f"{subject}, training step"), TRAINED[subject]
    arguments = make()
    trained, metered = Trained(*arguments), Trained(*arguments)
    meter = StepMeter(metered.model, optimizer=metered.optimizer)

    def run_in(make_context: Callable[[], Any], step: Callable[[], None] = trained.step) -> None:
        with make_context():
            step()

    def run_recorded() -> None:
        with record(trained.model) as run:
            trained.step()
        run.total()

    runs: dict[str, Callable[[], None]] = {
        "plain": trained.step,
        "metered": partial(run_in, meter.step, metered.step),
        "no-op mode": partial(run_in, NoOpMode),
        "recorded": run_recorded,
        "FlopCounterMode": partial(run_in, FLOP_COUNTER_MODE),
        "torch.profiler": partial(run_in, torch.profiler.profile),
    }
    with _threads(cores):
        seconds = section.run_rounds({name: partial(Run, run) for name, run in runs.items()}, effort.long)
    meter.close()
    section.add_times(seconds, [("recorded", "no-op mode"), *((name, "plain") for name in runs if name != "plain")])
    return section


def measure_really(effort: Effort) -> Section:
    """Time the overhead of measuring in a real run: ResNet-50's forward pass, batch 8, on all cores of the CPU."""
    section = Section("resnet50, batch 8, measured forward")
    model, images = build("resnet50").eval(), torch.randn(8, 3, 224, 224)

    def run(make_context: Callable[[], Any]) -> None:
        with torch.no_grad(), make_context():
            model(images)

    contexts: dict[str, Callable[[], Any]] = {
        "plain": nullcontext,
        "no-op mode": NoOpMode,
        "time": lambda: record(model, measure={"time"}),
        "time and memory": lambda: record(model, measure={"time", "memory"}),
    }
    with _threads(os.cpu_count()):
        runs = {name: partial(Run, partial(run, make)) for name, make in contexts.items()}
        seconds = section.run_rounds(runs, effort.long)
    section.add_times(seconds, [("time", "plain"), ("time and memory", "plain"), ("no-op mode", "plain")])
    return section


_WARM_UP = 400  # candidates counted before, as in a search through thousands
_BATCH = 8  # candidates counted one after the other, as a search does, before something else is timed


def _mobile_net(seed: int) -> nn.Module:
    """Return a MobileNetV2 with expansions, widths and depths at random."""
    import torchvision

    draw = random.Random(seed)
    blocks = [
        [draw.choice((1, 3, 4, 6)), int(width * draw.choice((0.75, 1.0, 1.25))), draw.randint(1, 4), stride]
        for width, stride in zip((16, 24, 32, 64, 96, 160, 320), (1, 2, 2, 2, 1, 2, 1), strict=True)
    ]
    width = draw.choice((0.5, 0.75, 1.0, 1.25, 1.5))
    return torchvision.models.MobileNetV2(width_mult=width, inverted_residual_setting=blocks)


def count_candidates(effort: Effort) -> Section:
    """Time building and counting batches of candidates of a search over architectures, in CPU time a candidate."""
    section, image = Section("candidates"), torch.zeros(1, 3, 224, 224)
    builders = [partial(_mobile_net, seed) for seed in range(_WARM_UP + 2 * _BATCH * effort.rounds)]
    seconds: dict[str, list[float]] = {}

    def clock(name: str, run: Callable[[Any], object], items: Any) -> None:
        gc.collect()
        begun = time.process_time()
        for item in items:
            run(item)
        seconds.setdefault(name, []).append((time.process_time() - begun) / _BATCH)

    def count(model: nn.Module) -> None:
        FlopCountAnalysis(model, image, warn=False).total()

    def count_built(batch: Any) -> None:
        errors = [row.error for row in count_many(batch, options=SourceOptions(inputs=("1,3,224,224",))) if row.error]
        assert not errors, errors[0]

    for builder in builders[:_WARM_UP]:
        count(build_on_meta(builder))
    for index in effort.count():
        start = _WARM_UP + 2 * _BATCH * index
        batch, others = builders[start : start + _BATCH], builders[start + _BATCH : start + 2 * _BATCH]
        models = [build_on_meta(builder).eval() for builder in batch]
        clock("build", build_on_meta, batch)
        clock("count", count, models)
        clock("count_many, built", count_built, [others])
        with torch.no_grad():
            clock("bare", lambda model: model(image.to("meta")), models)
    seconds["build and count"] = [sum(pair) for pair in zip(seconds["build"], seconds["count"], strict=True)]
    for contender, values in seconds.items():
        section.add(f"{contender}, models/s", [1 / value for value in values])
    section.add_times(seconds, [("count", "bare"), ("count_many, built", "bare")])
    return section


REPEATS = (("lenet5", "forward", 1000), ("lenet5", "forward+backward", 1000), ("resnet50", "forward", 100))
# Names for --only → the sections under them.
SECTIONS: dict[str, list[Callable[[Effort], Section]]] = {
    **{case: [partial(compare_contenders, case, step) for step in STEPS] for case in CASES},
    "new-process": [partial(start_afresh, name, step) for name in CASES if "_8b" not in name for step in STEPS],
    "first-count": [partial(count_first, name) for name in MODELS],
    "growth": [partial(measure_growth, quantity) for quantity in GROWTHS],
    "repeats": [partial(repeat_analyses, *repeated) for repeated in REPEATS],
    "real-training": [partial(train_really, subject) for subject in TRAINED],
    "measuring": [measure_really],
    "candidates": [count_candidates],
}
