"""Integrations: transformers.Trainer, Lightning, Accelerate and a plain loop have equal counts in each step."""

import csv
import sys
from collections import Counter
from functools import cache, partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fvflops
from fvflops import FlopCountAnalysis, Trace
from fvflops.trace import TraceError
from tests.support.installed_patches import NOTHING, installed
from tests.support.library_versions import is_older
from tests.support.models.parts import Applied
from tests.support.processes.start import run_ranks

# The libraries are imported where they are used: each takes seconds, in every process that collects tests.
BATCH, WIDTH, INNER, CLASSES, LENGTH, VOCABULARY = 2, 4, 8, 3, 6, 20
STEPS = 4
SECOND_AND_THIRD = fvflops.schedule(wait=1, active=2, repeat=1)


class Tiny(nn.Module):
    """Two layers and a norm; records at each call whether instrumentation is installed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.down = nn.Linear(INNER, CLASSES)
        self.instrumented = []
        self.fails_at = -1

    def forward(self, x, labels):
        if len(self.instrumented) == self.fails_at:
            raise ArithmeticError("in the model")
        self.instrumented.append(installed() != NOTHING)
        logits = self.down(torch.relu(self.norm(self.up(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_llama():
    """Return a Llama of 2 layers with activation checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False))
    model.gradient_checkpointing_enable()
    # Otherwise the Trainer makes it divide the loss by the labels of all micro-batches instead of each one's.
    model.accepts_loss_kwargs = False
    return model.train()


class Numbers(Dataset):
    """Training data for a model, with the given number of items."""

    def __init__(self, name, items):
        self.name = name
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        if self.name == "tiny":
            return {"x": torch.full((WIDTH,), index / 10), "labels": torch.tensor(index % CLASSES)}
        ids = (torch.arange(LENGTH) + index) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


MODELS = {"tiny": Tiny, "llama": make_llama}


def make_optimizer(model):
    """Return the optimizer that the Trainer creates for `optim="adamw_torch"`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def make_loader(name, batches):
    return DataLoader(Numbers(name, BATCH * batches), batch_size=BATCH)


# Each trains for STEPS steps of `micro` micro-batches and returns its recording; `options` are the callback's.


def run_plain(name, model, micro, **options):
    optimizer = make_optimizer(model)
    with fvflops.record(model, table="exact", **options) as run:
        for number, batch in enumerate(make_loader(name, STEPS * micro), 1):
            model(**batch)["loss"].backward()
            if number % micro == 0:
                optimizer.step()
                optimizer.zero_grad()
                run.step()
    return run


def make_trainer(name, model, micro, *callbacks, **arguments):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="/nonexistent",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=micro,
        max_steps=STEPS,
        logging_steps=1,
        # The plain loop's optimizer instead of the fused one, and no gradient clipping.
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=0.0,
        **arguments,
    )
    data = Numbers(name, BATCH * micro * STEPS)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def make_lightning(package, name, model, *callbacks, **arguments):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, index):
            self.net(**batch)

        def configure_optimizers(self):
            return make_optimizer(self)

        def train_dataloader(self):
            return make_loader(name, 2 * STEPS)

        def val_dataloader(self):
            return make_loader(name, 1)

    arguments = {"limit_val_batches": 0, "max_steps": STEPS, "logger": False, **arguments}
    trainer = package.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    return trainer, Module()


def import_package(loop):
    """Return Lightning's package under its new or its old name."""
    return pytest.importorskip("lightning.pytorch" if loop == "lightning" else loop, reason="a loop of the extra loops")


def prepare(loop, kind, options, name, model, *others, micro=1, **arguments):
    """Return a callback of fvflops, a trainer with it and other callbacks, and the function that trains."""
    if loop == "transformers":
        from fvflops.integrations import transformers as integration

        callback = getattr(integration, kind)(**options)
        trainer = make_trainer(name, model, micro, callback, *others, **arguments)
        return callback, trainer, trainer.train
    package = import_package(loop)
    from fvflops.integrations import lightning as integration

    callback = getattr(integration, kind)(**options)
    trainer, module = make_lightning(
        package, name, model, callback, *others, accumulate_grad_batches=micro, **arguments
    )
    return callback, trainer, partial(trainer.fit, module)


def run_callback(loop, name, model, micro, **options):
    callback, _, train = prepare(loop, "FlopsCallback", {"table": "exact", **options}, name, model, micro=micro)
    train()
    return callback.recording


def run_accelerate(name, model, micro, **options):
    from accelerate import Accelerator

    from fvflops.integrations.accelerate import FlopsRecording

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), make_loader(name, STEPS * micro))
    with FlopsRecording(accelerator, model, table="exact", **options) as run:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            run.step()
    return run


LOOPS = {
    **{loop: partial(run_callback, loop) for loop in ("transformers", "lightning", "pytorch_lightning")},
    "accelerate": run_accelerate,
}


def costs_of(step, prefix=""):
    """Return a step's FLOPs: the modules' by (module, phase), the optimizer's by op, the loop's own by (phase, op).

    `prefix` is the name of the model within the loop's own module.
    """
    modules = Counter()
    optimizer = Counter()
    own = Counter()
    for entry in FlopCountAnalysis.from_trace(step, table="exact").counts().entries:
        assert entry.status.value in ("counted", "zero_flop")
        if entry.phase == "optimizer":
            optimizer[entry.op] += entry.value
        elif entry.scope:
            modules[entry.scope[-1].removeprefix(prefix).removeprefix("."), entry.phase] += entry.value
        else:
            own[entry.phase, entry.op] += entry.value
    return +modules, +optimizer, +own


def own_work(loop, model, micro):
    """Return a loop's own FLOPs in a step of `micro` micro-batches, by (phase, op), in the convention exact."""
    # Lightning and Accelerate divide each loss by the number of micro-batches, also by 1, and back again.
    own = Counter({("forward", "aten::div"): micro, ("backward", "aten::div"): micro})
    if loop == "transformers":
        # The Trainer divides too, before Accelerate, and sums the losses for its log unless one is nan (a comparison)
        # or infinite (an absolute value and a comparison). Even without clipping it computes the norm of each gradient
        # (2 n for n squares and their sum, 1 for the root) and the norm of these norms, and multiplies all gradients by
        # 1, which it computes in four operations.
        parameters = list(model.parameters())
        elements = sum(parameter.numel() for parameter in parameters)
        own += own
        own += Counter(
            {
                ("forward", "aten::add_"): micro,
                ("forward", "aten::isnan"): micro,
                ("forward", "aten::isinf"): 2 * micro,
                ("other", "aten::_foreach_norm"): 2 * elements + len(parameters),
                ("other", "aten::linalg_vector_norm"): 2 * len(parameters) + 1,
                ("other", "aten::add"): 1,
                ("other", "aten::reciprocal"): 1,
                ("other", "aten::mul"): 1,
                ("other", "aten::clamp"): 1,
                ("other", "aten::_foreach_mul_"): elements,
            }
        )
    return own


@cache
def plain_steps(name, micro):
    return run_plain(name, MODELS[name](), micro, schedule=SECOND_AND_THIRD)


CASES = [("tiny", 1), ("tiny", 2), ("llama", 2)]  # the Llama recomputes activations


@pytest.mark.parametrize(
    ("loop", "name", "micro"),
    [(loop, *case) for loop in LOOPS for case in CASES if loop != "pytorch_lightning" or case == ("tiny", 2)],
)
def test_a_loop_has_the_counts_of_the_plain_loop(loop, name, micro):
    plain = plain_steps(name, micro)
    model = MODELS[name]()
    run = LOOPS[loop](name, model, micro, schedule=SECOND_AND_THIRD)
    assert len(run.steps) == len(plain.steps) == 2
    own = own_work(loop, model, micro)
    for step, plain_step in zip(run.steps, plain.steps, strict=True):
        modules, optimizer, found = costs_of(step, "net" if "lightning" in loop else "")
        plain_modules, plain_optimizer, plain_found = costs_of(plain_step)
        assert modules == plain_modules
        assert optimizer == plain_optimizer
        assert found == own
        assert not plain_found
    assert run.per_step().mean == plain.per_step().mean + own.total()
    assert not run.per_step().total.differs
    phases = {phase for _, phase in plain_modules}
    assert phases == ({"forward", "recompute", "backward"} if name == "llama" else {"forward", "backward"})
    assert installed() == NOTHING
    if name == "tiny":  # which records each micro-batch: only active steps are instrumented
        assert model.instrumented == [False] * micro + [True] * 2 * micro + [False] * micro


@pytest.mark.parametrize("micro", [1, 2])
def test_the_plain_loop_matches_a_count_by_hand(micro):
    run = run_plain("tiny", Tiny(), micro, schedule=SECOND_AND_THIRD)
    up, down = BATCH * WIDTH * INNER, BATCH * INNER * CLASSES
    # The first layer's input needs no gradient.
    macs = {"forward": up + down, "backward": up + 2 * down, "optimizer": 0}
    assert {phase: run.macs(phase=phase) for phase in macs} == {
        phase: 2 * micro * count for phase, count in macs.items()
    }
    # AdamW without decay takes 13 for each parameter (3 for each of two averages with their products, a root, a
    # quotient, a sum and 3 for the step) and a few for each tensor. What matters is that micro-batches add nothing.
    assert run.per_step().phases["optimizer"] == run_plain("tiny", Tiny(), 1).per_step().phases["optimizer"]


@pytest.mark.parametrize("loop", ["transformers", "lightning"])
def test_a_callback_records_the_first_three_steps_by_default(loop):
    model = Tiny()
    run = LOOPS[loop]("tiny", model, 1)
    assert model.instrumented == [True, True, True, False]
    assert run.per_step().steps == 3
    model = Tiny()
    assert LOOPS[loop]("tiny", model, 1, schedule=None).per_step().steps == STEPS
    assert all(model.instrumented)


def test_an_evaluation_of_the_trainer_is_in_no_step():
    options, model = {"table": "exact", "schedule": fvflops.schedule(active=1)}, Tiny()
    evaluation = {"eval_strategy": "steps", "eval_steps": 1}
    callback, _, train = prepare("transformers", "FlopsCallback", options, "tiny", model, micro=2, **evaluation)
    train()
    assert model.instrumented == ([True] * 2 + [False] * 2 * STEPS) * STEPS
    assert callback.recording.per_step() == LOOPS["transformers"]("tiny", Tiny(), 2, schedule=None).per_step()


def test_a_validation_of_lightning_is_in_no_step():
    options, model = {"table": "exact", "schedule": fvflops.schedule(active=1)}, Tiny()
    # After each batch, also between two micro-batches of a step.
    validation = {"limit_val_batches": 1, "val_check_interval": 1}
    callback, _, train = prepare("lightning", "FlopsCallback", options, "tiny", model, micro=2, **validation)
    train()
    assert len(model.instrumented) == 2 + 2 * 2 * STEPS - 1  # and one before the training begins
    assert callback.recording.per_step() == LOOPS["lightning"]("tiny", Tiny(), 2, schedule=None).per_step()


def test_an_epoch_of_lightning_can_end_within_a_step():
    options = {"table": "exact", "schedule": fvflops.schedule(active=1)}
    # The third batch ends the epoch: Lightning takes an optimizer step with this one micro-batch.
    callback, _, train = prepare("lightning", "FlopsCallback", options, "tiny", Tiny(), micro=2, limit_train_batches=3)
    train()
    forward = BATCH * (WIDTH * INNER + INNER * CLASSES)
    steps = [FlopCountAnalysis.from_trace(step, table="exact") for step in callback.recording.steps]
    assert [step.macs(phase="forward") for step in steps] == [2 * forward, forward, 2 * forward, forward]


def test_a_step_of_lightning_lasts_until_all_optimizers_of_a_batch_have_taken_one():
    lightning = import_package("lightning")

    class Two(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.first, self.second = Tiny(), Tiny()

        def training_step(self, batch, index):
            for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                self.manual_backward(net(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [make_optimizer(self.first), make_optimizer(self.second)]

        train_dataloader = staticmethod(lambda: make_loader("tiny", 3))

    lengths = {"max_steps": -1, "max_epochs": 1}
    callback, trainer, _ = prepare("lightning", "FlopsCallback", {"table": "exact"}, "tiny", Tiny(), **lengths)
    trainer.fit(Two())
    single = run_plain("tiny", Tiny(), 1).per_step()
    assert callback.recording.per_step().steps == 3
    assert callback.recording.per_step().mean == 2 * single.mean


@pytest.mark.parametrize("loop", LOOPS)
def test_an_exception_in_a_training_leaves_nothing_installed(loop):
    model = Tiny()
    model.fails_at = 5  # in the second micro-batch of the third step
    ready = []
    with pytest.raises(ArithmeticError, match="in the model"):
        LOOPS[loop]("tiny", model, 2, schedule=fvflops.schedule(active=1), on_trace_ready=ready.append)
    assert model.instrumented == [True] * 5
    assert installed() == NOTHING
    assert len(ready) == 2
    (run,) = set(ready)
    assert run.per_step().steps == 2
    assert not run.trace().complete
    # The third step's first micro-batch is counted with the rest.
    assert run.macs(phase="forward") == 5 * BATCH * (WIDTH * INNER + INNER * CLASSES)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("on_step_begin", ArithmeticError),
        ("on_pre_optimizer_step", KeyboardInterrupt),
        ("on_optimizer_step", ArithmeticError),
        ("on_step_end", ArithmeticError),
    ],
)
def test_an_exception_of_another_callback_of_the_trainer_leaves_nothing(event, error):
    from transformers import TrainerCallback

    def fail(self, args, state, control, **others):
        if state.global_step >= 2:
            raise error("in a callback")

    model, fails = Tiny(), type("Fails", (TrainerCallback,), {event: fail})()
    _, trainer, train = prepare("transformers", "FlopsCallback", {"table": "exact"}, "tiny", model, fails)
    with pytest.raises(error, match="in a callback"):
        train()
    assert any(model.instrumented)
    assert installed() == NOTHING
    assert not {"_run_epoch", "training_step"} & set(vars(trainer))


def test_a_training_after_one_that_failed_has_a_new_recording():
    model = Tiny()
    model.fails_at = 1
    callback, trainer, _ = prepare("transformers", "FlopsCallback", {"table": "exact"}, "tiny", model)
    with pytest.raises(TraceError, match="no training has started with this callback"):
        _ = callback.recording
    with pytest.raises(ArithmeticError):
        trainer.train()
    failed = callback.recording
    model.fails_at = -1
    trainer.train()
    assert callback.recording is not failed
    assert (failed.per_step().steps, callback.recording.per_step().steps) == (1, 3)
    assert installed() == NOTHING
    assert not {"_run_epoch", "training_step"} & set(vars(trainer))


def test_the_trainer_logs_the_flops_of_a_step():
    options = {"table": "exact", "schedule": SECOND_AND_THIRD}
    evaluation = {"eval_strategy": "steps", "eval_steps": STEPS}
    callback, trainer, train = prepare("transformers", "FlopsCallback", options, "tiny", Tiny(), **evaluation)
    train()
    flops = callback.recording.per_step().mean  # in `exact` a multiply-add is 2 FLOPs
    logged = [(entry["step"], entry.get("flops_per_step")) for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [(1, None), (2, flops), (3, flops), (4, flops)]
    assert [entry["flops_per_step"] for entry in trainer.state.log_history if "train_loss" in entry] == [flops]
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry and "flops_per_step" in entry]


def test_other_callbacks_receive_the_logged_flops_and_are_called_once_per_event():
    from transformers import TrainerCallback

    from fvflops.integrations.transformers import FlopsCallback

    class Reports(TrainerCallback):
        def __init__(self):
            self.begun = 0
            self.logged = []

        def on_train_begin(self, args, state, control, **others):
            self.begun += 1

        def on_log(self, args, state, control, logs=None, **others):
            self.logged.append("flops_per_step" in logs)

    before, after = Reports(), type("Others", (Reports,), {})()
    trainer = make_trainer("tiny", Tiny(), 1, before, FlopsCallback(), after)
    trainer.train()
    for callback in (before, after):
        assert (callback.begun, callback.logged) == (1, [True] * (STEPS + 1))


def test_lightning_logs_the_flops_of_a_step():
    seen = []

    class Observer(import_package("lightning").Callback):
        def on_train_batch_start(self, trainer, *others):
            seen.append(trainer.callback_metrics.get("flops_per_step"))

    options = {"table": "exact", "schedule": SECOND_AND_THIRD}
    callback, _, train = prepare("lightning", "FlopsCallback", options, "tiny", Tiny(), Observer())
    train()
    flops = callback.recording.per_step().mean
    assert seen == [None, None, flops, flops]


@pytest.mark.parametrize("table", ["default", "exact"])
def test_flops_in_a_log_are_two_for_a_multiply_add_whatever_the_table(table):
    callback, trainer, train = prepare("transformers", "FlopsCallback", {"table": table}, "tiny", Tiny())
    train()
    logged = next(entry for entry in trainer.state.log_history if "flops_per_step" in entry)
    macs = model_macs("tiny", 1)
    assert logged["macs_per_step"] == macs
    others = callback.recording.total() // 3 - (2 if table == "exact" else 1) * macs  # norms, losses, the optimizer
    assert logged["flops_per_step"] == 2 * macs + others
    assert {step.macs for step in callback.recording.per_step().each} == {macs}


def test_a_warning_names_unsupported_ops_once(caplog):
    class Scans(Tiny):
        def forward(self, x, labels):
            torch.ops.fvflops_integrations.scan(x)
            return super().forward(x, labels)

    with torch.library._scoped_library("fvflops_integrations", "FRAGMENT") as library:
        library.define("scan(Tensor x) -> Tensor")
        library.impl("scan", lambda x: x + 1, "CPU")
        with caplog.at_level("WARNING", "fvflops"):
            LOOPS["transformers"]("tiny", Scans(), 1)
    lines = [message for message in caplog.messages if "flops_per_step" in message]
    assert lines == ["flops_per_step does not include unsupported ops: fvflops_integrations::scan (1 call)"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_path_gets_the_trace_of_each_cycle(loop, tmp_path):
    folder = tmp_path / "runs" / "flops"
    file = folder / "rank0.json"
    sizes = []

    def ready(run):
        trace = Trace.from_json(file.read_text())
        sizes.append((len(run.steps), FlopCountAnalysis.from_trace(trace, table="exact").total() == run.total()))

    run = LOOPS[loop]("tiny", Tiny(), 1, schedule=fvflops.schedule(active=3), path=folder, on_trace_ready=ready)
    # The training ends in the middle of the second cycle.
    assert sizes == [(3, True), (4, True)]
    trace = Trace.from_json(file.read_text())
    assert FlopCountAnalysis.from_trace(trace, table="exact").by_phase() == run.by_phase()
    assert [path.name for path in folder.iterdir()] == ["rank0.json"]


def test_each_rank_writes_a_file_of_its_own(tmp_path):
    run_ranks("accelerate_worker", 2, tmp_path)
    files = sorted(tmp_path.glob("*.json"))
    assert [path.name for path in files] == ["rank0.json", "rank1.json"]
    for path in files:
        flops = FlopCountAnalysis.from_trace(Trace.from_json(path.read_text()))
        # Each rank has 2 of 4 batches of 2; module names do not include the data-parallel wrapper.
        assert {name: flops.macs(name, phase="forward") for name in ("0", "1")} == {"0": 2 * 64, "1": 2 * 48}


LIGHTNING = ["lightning", "lightning.pytorch", "pytorch_lightning"]


@pytest.mark.parametrize(
    ("integration", "libraries", "message"),
    [
        ("transformers", ["transformers"], "transformers is not installed.*: pip install transformers accelerate$"),
        ("lightning", LIGHTNING, r"lightning.pytorch is not installed.*: pip install lightning$"),
    ],
)
def test_a_library_that_is_not_installed_is_named(integration, libraries, message, monkeypatch):
    for name in libraries:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"fvflops.integrations.{integration}", raising=False)
    with pytest.raises(ImportError, match=message) as raised:
        __import__(f"fvflops.integrations.{integration}")
    assert "\n" not in str(raised.value)


def test_a_missing_dependency_of_a_library_is_reported(tmp_path, monkeypatch):
    from fvflops.integrations.loop import import_library

    (tmp_path / "fvflops_lacking.py").write_text("import fvflops_lacked")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'fvflops_lacked'"):
        import_library("fvflops_lacking", "fvflops_lacking")
    with pytest.raises(ImportError, match=r"^fvflops_lacked is not installed"):
        import_library("fvflops_lacked", "fvflops_lacked")


def test_a_model_with_a_submodule_called_module_is_no_wrapper():
    from accelerate import Accelerator

    from fvflops.integrations.accelerate import FlopsRecording

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Applied(lambda self, x: self.module(x), module=nn.Linear(3, 2)))
    with FlopsRecording(accelerator, model) as run:
        model(torch.ones(1, 3))
    assert run.by_module() == {"": 6, "module": 6}


def test_the_recording_of_accelerate_requires_an_accelerator():
    from fvflops.integrations.accelerate import FlopsRecording

    with pytest.raises(TypeError, match=r"must be an accelerate.Accelerator; got Linear"):
        FlopsRecording(nn.Linear(3, 2))


FIGURES = {"mfu", "hfu", "tflops_per_device", "samples_per_second", "model_flops", "hardware_flops", "macs"}
CHIP = fvflops.Device("chip", matrix={"fp32": 10**15})


@cache
def model_macs(name, micro):
    """Return the multiply-adds of forward and backward in a step of the plain loop, without recomputed ones."""
    entries = run_plain(name, MODELS[name](), micro).counts().entries
    model = [entry for entry in entries if entry.phase in ("forward", "backward")]
    return sum(entry.macs - entry.recomputed for entry in model) // STEPS


@pytest.mark.parametrize(
    ("name", "micro"), [("tiny", 1), ("llama", 2), pytest.param("llama", 1, marks=pytest.mark.long)]
)
def test_the_trainer_logs_the_metrics_of_its_steps(name, micro):
    model = MODELS[name]()
    options = {"device": CHIP, "expected": 1e-9}
    callback, trainer, train = prepare("transformers", "MeterCallback", options, name, model, micro=micro)
    train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    wanted = FIGURES | ({"tokens_per_second"} if name == "llama" else set())
    assert len(entries) == STEPS and all(wanted <= set(entry) for entry in entries)
    steps = callback.meter.steps
    assert [step.macs for step in steps] == [model_macs(name, micro)] * STEPS
    assert [step.samples for step in steps] == [BATCH * micro] * STEPS
    if name == "llama":  # whose activations are recomputed
        assert [step.tokens for step in steps] == [BATCH * micro * LENGTH] * STEPS
        assert all(step.hfu > step.mfu for step in steps)
    for figure in ("mfu", "unexplained"):
        assert [entry[figure] for entry in entries] == [pytest.approx(getattr(step, figure)) for step in steps]
    assert installed() == NOTHING and not model._forward_hooks


@pytest.mark.parametrize(
    ("loop", "name"), [("lightning", "tiny"), ("lightning", "llama"), ("pytorch_lightning", "tiny")]
)
def test_a_logger_of_lightning_receives_the_metrics(loop, name, tmp_path):
    logger = import_package(loop).loggers.CSVLogger(tmp_path)
    options, logging = {"device": CHIP}, {"logger": logger, "log_every_n_steps": 1}
    callback, _, train = prepare(loop, "MeterCallback", options, name, MODELS[name](), **logging)
    train()
    with open(logger.experiment.metrics_file_path) as file:
        rows = [row for row in csv.DictReader(file) if row.get("mfu")]
    wanted = FIGURES | ({"tokens_per_second"} if name == "llama" else set())
    assert len(rows) == STEPS and wanted <= set(rows[0])
    for row, step in zip(rows, callback.meter.steps, strict=True):
        assert {figure: float(row[figure]) for figure in wanted} == {
            figure: pytest.approx(getattr(step, figure), rel=1e-6) for figure in wanted
        }
        assert float(row["macs"]) == model_macs(name, 1) and step.samples == BATCH
    assert installed() == NOTHING


@pytest.mark.parametrize("loop", ["transformers", "lightning"])
def test_an_exception_leaves_no_meter_behind(loop):
    model = Tiny()
    model.fails_at = 2
    callback, trainer, train = prepare(loop, "MeterCallback", {"device": CHIP}, "tiny", model)
    with pytest.raises(TraceError, match="no training has started with this callback"):
        _ = callback.meter
    with pytest.raises(ArithmeticError, match="in the model"):
        train()
    assert [step.macs for step in callback.meter.steps] == [model_macs("tiny", 1)] * 2
    assert not model._forward_hooks and not model._forward_pre_hooks and installed() == NOTHING
    assert not {"_run_epoch", "training_step"} & set(vars(trainer))


@pytest.mark.parametrize("loop", ["transformers", "lightning"])
def test_an_unknown_device_does_not_stop_the_training(loop, caplog):
    callback, trainer, train = prepare(loop, "MeterCallback", {"device": "Imaginary 9000"}, "tiny", Tiny())
    train()
    if loop == "transformers":
        logged = [set(entry) for entry in trainer.state.log_history if "loss" in entry]
    else:
        logged = [set(trainer.callback_metrics)]
    assert [step.macs for step in callback.meter.steps] == [model_macs("tiny", 1)] * STEPS
    for names in logged:
        assert {"tflops_per_device", "samples_per_second", "macs"} <= names and not {"mfu", "hfu"} & names
    assert [message for message in caplog.messages if "'fvflops peak --output FILE.yaml' measures" in message]
    assert len(caplog.messages) == len(set(caplog.messages))


@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.parametrize(
    ("name", "wrong", "near"), [("FlopsCallback", "tables", "table"), ("MeterCallback", "devic", "device")]
)
def test_a_wrong_option_of_a_callback_is_named_before_a_training(library, name, wrong, near):
    callbacks = pytest.importorskip(f"fvflops.integrations.{library}")
    with pytest.raises(
        TypeError, match=rf"{name}\(.*: got an unexpected keyword argument '{wrong}': did you mean '{near}'"
    ):
        getattr(callbacks, name)(**{wrong: "default"})


def test_batches_of_many_lengths_are_counted_by_the_calls_of_a_lightning_module(monkeypatch):
    package = import_package("lightning")
    from fvflops.integrations.lightning import MeterCallback
    from fvflops.measure.step_meter import step_costs

    started = []
    start = step_costs.StepCosts.start_recording
    monkeypatch.setattr(step_costs.StepCosts, "start_recording", lambda self: started.append(1) or start(self))
    lengths = [2, 3, 5, 7, 8, 9, 11, 12]
    callback = MeterCallback(device=CHIP)
    trainer, module = make_lightning(package, "llama", make_llama(), callback, max_steps=len(lengths))
    batches = [dict.fromkeys(("input_ids", "labels"), torch.ones(BATCH, length).long()) for length in lengths]
    module.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    trainer.fit(module)
    assert len(started) == 1
    assert [step.tokens for step in callback.meter.steps] == [BATCH * length for length in lengths]
    for step, batch in zip(callback.meter.steps, batches, strict=True):
        with fvflops.record(None, warn=False) as run:
            module.net(**batch)["loss"].backward()
        entries = [entry for entry in run.counts().entries if entry.phase in ("forward", "backward")]
        assert step.macs == sum(entry.macs - entry.recomputed for entry in entries)


def test_total_flos_of_the_trainer_is_six_times_parameters_and_tokens():
    model = make_llama()
    callback, trainer, train = prepare("transformers", "MeterCallback", {"device": CHIP}, "llama", model)
    train()
    tokens = BATCH * LENGTH
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    norms = sum(value.numel() for name, value in model.named_parameters() if "norm" in name)
    assert trainer.state.total_flos == 6 * (linear + norms) * tokens * STEPS
    # The meter counts the products of attention too, 4 * rows * length^2 * width forward in each of 2 layers.
    attention = 3 * 2 * 4 * BATCH * LENGTH**2 * 8
    # Before transformers 5.19, the rotary angles of a head of size 4 are a product of 2 frequencies with all positions.
    angles = 2 * 2 * LENGTH if is_older("transformers", "5.19") else 0
    assert [2 * step.macs for step in callback.meter.steps] == [6 * linear * tokens + attention + angles] * STEPS


def test_training_with_evaluations_and_a_resumed_run_is_metered_as_usual(tmp_path):
    def train(steps, resume):
        saving = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 2}
        callback, trainer, _ = prepare("transformers", "MeterCallback", {"device": CHIP}, "tiny", Tiny(), **saving)
        trainer.args.output_dir, trainer.args.save_strategy, trainer.args.max_steps = str(tmp_path), "steps", steps
        trainer.train(resume_from_checkpoint=resume)
        return callback.meter.steps, [entry["step"] for entry in trainer.state.log_history if "mfu" in entry]

    first, logged = train(2, False)
    assert len(first) == 2 and logged == [1, 2]
    resumed, logged = train(STEPS, str(tmp_path / "checkpoint-2"))
    assert len(resumed) == STEPS - 2 and logged == [1, 2, 3, 4]
    assert {step.macs for step in (*first, *resumed)} == {model_macs("tiny", 1)}


def test_validations_of_lightning_are_in_no_metered_step():
    validation = {"limit_val_batches": 1, "val_check_interval": 1}
    callback, _, train = prepare("lightning", "MeterCallback", {"device": CHIP}, "tiny", Tiny(), micro=2, **validation)
    train()
    assert {step.macs for step in callback.meter.steps} == {model_macs("tiny", 1)}
    assert len(callback.meter.steps) == 2 * STEPS  # a metered step is a batch; an optimizer step has two


def test_accelerate_is_metered_as_a_plain_loop():
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "list", False, None
        logged: ClassVar[list[dict[str, float]]] = []

        @on_main_process
        def log(self, values, step=None, **others):
            self.logged.append(values)

    accelerator = Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("loop")
    tiny = Tiny()
    model, optimizer, loader = accelerator.prepare(tiny, make_optimizer(tiny), make_loader("tiny", STEPS))
    with fvflops.StepMeter(model, optimizer=optimizer, device=CHIP) as meter:
        for batch in loader:
            with meter.step():
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log(meter.last.as_dict())
    steps = meter.steps
    assert [step.macs for step in steps] == [model_macs("tiny", 1)] * STEPS
    assert [values["mfu"] for values in Tracker.logged] == [step.mfu for step in steps]
    assert all(set(values) >= FIGURES for values in Tracker.logged)
    assert all(step.hardware_flops >= step.model_flops for step in steps)
    assert installed() == NOTHING
