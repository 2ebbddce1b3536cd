"""What lowers the peak memory of a step, tensors on the host among it, and whether memory fits a device."""

import json
import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fvflops import (
    FlopCountAnalysis,
    TrainingStepAnalysis,
    find_device,
    memory_savings,
    plan_rank,
    predict_memory,
    search_layouts,
)
from fvflops.cli import main
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.memory.offload import host_gradients
from fvflops.plan.memory.step_settings import Verdict
from fvflops.plan.plans import plan_savings
from fvflops.plan.step_time.step_time_report import judge
from fvflops.trace import TraceError
from fvflops.zoo import build
from tests.support.measured_memory import measure_steps
from tests.support.models.parts import Applied, Parts
from tests.support.old_torch import needs

ROWS, WIDTH, HIDDEN, BLOCKS = 1024, 32, 128, 4


def loss_of(result):
    return result.square().mean()  # torch.sum has an expanded gradient, of which kernels make copies


SGD = partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(x)


def step_of(model=None, inputs=None, **options):
    inputs = torch.ones(ROWS, WIDTH) if inputs is None else inputs
    return TrainingStepAnalysis(Net() if model is None else model, inputs, loss=loss_of, **options)


def saving_of(savings, change, name):
    return next(
        saving for saving in (*savings.changes, *savings.useless) if (saving.change, saving.name) == (change, name)
    )


def measure(model, inputs):
    """Return the most bytes that the second step of a program takes."""
    optimizer = SGD(model.parameters())

    def step():
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        optimizer.step()

    measured = measure_steps(step, 2)[1]
    model.zero_grad()
    return measured


def test_a_checkpoint_saves_what_it_saves_in_a_real_step():
    model, inputs = Net(), torch.ones(ROWS, WIDTH)
    predicted = saving_of(memory_savings(step_of(model, inputs, optimizer=SGD)), "checkpoint", "Block").saved
    plain = measure(model, inputs)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    states = BLOCKS * torch.get_rng_state().nbytes  # which torch.utils.checkpoint keeps
    assert predicted == plain - measure(model, inputs) + states
    # The two tensors of HIDDEN columns that each block saves, but for the block whose backward pass runs.
    assert predicted == (BLOCKS - 1) * 2 * ROWS * HIDDEN * 4


def test_a_checkpoint_costs_the_flops_that_are_recomputed():
    step = step_of(table="default")
    saving = saving_of(memory_savings(step), "checkpoint", "Block")
    assert saving.modules == tuple(f"blocks.{index}" for index in range(BLOCKS))
    # Recomputation ends when the last saved tensor is there: the second Linear is not run again.
    assert saving.flops == BLOCKS * ROWS * WIDTH * HIDDEN
    changed = step.varied(checkpoint=saving.modules)
    assert saving.flops == sum(changed.by_phase()["recompute"].values())
    assert saving.peak == predict_memory(changed).peak == predict_memory(step).peak - saving.saved


def test_in_half_the_bytes_all_is_half_as_large():
    savings = memory_savings(step_of(Net().double().float(), optimizer=partial(torch.optim.AdamW, fused=True)))
    saving = saving_of(savings, "dtype", "bfloat16")
    counts = 2 * 4 * 4 * BLOCKS  # steps of AdamW stay in float32: 4 parameters in each block
    assert saving.peak == pytest.approx(savings.peak / 2, abs=counts) and saving.flops == 0


class InAutocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_autocast_is_that_of_a_model_which_uses_it():
    saving = saving_of(memory_savings(step_of(optimizer=SGD)), "autocast", "bfloat16")
    used = predict_memory(step_of(InAutocast(), optimizer=SGD))
    assert saving.peak == used.peak and saving.saved > 0
    on_cuda = memory_savings(step_of(device="cuda"))
    assert on_cuda.untried == () and saving_of(on_cuda, "autocast", "bfloat16")
    mixed = memory_savings(step_of(device="cuda", autocast=torch.bfloat16))
    assert "autocast" not in {saving.change for saving in (*mixed.changes, *mixed.useless)}
    halves = [saving_of(savings, "dtype", "bfloat16").peak for savings in (on_cuda, mixed)]
    assert halves[0] == halves[1] and not mixed.failed
    tokens, model = torch.ones(2, 16, dtype=torch.int64), build("llama_tiny", device="meta").train()
    rank = plan_savings(model, (tokens,), mesh={"fsdp": 2}, precision="bf16-mixed")
    assert saving_of(rank, "dtype", "bfloat16").saved > 0


@pytest.mark.parametrize("as_instance", [False, True])
def test_a_cheaper_optimizer_saves_its_state(as_instance):
    model = Net()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    create = partial(torch.optim.AdamW, fused=True)
    savings = memory_savings(step_of(model, optimizer=create(model.parameters()) if as_instance else create))
    assert saving_of(savings, "optimizer", "SGD with momentum").saved == parameters + 4 * 4 * BLOCKS
    adafactor = saving_of(savings, "optimizer", "Adafactor")
    assert adafactor.saved > 1.8 * parameters and adafactor.flops > 0
    assert not savings.failed and not any("fused" in saving.name for saving in savings.changes)
    assert saving_of(savings, "dtype", "bfloat16").saved > 0


def test_a_fused_optimizer_has_no_temporaries():
    savings = memory_savings(step_of(inputs=torch.ones(1, WIDTH), optimizer=torch.optim.AdamW))
    saving = saving_of(savings, "optimizer", "AdamW(fused=True)")
    fused = predict_memory(step_of(inputs=torch.ones(1, WIDTH), optimizer=partial(torch.optim.AdamW, fused=True)))
    assert saving.saved > 0 and saving.peak == fused.peak


def test_without_an_optimizer_none_is_tried():
    savings = memory_savings(step_of())
    assert {saving.change for saving in (*savings.changes, *savings.useless)} == {"checkpoint", "dtype", "autocast"}


def test_changes_are_ordered_and_split_by_what_they_save():
    savings = memory_savings(step_of(inputs=torch.ones(1, WIDTH), optimizer=SGD))
    assert [saving.saved for saving in savings.changes] == sorted((s.saved for s in savings.changes), reverse=True)
    assert all(saving.saved > 0 for saving in savings.changes)
    assert all(saving.saved <= 0 for saving in savings.useless)
    assert ("checkpoint", "Block") in {(saving.change, saving.name) for saving in savings.useless}


def test_what_is_checkpointed_already_is_not_tried_again():
    savings = memory_savings(step_of(checkpoint=[Block]))
    assert "Block" not in {saving.name for saving in (*savings.changes, *savings.useless)}
    half = memory_savings(step_of(checkpoint=["blocks.0", "blocks.1"]))
    assert saving_of(half, "checkpoint", "Block").peak == savings.peak


def test_a_class_within_itself_is_checkpointed_once():
    class Nested(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.inner = Nested(depth - 1) if depth else nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x).relu()

    model = nn.Sequential(Nested(2), Nested(1))
    savings = memory_savings(step_of(model, torch.ones(4, 8)))
    assert saving_of(savings, "checkpoint", "Nested").modules == ("0", "1")


class Joins(Parts):
    """Takes a list that grows after the call, so that a recomputation sees another input."""

    def forward(self, results):
        return self.fc(torch.cat(results, 1))


def dense(self, x):
    results = [x]
    for join in self.joins:
        results.append(join(results))
    return results[-1]


def test_what_torch_refuses_is_listed_with_its_error():
    model = Applied(dense, joins=nn.ModuleList(Joins(fc=nn.Linear(8 * number, 8)) for number in (1, 2, 3)))
    savings = memory_savings(step_of(model, torch.ones(2, 8)))
    for join in model.joins:
        join.forward = partial(checkpoint, join.forward, use_reentrant=False)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 8)).sum().backward()
    assert str(caught.value).split(":")[0] in savings.failed["checkpoint Joins"]
    assert saving_of(savings, "dtype", "bfloat16").saved > 0


def test_the_model_is_as_it_was():
    model = Net()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    memory_savings(step_of(model, optimizer=torch.optim.AdamW))
    assert all(before[name][0] is parameter for name, parameter in model.named_parameters())
    assert all(torch.equal(parameter, before[name][1]) for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_signal_ends_it():
    def ring(*_):
        raise TimeoutError("time is over")

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError, match="time is over"):
            for _ in range(100):
                memory_savings(step_of(Net(8), optimizer=torch.optim.AdamW))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_a_trace_has_no_model():
    trace = step_of().trace()
    with pytest.raises(TraceError, match="memory savings need a model"):
        memory_savings(TrainingStepAnalysis.from_trace(trace))
    assert FlopCountAnalysis.from_trace(trace).total() == step_of().total()


@needs("plan and sharded memory")
def test_a_rank_of_a_mesh_has_savings_too():
    model, tokens = build("llama_tiny", device="meta"), (torch.ones(4, 64, dtype=torch.int64),)
    options = {"mesh": {"fsdp": 2}, "optimizer": torch.optim.AdamW, "table": "exact"}
    savings = plan_savings(model, tokens, **options)
    saving = saving_of(savings, "checkpoint", "Block")
    assert saving.modules == ("layers.0", "layers.1") and saving.saved > 0 and saving.flops > 0
    checkpointed = plan_rank(model, tokens, checkpoint=saving.modules, **options)
    assert checkpointed.memory().peak == saving.peak
    assert checkpointed.flops("exact").total() == savings.flops + saving.flops


BOTH = ("optimizer", "gradients")


def adamw(parameters):
    return MasterWeights(parameters, torch.optim.AdamW)


def plan(**options):
    tokens = torch.ones(1, 16, dtype=torch.int64)
    return plan_rank(build("llama_tiny", device="meta").bfloat16(), tokens, optimizer=adamw, **options)


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_are_those_of_deepspeeds_formulas(ranks):
    """ZeRO-2 with offload: 2 bytes a parameter on each GPU, 16 a parameter of the rank's share on the host."""
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    mesh = {"fsdp": ranks} if ranks > 1 else {"dp": 1}
    kept, sent = (plan(mesh=mesh, offload=offload) for offload in ((), BOTH))
    plain, offloaded = kept.memory(granularity=1), sent.memory(granularity=1)
    parameters = kept.model_parameters
    host, gpu = zero.estimate_zero2_model_states_mem_needs(
        parameters, num_gpus_per_node=ranks, cpu_offload=True, additional_buffer_factor=1
    )
    by_kind = offloaded.at(-1).by_kind
    share = 1 / ranks if ranks > 1 else 1
    assert by_kind["parameter"] == pytest.approx(gpu * share, rel=0.01)  # FSDP2 shards what ZeRO-2 keeps whole
    assert set(by_kind) <= {"parameter", "buffer", "input", "communication"}
    recorded = kept.recorded_memory()
    state = sum(block.nbytes for block in plain.blocks if block.kind == "optimizer state" and block.end is None)
    on_host = state + host_gradients(recorded)
    assert on_host * ranks == pytest.approx(host, rel=0.01)
    assert plain.peak - offloaded.peak > 0.9 * state


def perceptron():
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers)


def test_activations_are_on_the_device_as_with_save_on_cpu():
    def forward(self, x):
        with save_on_cpu():
            return self.body(x)

    def predict(model, *offload):
        step = TrainingStepAnalysis(model.to("meta"), torch.ones(512, 64), loss=torch.sum, device="cuda")
        return predict_memory(step, granularity=1, offload=offload)

    def first(timeline, phase):
        return next(index for index, event in enumerate(timeline.trace.events) if event.phase == phase)

    plain, offloaded, recorded = (
        predict(perceptron()),
        predict(perceptron(), "activations"),
        predict(Applied(forward, body=perceptron())),
    )
    before = [timeline.at(first(timeline, "backward")).by_kind["activation"] for timeline in (offloaded, recorded)]
    assert before[1] - 4 <= before[0] <= before[1] < plain.at(first(plain, "backward")).by_kind["activation"] / 100
    # torch brings back the weights that it has saved, too; they are parameters, which are on the device anyway.
    assert recorded.peak - 64 * 64 * 4 <= offloaded.peak <= recorded.peak < plain.peak


def test_checkpoints_offloaded_are_on_the_device_one_layer_at_a_time():
    options = {"mesh": {"dp": 1}, "checkpoint": "full"}
    peaks = [
        plan(**options, offload=offload).memory().peak for offload in ((), ("activations",), (*BOTH, "activations"))
    ]
    assert peaks[0] >= peaks[1] > peaks[2]


def test_the_commands_say_what_is_where(capsys):
    model = ("zoo:llama_tiny", "--input", "1,16:int64", "--device", "H100")
    for command in (("memory", *model, "--no-savings"), ("plan", *model, "--mesh", "fsdp=2")):
        assert main([*command, "--offload", "optimizer", "--offload", "gradients"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "offload: optimizer, gradients" in text and "n the host: " in text and "of transfers to the host" in text
        assert main([*command, "--offload", "gradients"]) == 2
        assert "gradients are offloaded with the optimizer" in capsys.readouterr().err
    needed = []
    for offload in ((), ("--offload", "optimizer")):
        assert main(["plan", *model, "--mesh", "fsdp=2", *offload, "--format", "json"]) == 0
        needed.append(json.loads(capsys.readouterr().out)["ranks"][0]["peak_memory"])
    assert needed[1] < needed[0]


GB = 10**9


@pytest.mark.parametrize(
    ("needed", "memory", "reserve", "fits", "expected"),
    [
        (80 * GB, 80e9, 0, True, "Fits: 80 GB of 80 GB. 0 B are left on a card."),
        (60 * GB, 80e9, GB, True, "Fits: 60 GB of 80 GB. 19 GB are left on a card, where 1 GB are set aside for NCCL"),
        (80 * GB, 80e9, GB, False, "Does not fit: 80 GB of 80 GB. That is 1 GB too much for a card, where 1 GB are "),
        (81 * GB, 80e9, 0, False, "Does not fit: 81 GB of 80 GB. That is 1 GB too much for a card. Try less."),
        (81 * GB, None, 0, None, "Needs 81 GB: the memory of a card is not known. Try less."),
    ],
)
def test_a_verdict(needed, memory, reserve, fits, expected):
    verdict = Verdict(needed, "a card", memory, reserve, "NCCL" if reserve else "", "Try less.")
    assert verdict.fits is fits and str(verdict).startswith(expected)
    data = verdict.encode()
    assert (data["text"], data["fits"], data["needed"], data["memory"]) == (str(verdict), fits, needed, memory)
    assert str(Verdict(81 * GB)) == "Needs 81 GB: no device is named."


def test_a_device_of_unknown_memory_says_in_which_sizes_it_is_made():
    text = str(judge(GB, find_device("V100"), {}))
    assert text.endswith("is not known. It is made with 16 and with 32 GB, which have names of their own.")
    assert str(judge(GB, find_device("V100 16GB"), {}, advice="Try less.")).startswith("Fits: 1 GB of 16.9 GB.")


def test_tensors_that_fit_without_cached_blocks_are_said():
    text = str(Verdict(81 * GB, "a card", 80e9, GB, tensors=79 * GB))
    assert "The tensors alone, 79 GB, fit: if torch's allocator frees cached blocks in time, the step" in text
    assert "tensors" not in str(Verdict(81 * GB, "a card", 80e9, 2 * GB, tensors=79 * GB))


class _Rerun(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "checkpoint", "expected"),
    [(_Rerun(), [], "the model's own"), (_Rerun().layer, [], "none"), (_Rerun().layer, ["0"], "Linear × 1")],
)
def test_checkpoints_of_the_model_itself_are_named(model, checkpoint, expected):
    x = torch.ones(2, 8, requires_grad=True)
    step = TrainingStepAnalysis(model, x, loss=torch.sum, checkpoint=checkpoint)
    assert predict_memory(step).settings["checkpointing"] == expected
    plan = plan_rank(model, x, mesh={"dp": 2}, loss=torch.sum, checkpoint=checkpoint)
    assert plan.memory().settings["checkpointing"] == expected


@pytest.mark.parametrize(("model", "expected"), [(_Rerun(), "the model's own"), (_Rerun().layer, "none")])
def test_a_search_names_checkpoints_of_the_model_itself(model, expected):
    few = {"tp": [1], "pp": [1], "micro-batch": [1], "dp": [1], "checkpoint": ["full", "none"]}
    search = search_layouts(
        model, torch.ones(1, 8), gpus=2, global_batch=2, device="H100", loss=torch.sum, choices=few, jobs=1
    )
    settings = {result.candidate.checkpoint: search.settings_of(result.candidate) for result in search.results}
    assert {name: found["checkpointing"] for name, found in settings.items()} == {"none": expected, "full": "full"}
    assert ("checkpointing: the model's own" in " ".join(str(search).split())) is (expected != "none")


def test_a_plan_without_an_optimizer_says_so(capsys):
    for options, expected in ((["--optimizer", "none"], True), ([], False)):
        assert main(["plan", "zoo:llama_tiny", "--mesh", "fsdp=2", *options]) == 0
        assert ("No optimizer is included." in capsys.readouterr().out) is expected
