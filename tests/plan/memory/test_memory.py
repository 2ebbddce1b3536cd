"""The predicted memory: hand counts, what they must obey, and what the CPU's allocator says."""

import gc
import weakref
from functools import partial
from queue import Queue
from threading import Thread

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fvflops import FlopCountAnalysis, Trace, TrainingStepAnalysis, predict_memory, record, record_call
from fvflops.plan.memory.storage_lifetimes import KINDS, read_memory
from fvflops.plan.memory.workspaces import workspace_of
from fvflops.trace import Signature, TensorSpec, TraceError
from fvflops.zoo import build
from tests.support.measured_memory import compare_forward, compare_steps
from tests.support.models.mixed_precision_adam import MixedPrecisionAdam
from tests.support.models.parts import Applied, Parts
from tests.support.old_torch import VERSION

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCH, ITEM = 5, 4  # rows of the input, bytes of a float

# Of `perceptron`: 8 → 16 → 16 → 4.
WEIGHTS = {"0": 8 * 16 + 16, "2": 16 * 16 + 16, "4": 16 * 4 + 4}
PARAMETERS = ITEM * sum(WEIGHTS.values())
INPUT = ITEM * BATCH * 8
HIDDEN = ITEM * BATCH * 16  # what each hidden layer gives
RESULT = ITEM * BATCH * 4
SCALAR = ITEM  # the loss, or its gradient


def perceptron(inplace=False):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace), nn.Linear(16, 16), nn.ReLU(inplace), nn.Linear(16, 4))


def predict_step(model=None, inputs=None, **options):
    inputs = torch.ones(BATCH, 8) if inputs is None else inputs
    step = TrainingStepAnalysis(perceptron() if model is None else model, inputs, loss=torch.sum, **options)
    return predict_memory(step, first_step=True)


def first_op(timeline, phase):
    return next(at for at, event in enumerate(timeline.trace.events) if (event.kind, event.phase) == ("op", phase))


def made(timeline, kind):
    return sum(block.nbytes for block in timeline.blocks if block.kind == kind)


def test_a_forward_pass_holds_what_a_layer_reads_and_what_it_makes():
    timeline = predict_memory(FlopCountAnalysis(perceptron(), torch.ones(BATCH, 8)))
    assert timeline.baseline == PARAMETERS + INPUT
    moment = timeline.at_peak()
    assert moment.nbytes == timeline.peak == timeline.baseline + 2 * HIDDEN
    assert moment[1:4] == ("aten::relu", "1", "forward")
    assert moment.by_kind == {"parameter": PARAMETERS, "input": INPUT, "temporary": 2 * HIDDEN}


def test_backward_finds_the_activations_that_the_layers_saved():
    timeline = predict_step()
    moment = timeline.at(first_op(timeline, "backward"))
    # Each ReLU saves its result, which the next Linear reads too; the loss is the program's.
    assert moment.by_kind["activation"] == 2 * HIDDEN + 2 * SCALAR
    assert moment.by_kind["gradient"] == 0


def test_the_peak_of_a_backward_pass():
    timeline = predict_step()
    gradients = ITEM * (WEIGHTS["4"] + WEIGHTS["2"])
    # The program's first ReLU result and loss, gradients of two layers, and of the second Linear's input and output.
    assert timeline.peak - timeline.baseline == HIDDEN + 2 * SCALAR + gradients + 2 * HIDDEN
    assert timeline.at_peak()[1:4] == ("aten::sum.dim_IntList", "2", "backward")


def test_the_optimizer_adds_its_state_to_the_gradients():
    timeline = predict_step(optimizer=SGD)
    moment = timeline.at_peak()
    assert moment[1:4] == ("aten::clone", "", "optimizer")
    assert moment.by_kind == {
        "parameter": PARAMETERS,
        "input": INPUT,
        "gradient": PARAMETERS,
        "optimizer state": PARAMETERS,
    }
    assert moment.by_module["2"] == 3 * ITEM * WEIGHTS["2"]
    assert moment.by_module[""] == moment.nbytes == timeline.peak


def test_an_optimizer_that_takes_all_parameters_at_once_needs_as_much_again():
    moment = predict_step(optimizer=partial(torch.optim.AdamW, foreach=True)).at_peak()
    assert moment.op == "aten::_foreach_sqrt" and moment.nbytes == 9864
    if VERSION >= (2, 11):  # before, they live until the step has returned, as state does
        assert moment.by_kind["temporary"] == PARAMETERS


def test_in_a_later_step_the_states_are_there_from_the_start():
    step = TrainingStepAnalysis(perceptron(), torch.ones(BATCH, 8), loss=torch.sum, optimizer=SGD)
    first, later = predict_memory(step, first_step=True), predict_memory(step)
    assert later.baseline == first.baseline + PARAMETERS
    assert later.by_phase()["backward"] == first.by_phase()["backward"] + PARAMETERS
    assert later.by_phase()["optimizer"] == first.by_phase()["optimizer"] == first.peak
    assert later.at_peak().phase == "backward"


def test_another_thread_may_free_a_tensor_during_an_optimizer_step():
    held, requests, done = [], Queue(), Queue()

    def free():  # as a process group's thread does
        while requests.get():
            held.clear()
            done.put(True)

    class Freeing(MixedPrecisionAdam):
        def update(self, parameter, rate):
            held.append(torch.ones(3) * 2)
            requests.put(True)
            done.get()
            super().update(parameter, rate)

    Thread(target=free, daemon=True).start()  # before the recording, which records threads that start in it
    model = perceptron()
    optimizer = Freeing(model.parameters())
    with record(model) as run:
        model(torch.ones(BATCH, 8)).sum().backward()
        optimizer.step()
    requests.put(False)
    assert made(predict_memory(run), "optimizer state") == 2 * PARAMETERS  # of float parameters the copy is a view


def test_states_that_were_there_before_are_states():
    model = perceptron()
    optimizer = SGD(model.parameters())
    model(torch.ones(BATCH, 8)).sum().backward()
    optimizer.step()
    first = predict_step(model, optimizer=SGD)
    later = predict_step(model, optimizer=optimizer)
    assert made(later, "optimizer state") == made(first, "optimizer state") == PARAMETERS
    assert later.baseline == first.baseline + PARAMETERS
    with record(model) as run:
        optimizer.step()
    timeline = predict_memory(run)
    assert {kind: made(timeline, kind) for kind in ("gradient", "optimizer state")} == {
        "gradient": PARAMETERS,
        "optimizer state": PARAMETERS,
    }


def test_micro_batches_run_beside_the_gradients_of_the_first():
    one, two = predict_step(), predict_step(micro_batches=2)
    assert one.by_phase()["forward"] == one.baseline + 3 * HIDDEN
    assert two.by_phase()["forward"] == one.by_phase()["forward"] + PARAMETERS
    assert made(two, "gradient") == PARAMETERS  # the second's are added to them


def test_a_frozen_layer_has_no_gradient():
    model = perceptron()
    model[0].requires_grad_(False)
    timeline = predict_step(model)
    assert made(timeline, "gradient") == PARAMETERS - ITEM * WEIGHTS["0"]
    assert timeline.at(first_op(timeline, "backward")).by_kind["activation"] == 2 * HIDDEN + 2 * SCALAR
    model[2].requires_grad_(False)
    timeline = predict_step(model)  # nothing asks for the first layer's result any more
    assert timeline.at(first_op(timeline, "backward")).by_kind["activation"] == HIDDEN + 2 * SCALAR


def test_an_op_in_place_takes_no_memory():
    timeline = predict_step(perceptron(inplace=True))
    assert timeline.by_phase()["forward"] == timeline.baseline + 2 * HIDDEN + RESULT + SCALAR
    assert timeline.at(first_op(timeline, "backward")).by_kind["activation"] == 2 * HIDDEN + 2 * SCALAR


def test_views_share_their_storage():
    timeline = read_memory(record_call(lambda x: (x * 2).t()[1:].unsqueeze(0).expand(7, 3, 3), (torch.ones(3, 4),)))
    assert timeline.peak == timeline.baseline + made(timeline, "temporary") == 2 * ITEM * 12


def test_a_tied_weight_is_there_once():
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
    model[1].weight = model[0].weight
    timeline = predict_step(model, torch.ones(2, 3, dtype=torch.int64))
    assert made(timeline, "parameter") == made(timeline, "gradient") == ITEM * 60
    assert made(timeline, "input") == 8 * 6


def test_a_checkpoint_keeps_what_goes_in():
    width, blocks = 16, 4

    def model():
        block = [
            nn.Sequential(nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width)) for _ in range(blocks)
        ]
        return nn.Sequential(*block, nn.Linear(width, 2))

    inputs = torch.ones(64, width)
    plain = predict_step(model(), inputs)
    checkpointed = predict_step(model(), inputs, checkpoint=[str(index) for index in range(blocks)])
    inner = ITEM * 64 * 8 * width  # the ReLU's result in a block, which is not kept
    saved = [run.at(first_op(run, "backward")).by_kind["activation"] for run in (plain, checkpointed)]
    assert saved[0] - saved[1] == blocks * inner
    # One block's is there again when its backward pass begins, those after it having been used up.
    begins = first_op(checkpointed, "recompute")
    assert max(checkpointed.curve("activation")[begins:]) <= saved[1] + inner
    assert max(checkpointed.curve("activation")[begins:]) > inner
    assert checkpointed.peak < plain.peak


def test_torch_adds_gradients_in_place_though_a_recording_shows_a_new_tensor():
    model, inputs = (
        nn.Sequential(nn.Linear(8, 8), Applied(lambda self, x: x + self.inner(x).relu(), inner=nn.Linear(8, 8))),
        torch.ones(BATCH, 8),
    )
    timeline = predict_memory(TrainingStepAnalysis(model, inputs, loss=lambda result: (result * result).sum()))
    events, totals = timeline.trace.events, timeline.curve()
    sums = {
        index: event
        for index, event in enumerate(events)
        if (event.kind, event.phase) == ("op", "backward")
        and timeline.trace.signatures[event.item].op == "aten::add.Tensor"
    }
    assert len(sums) == 2  # of the result's two gradients as a factor, and of the block's input's
    for index, event in sums.items():
        assert not set(event.writes) & set(event.reads)
        assert totals[index + 1] == totals[index]


def test_autocast_keeps_its_copies_of_weights_for_the_backward_pass():
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                x = self.layer(x)
        return x

    timeline = predict_step(Applied(forward, layer=nn.Linear(8, 8, bias=False)), torch.ones(BATCH, 8), optimizer=SGD)
    moment = timeline.at(first_op(timeline, "backward"))
    half = ITEM // 2
    # One copy of the weight for three calls, one of the input, two saved results, the loss and its gradient.
    assert moment.by_kind["activation"] == half * (8 * 8 + BATCH * 8 * (1 + 2) + 2)
    assert timeline.at_peak().by_kind["parameter"] == ITEM * 8 * 8


def test_32_bit_copies_made_by_the_constructor_exist_before_the_first_step():
    class Copies(torch.optim.SGD):
        def __init__(self, params):
            self.halves = list(params)
            super().__init__([half.detach().float() for half in self.halves], lr=0.1, momentum=0.9)

        @torch.no_grad()
        def step(self):
            copies = self.param_groups[0]["params"]
            for copy, half in zip(copies, self.halves, strict=True):
                copy.grad = half.grad.float()
            super().step()
            for copy, half in zip(copies, self.halves, strict=True):
                half.copy_(copy)
                copy.grad = None

    inputs = torch.ones(BATCH, 8, dtype=torch.bfloat16)
    for make in (perceptron, lambda: perceptron().to("meta")):
        step = TrainingStepAnalysis(make().bfloat16(), inputs, loss=torch.sum, optimizer=Copies)
        first, later = predict_memory(step, first_step=True), predict_memory(step)
        assert first.at(-1).by_kind["optimizer state"] == PARAMETERS
        assert later.at(-1).by_kind["optimizer state"] == 2 * PARAMETERS
        assert first.peak == first.by_phase()["optimizer"]


def test_offloaded_activations_are_on_the_host():
    class Offloading(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()

        def forward(self, x):
            with save_on_cpu(pin_memory=False):
                return self.body(x)

    def predict(model, device):
        with torch.device("meta"):
            model = model()
        step = TrainingStepAnalysis(model, torch.ones(BATCH, 8), loss=torch.sum, device=device)
        return predict_memory(step, granularity=1)

    offloaded, plain = predict(Offloading, "cuda"), predict(perceptron, "cuda")
    host = predict_memory(offloaded.trace, device="cpu")
    at = first_op(offloaded, "backward")
    # Saved are each ReLU's result, by it and by the next layer, and the weights of the later layers, transposed.
    assert (host.baseline, host.at(at).by_kind) == (0, {"activation": 4 * HIDDEN + ITEM * (16 * 16 + 16 * 4)})
    assert offloaded.at(at).by_kind["activation"] == 2 * SCALAR
    assert plain.at(first_op(plain, "backward")).by_kind["activation"] == 2 * HIDDEN + 2 * SCALAR
    with pytest.raises(ValueError, match="this run used no memory on 'cpu'"):
        predict_memory(plain.trace, device="cpu")
    assert predict(Offloading, "cpu").device == "cpu"  # where the copies are made too


def test_a_storage_that_is_freed_and_allocated_again_has_two_lives():
    def run(x):
        buffer = torch.empty_like(x)
        buffer.copy_(x)
        y = buffer.sum()
        storage = buffer.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        y = y * 2
        assert storage.nbytes() == 0
        storage.resize_(nbytes)
        buffer.copy_(x)
        return buffer.sum() + y

    x = torch.ones(1000)
    for execution in ("shapes", "real"):
        timeline = read_memory(record_call(run, (x,), execution=execution))
        ops = [
            timeline.trace.signatures[event.item].op if event.kind == "op" else "" for event in timeline.trace.events
        ]
        between = timeline.at(ops.index("aten::mul.Tensor"))
        first, second = (block for block in timeline.blocks if block.nbytes == x.nbytes and block.kind == "temporary")
        assert first.end < between.event < second.begin, execution
        assert between.nbytes - timeline.baseline <= 2 * SCALAR
        assert timeline.peak - timeline.baseline <= x.nbytes + 3 * SCALAR


def test_memory_on_cuda_is_handed_out_in_blocks():
    step = TrainingStepAnalysis(perceptron(), torch.ones(BATCH, 8), loss=torch.sum, optimizer=SGD, device="cuda")
    timeline = predict_memory(step)
    assert (timeline.device, timeline.granularity) == ("cuda:0", 512)
    assert {block.nbytes for block in timeline.blocks if block.kind == "parameter"} == {512, 1024}
    assert made(timeline, "parameter") == 7 * 512  # of 1,024 bytes one, and of up to 512 five
    exact = predict_memory(step, granularity=1)
    assert made(exact, "parameter") == made(exact, "gradient") == PARAMETERS
    for block, rounded in zip(exact.blocks, timeline.blocks, strict=True):
        assert 0 <= rounded.nbytes - block.nbytes < 512 and rounded.nbytes % 512 == 0


@pytest.mark.parametrize("name", ["llama_tiny", "lenet5"])
def test_kinds_and_modules_add_up_at_every_event(name):
    inputs = torch.ones(2, 1, 28, 28) if name == "lenet5" else torch.ones(2, 9, dtype=torch.int64)
    timeline = predict_memory(TrainingStepAnalysis(build(name), inputs, loss=torch.sum, optimizer=torch.optim.AdamW))
    curves = [timeline.curve(kind) for kind in KINDS]
    assert tuple(map(sum, zip(*curves, strict=True))) == timeline.curve()
    assert max(timeline.by_phase().values()) == timeline.peak == max(timeline.curve())
    for event in range(-1, len(timeline.trace.events), 97):
        moment = timeline.at(event)
        assert moment.nbytes == timeline.curve()[event + 1] == sum(moment.by_kind.values()) == moment.by_module[""]


def test_a_model_without_weights_needs_as_much():
    tokens = torch.ones(2, 9, dtype=torch.int64)
    here, meta = (
        predict_step(build("llama_tiny", device=device), tokens, optimizer=torch.optim.AdamW)
        for device in ("cpu", "meta")
    )
    assert here.curve() == meta.curve()


def test_a_trace_that_was_saved_tells_the_same():
    timeline = predict_step(optimizer=SGD)
    again = predict_memory(Trace.from_json(timeline.trace.to_json()), first_step=True)
    assert again.curve() == timeline.curve() and again.at_peak() == timeline.at_peak()


def test_what_a_composite_op_hides_is_told_or_looked_into():
    model, inputs = nn.CrossEntropyLoss(), (torch.randn(6, 50), torch.zeros(6, dtype=torch.int64))
    analysis = FlopCountAnalysis(model, inputs)
    hidden = predict_memory(analysis.trace())
    assert hidden.unseen == {"aten::cross_entropy_loss": 1}
    looked_into = predict_memory(analysis)
    assert not looked_into.unseen
    assert looked_into.peak - hidden.peak == ITEM * 6 * 50 + ITEM  # the logarithms, and the loss' total weight


def test_refusals():
    trace = record_call(torch.relu, (torch.ones(2),))
    with pytest.raises(TraceError, match=r"no ordered events .* run\.steps\[0\]"):
        predict_memory(trace.aggregate())
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="granularity in bytes must be an integer >= 1"):
            predict_memory(trace, granularity=wrong)
    timeline = predict_memory(trace)
    with pytest.raises(ValueError, match=r"'weights'.*parameter, buffer"):
        timeline.curve("weights")
    with pytest.raises(IndexError, match="no event 9999"):
        timeline.at(9999)
    with pytest.raises(ValueError, match=r"this run used no memory on 'cuda:3'"):
        predict_memory(trace, device="cuda:3")


def test_of_a_recording_of_steps_each_has_its_memory():
    model = perceptron()
    with record(model) as run:
        for _ in range(2):
            model(torch.ones(BATCH, 8)).sum().backward()
            run.step()
    with pytest.raises(TraceError, match=r"run\.steps\[0\]"):
        predict_memory(run)
    first, second = map(predict_memory, run.steps[:2])
    assert made(first, "gradient") == made(second, "gradient") == PARAMETERS
    assert second.baseline >= first.baseline + PARAMETERS


def convolution(batch, inner, outer, size, kernel, **more):
    image, weight = TensorSpec((batch, inner, size, size)), TensorSpec((outer, inner, kernel, kernel))
    values = {"input": image, "weight": weight, "groups": 1, "transposed": False, **more}
    return Signature(
        "aten::convolution", tuple(values), tuple(values.values()), (TensorSpec((batch, outer, size, size)),)
    )


def test_a_convolution_copies_what_it_reads_or_what_it_makes():
    assert workspace_of(convolution(2, 16, 16, 10, 3), "cpu") == ITEM * (2 * 16 * 100 + 16 * 16 * 9)
    assert workspace_of(convolution(2, 16, 64, 10, 1), "cpu") == ITEM * 2 * 64 * 100
    assert workspace_of(convolution(2, 3, 16, 10, 3), "cpu") == ITEM * 2 * 16 * 100  # an image is read as it stands
    assert workspace_of(convolution(1, 16, 16, 10, 3), "cpu") is None  # torch's own kernel
    assert workspace_of(convolution(2, 16, 16, 10, 3, transposed=True), "cpu") is None
    assert workspace_of(convolution(2, 16, 16, 10, 3), "cuda:0") is None
    assert workspace_of(Signature("aten::mm", (), (), ()), "cpu") == 0


def test_kernels_that_no_rule_knows_are_named():
    timeline = predict_step(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()), torch.ones(1, 4, 8, 8))
    assert timeline.unseen == {"aten::convolution": 1, "aten::convolution_backward": 1}
    assert not predict_step().unseen


class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.skip = nn.Conv2d(inner, outer, 1, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Block(32, 32), nn.MaxPool2d(2), Block(32, 64))
    return nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(8, 3, 48, 48)


class Checkpointed(Parts):
    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 60, 64)


MODELS = {
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64)),
        torch.randn(256, 64),
    ),
    "residual convolutions": convolutions,
    "checkpoints": lambda: (
        Checkpointed(
            blocks=nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(3))
        ),
        torch.randn(256, 64),
    ),
    "GRU": lambda: (
        Applied(
            lambda self, tokens: self.head(self.layers(self.embedding(tokens))[0]),
            embedding=nn.Embedding(200, 32),
            layers=nn.GRU(32, 48, 2, batch_first=True),
            head=nn.Linear(48, 200),
        ),
        torch.randint(0, 200, (16, 24)),
    ),
    "transformer encoder": encoder,
    "Llama": lambda: (build("llama_tiny"), torch.randint(0, 100, (4, 60))),
}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_measured(name, request):
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # a recording does not take it, so that counts do not depend on it
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    model, inputs = MODELS[name]()
    model(inputs).sum().backward()  # what is made once, such as tables of angles, is made
    model.zero_grad()
    # torch 2.8 and older have no fused kernel for shared heads: a forward pass alone shows no memory inside attention.
    fuses = name != "Llama" or VERSION >= (2, 9)
    pairs = [compare_forward(model.eval(), (inputs,))] if fuses else []
    optimizer = torch.optim.AdamW if name in ("transformer encoder", "Llama") else SGD
    pairs += compare_steps(model.train(), (inputs,), loss=lambda result: result.exp().sum(), optimizer=optimizer)
    for predicted, measured in pairs:
        assert predicted == pytest.approx(measured, rel=0.03), pairs


def test_a_real_recording_tells_what_a_prediction_does():
    model, inputs = MODELS["GRU"]()
    optimizer = SGD(model.parameters())

    loss = lambda result: result.exp().sum()  # noqa: E731
    predicted = predict_memory(TrainingStepAnalysis(model, inputs, loss=loss, optimizer=SGD), first_step=True)
    with record(model) as run:
        loss(model(inputs)).backward()
        optimizer.step()
    recorded = predict_memory(run, first_step=True)
    assert (recorded.peak, recorded.at_peak()[1:4]) == (predicted.peak, predicted.at_peak()[1:4])


def test_a_forward_pass_leaves_what_it_gets_as_it_was():
    def forward(self, x, cache):
        cache["seen"] = x * 2
        return cache["seen"].add_(x)

    cache = {}
    timeline = predict_memory(FlopCountAnalysis(Applied(forward), (torch.ones(3), cache)))
    assert cache == {} and timeline.peak == 2 * ITEM * 3


class NeedsValues(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1).tolist()


def test_a_model_that_needs_values_is_freed_afterwards():
    model = NeedsValues(4, 4)
    freed = weakref.ref(model)
    analysis = FlopCountAnalysis(model, torch.ones(2, 4), warn=False)
    assert predict_memory(analysis).peak > 0
    del model, analysis
    gc.collect()
    assert freed() is None


def test_what_needed_values_to_be_counted_runs_once_more_for_its_memory():
    runs = []

    class Counted(NeedsValues):
        def forward(self, x):
            runs.append(x)
            return super().forward(x)

    analysis = FlopCountAnalysis(Counted(4, 4), torch.ones(2, 4), warn=False)
    expected = predict_memory(analysis).peak
    assert analysis.trace().info.execution == "real"
    runs.clear()
    assert predict_memory(analysis).peak == expected
    assert len(runs) == 1
