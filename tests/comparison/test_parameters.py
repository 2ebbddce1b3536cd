"""The parameters, counted apart: trainable and frozen, and of a mixture of experts those that work on a token."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fvflops
from fvflops import FlopCountAnalysis, Trace, parameter_summary, parameter_summary_table, record_call
from fvflops.comparison.parameter_summary import ParameterCount
from fvflops.trace import TraceError
from tests.support.models import expert_mixtures as experts
from tests.support.models.expert_mixtures import EXPERTS, INNER, TOPK, WIDTH
from tests.support.models.parts import Applied, Parts
from tests.support.models.whole_models import build_case

# A published size is rounded or cut to the digits that are shown: the true one is less than one unit of the last away.
# Of each model: class, configuration, experts, experts of a token, (total, active) in units of 1e9.
_COMMON = {"tie_word_embeddings": False, "use_cache": False}
PUBLISHED = {
    # Jiang et al., "Mixtral of Experts" (2024), table 1; mistral.ai/news/mixtral-of-experts: 46.7B, 12.9B.
    "Mixtral-8x7B": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        (8, 2),
        ("46.7", "12.9"),
    ),
    # Model cards Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        (128, 8),
        ("30.5", "3.3"),
    ),
    "Qwen3-235B-A22B": (
        "Qwen3Moe",
        {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
        | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        (128, 8),
        ("235", "22"),
    ),
    # Model card Qwen/Qwen1.5-MoE-A2.7B.
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2Moe",
        {"hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24}
        | {"shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4},
        (60, 4),
        ("14.3", "2.7"),
    ),
    # Muennighoff et al., "OLMoE" (2024), table 1.
    "OLMoE-1B-7B": (
        "Olmoe",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8},
        (64, 8),
        ("6.9", "1.3"),
    ),
    # DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024): without the module that predicts a second token.
    "DeepSeek-V3": (
        "DeepseekV3",
        {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280}
        | {"n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
        | {"first_k_dense_replace": 3},
        (256, 8),
        ("671", "37"),
    ),
}
# OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), table 1, where the embedding is not among the active.
_GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
_GPT_OSS |= {"head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4}
WITHOUT_EMBEDDING = {
    name: ("GptOss", _GPT_OSS | {"num_hidden_layers": layers, "num_local_experts": experts_there}, met, sizes)
    for name, layers, experts_there, met, sizes in (
        ("gpt-oss-20b", 24, 32, (32, 4), ("20.91", "3.61")),
        ("gpt-oss-120b", 36, 128, (128, 4), ("116.83", "5.13")),
    )
}


def is_published(elements, figure):
    """Return whether a number of elements can have been published as a figure, in units of 1e9."""
    return abs(elements / 1e9 - float(figure)) < 10.0 ** -len(figure.partition(".")[2])


def run_language_model(family, config, tokens=16, loss=None):
    import transformers

    config = getattr(transformers, f"{family}Config")(**_COMMON, **config)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return record_call(model, (torch.zeros(1, tokens, dtype=torch.long),), loss=loss, execution="shapes")


def elements_of_experts(summary):
    """Return the elements of all routed experts, which transformers keeps in modules called `experts`."""
    return sum(count.total for name, count in summary.items() if name.endswith(".experts"))


LONG = ("Qwen3-235B-A22B", "gpt-oss-120b")  # another of the class is always counted


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in (*PUBLISHED, *WITHOUT_EMBEDDING)]
)
def test_the_published_sizes(name):
    family, config, (experts_there, met), (total, active) = (PUBLISHED | WITHOUT_EMBEDDING)[name]
    summary = parameter_summary(run_language_model(family, config))
    root = summary[""]
    assert is_published(root.total, total)
    assert is_published(root.active - root.looked_up * (name in WITHOUT_EMBEDDING), active)
    assert root.active == root.total - elements_of_experts(summary) * (experts_there - met) // experts_there
    assert root.looked_up == config["vocab_size"] * config["hidden_size"]
    assert root.unused == 0


def test_a_size_that_was_not_published_is_told():
    assert is_published(12.88e9, "12.9") and is_published(3.353e9, "3.3")
    assert not is_published(12.75e9, "12.9") and not is_published(46.7e9, "12.9")


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 50, "num_local_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize("loss", [None, lambda out: out.logits.sum()], ids=["forward", "backward"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_neither_the_number_of_tokens_nor_a_backward_pass_matters(tokens, loss):
    summary = parameter_summary(run_language_model("Mixtral", SMALL, tokens, loss))
    weight = summary["model.layers.1.mlp.experts.gate_up_proj"]
    assert (weight.total, weight.active) == (8 * 192 * 64, 3 * 192 * 64)
    assert summary[""].active == summary[""].total - elements_of_experts(summary) * 5 // 8


class Network(nn.Module):
    """A dense layer, a mixture, and layers after it, of which the last sees one token only."""

    def __init__(self, mixture):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.norm(x + self.mixture(self.first(x)))[:, -1])


def summarise_mixture(mixture, *, loss=None, stops=False):
    torch.manual_seed(0)
    x = torch.randn(2, 15, WIDTH)
    if stops:
        return parameter_summary(FlopCountAnalysis(Network(mixture), x, execution="real"))
    return parameter_summary(record_call(Network(mixture), (x,), loss=loss, execution="real"))


def assert_active(summary, experts_active):
    total = summary["mixture.experts"].total
    assert summary["mixture.experts"].active == experts_active
    assert summary[""].active == summary[""].total - total + experts_active
    dense = ("first", "mixture.router", "norm", "last")
    assert all(summary[name].active == summary[name].total > 0 for name in dense)


@pytest.mark.parametrize("mixture_class", experts.MIXTURES)
def test_experts_are_active_in_proportion(mixture_class):
    torch.manual_seed(0)
    mixture = mixture_class()
    total = sum(parameter.numel() for name, parameter in mixture.named_parameters() if "experts" in name)
    for summary in (summarise_mixture(mixture), summarise_mixture(mixture, stops=True)):
        assert_active(summary, total * TOPK // EXPERTS)


@pytest.mark.parametrize("mixture_class", [experts.ExpertLoop, experts.SliceLoop, experts.SelectedRows])
def test_a_backward_pass_changes_nothing(mixture_class):
    mixture = mixture_class()
    forward = summarise_mixture(mixture)
    assert summarise_mixture(mixture, loss=lambda out: out.sum()) == forward


@pytest.mark.parametrize("mixture_class", [experts.Capacity, experts.CapacityByIndex])
def test_experts_with_a_capacity_are_active_by_their_capacity(mixture_class):
    mixture = mixture_class()
    total = sum(parameter.numel() for parameter in mixture.experts.parameters())
    assert_active(summarise_mixture(mixture), total * experts.capacity_of(30) // 30)


def test_experts_that_compute_every_token_are_wholly_active():
    mixture = experts.AllExpertsOnAllTokens()
    assert_active(summarise_mixture(mixture), sum(parameter.numel() for parameter in mixture.experts.parameters()))


@pytest.mark.parametrize("mixture_class", [experts.ExpertLoop, experts.TokensRepeated, experts.TokensSorted])
def test_each_expert_by_its_tokens(mixture_class):
    # The router is the identity: a token that is the sum of two unit vectors is routed to these two experts.
    mixture = mixture_class()
    with torch.no_grad():
        mixture.router.weight.copy_(torch.eye(EXPERTS, WIDTH))
        mixture.router.bias.zero_()
    pairs = [(0, 1), (0, 1), (0, 2), (0, 3)]
    x = torch.zeros(1, len(pairs), WIDTH)
    for token, pair in enumerate(pairs):
        x[0, token, list(pair)] = 5.0
    summary = parameter_summary(record_call(mixture, (x,), execution="real"))
    one = sum(parameter.numel() for parameter in mixture.shared.parameters())
    assert one == 2 * WIDTH + 2 * (WIDTH * INNER + INNER) + INNER * WIDTH + WIDTH
    quarters = [4, 2, 1, 1, 0, 0]
    assert [summary[f"experts.{number}"].active for number in range(EXPERTS)] == [one * part // 4 for part in quarters]
    assert summary["experts"].active == one * TOPK
    idle = 0 if mixture_class is not experts.TokensSorted else 2  # the others call them too, on no rows
    assert summary["experts"].unused == idle * one


@pytest.mark.parametrize("mixture_class", [experts.ExpertLoop, experts.SliceLoop])
def test_experts_that_run_twice_are_active_by_the_mean_of_both_runs(mixture_class):
    mixture = mixture_class()
    model = nn.Sequential(mixture, nn.Linear(WIDTH, WIDTH), mixture)
    summary = parameter_summary(record_call(model, (torch.randn(1, 9, WIDTH),), execution="real"))
    assert summary["0.experts"].active == summary["0.experts"].total * TOPK // EXPERTS


def test_a_router_beside_a_stack_of_experts_is_wholly_active():
    def forward(self, x):
        """A mixture that keeps all it has in one module."""
        x = x.flatten(0, -2)
        numbers, order = F.linear(x, self.router).topk(TOPK).indices.view(-1).sort()
        return experts.multiply_groups(x[order // TOPK], self.up, numbers)

    router, up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, *inner)) for inner in ((), (INNER,)))
    trace = record_call(Applied(forward, router=router, up=up), (torch.randn(1, 9, WIDTH),), execution="real")
    summary = parameter_summary(trace)
    assert summary["router"].active == EXPERTS * WIDTH
    assert summary["up"].active == TOPK * WIDTH * INNER


def test_experts_on_the_pixels_of_an_image():
    class Pixels(experts.ExpertLoop):
        def forward(self, image):
            return super().forward(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    mixture = Pixels()
    summary = parameter_summary(record_call(mixture, (torch.randn(1, WIDTH, 2, 2 * WIDTH),), execution="real"))
    assert summary["experts"].active == summary["experts"].total * TOPK // EXPERTS


def assert_wholly_active(model, *args):
    root = parameter_summary(record_call(model, args, execution="real"))[""]
    assert root.active == root.total > 0


class Best(nn.Module):
    """Picks the tokens of the highest scores, for something to be done with these."""

    def __init__(self, count=4):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)
        self.count = count

    def forward(self, x):
        best = self.score(x)[..., 0].topk(self.count, -1).indices
        return torch.gather(x, 1, best[..., None].expand(-1, -1, x.shape[-1])), best


class Attention(Parts):
    """Attention among picked tokens: three layers alike that each see all of them."""

    def forward(self, x):
        picked, _ = self.best(x)
        return F.scaled_dot_product_attention(self.query(picked), self.key(picked), self.value(picked))


class Decoder(Parts):
    """Layers for picked tokens, as in detection: each is fed what the one before it made."""

    def forward(self, x):
        picked, _ = self.best(x)
        for layer in self.layers:
            picked = picked + layer(picked)
        return picked


class Refining(Parts):
    """Layers that get the boxes of the best tokens, as the one before it moved them."""

    class Layer(Parts):
        def forward(self, x, boxes):
            return boxes + self.move(x)

    def forward(self, x):
        _, best = self.best(x)
        boxes = torch.gather(x[..., :4] + 0, 1, best[..., None].expand(-1, -1, 4))
        for layer in self.layers:
            boxes = layer(x[:, :4], boxes)
        return boxes


class Pyramid(Parts):
    """Layers alike on maps of several sizes."""

    def forward(self, x):
        maps = x.transpose(1, 2).unflatten(2, (3, 5))
        return [layer(maps[..., :: 2**level]) for level, layer in enumerate(self.layers)]


class SortedApart(Parts):
    """Two layers alike that each sort all tokens for themselves."""

    class Scan(Parts):
        def forward(self, x):
            order = self.score(x)[0, :, 0].argsort()
            return self.mix(x[:, order].cumsum(1))

    def forward(self, x):
        return sum(scan(x) for scan in self.scans)


class SparseAttention(Parts):
    """Attention to chosen keys, and then a weight in blocks, for tokens that come in four streams."""

    class Inner(Parts):
        def forward(self, streams):
            x = streams.mean(2)[0]
            scores = x @ x.transpose(-2, -1)
            mask = torch.full_like(scores, -torch.inf).scatter(-1, scores.topk(2, -1).indices, 0.0)
            seen = (scores + mask).softmax(-1) @ x
            return torch.bmm(seen.view(-1, 4, 2).transpose(0, 1), self.blocks)

    def forward(self, x):
        return self.inner(torch.stack([x] * 4, 2))


class BlocksAfterMixture(Parts):
    """A mixture, and then a weight in blocks, for the last token alone."""

    class Blocks(Parts):
        def forward(self, x):
            return torch.bmm(x[:, -1].view(-1, 4, 2).transpose(0, 1), self.weight)

    def forward(self, x):
        return self.blocks(self.layer(x) + self.best(x)[0])


def learned_queries(self, x):
    """Queries that are parameters, and look at picked tokens in two heads."""
    picked, _ = self.best(x)
    query = self.query(self.queries).view(3, 2, -1).transpose(0, 1)
    return torch.bmm(query, picked[0].view(4, 2, -1).permute(1, 2, 0))


class Codebook(Parts):
    """Rows of a table, looked up by the nearest, as a quantiser does."""

    def forward(self, x):
        nearest = torch.cdist(x, self.codes[None]).argmin(-1)
        return torch.bmm(self.codes[nearest].view(3, 5, -1), x.view(3, 5, -1).transpose(1, 2))


def linear(outputs=WIDTH):
    return nn.Linear(WIDTH, outputs)


NO_EXPERTS = {
    "attention": lambda: Attention(best=Best(), query=linear(), key=linear(), value=linear()),
    "decoder": lambda: Decoder(best=Best(), layers=nn.ModuleList([experts.Expert() for _ in range(3)])),
    "refining": lambda: Refining(best=Best(), layers=nn.ModuleList([Refining.Layer(move=linear(4)) for _ in range(3)])),
    "pyramid": lambda: Pyramid(layers=nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3)])),
    "spans": lambda: Applied(
        lambda self, x: self.begin(x[:, torch.tensor([0, 3])]) + self.end(x[:, torch.tensor([2, 5])]),
        begin=linear(),
        end=linear(),
    ),
    "sorted apart": lambda: SortedApart(
        scans=nn.ModuleList([SortedApart.Scan(score=linear(1), mix=linear()) for _ in range(2)])
    ),
    "sparse attention": lambda: SparseAttention(inner=SparseAttention.Inner(blocks=nn.Parameter(torch.randn(4, 2, 5)))),
    "blocks after a mixture": lambda: BlocksAfterMixture(
        layer=nn.Sequential(experts.AllExpertsOnAllTokens()),
        best=nn.Sequential(nn.ModuleDict({"inner": Best(15)})["inner"]),
        blocks=BlocksAfterMixture.Blocks(weight=nn.Parameter(torch.randn(4, 2, 5))),
    ),
    "learned queries": lambda: Applied(
        learned_queries, best=Best(), queries=nn.Parameter(torch.randn(3, WIDTH)), query=linear()
    ),
    "codebook": lambda: Codebook(codes=nn.Parameter(torch.randn(20, WIDTH))),
    "one matrix": lambda: Applied(
        lambda self, x: torch.bmm(self.best(x)[0], self.weight),
        best=Best(),
        weight=nn.Parameter(torch.randn(1, WIDTH, 3)),
    ),
}


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_what_is_no_mixture_is_wholly_active(name):
    assert_wholly_active(NO_EXPERTS[name](), torch.randn(1, 15, WIDTH))


def test_a_table_that_is_cast_is_looked_up_too():
    class Half(nn.Embedding):
        def forward(self, ids):
            return F.embedding(ids, self.weight.to(torch.bfloat16))

    assert parameter_summary(FlopCountAnalysis(Half(10, 4), torch.arange(5)))[""].looked_up == 40


WITHOUT_EXPERTS = [
    *("toy", "unused", "zoo:llama_tiny", "torchvision:mobilenet_v2", "torchvision:swin_t", "torchvision:fcn_resnet50"),
    *("timm:xcit_nano_12_p16_224", "transformers:BertModel"),
]


@pytest.mark.parametrize("name", WITHOUT_EXPERTS)
def test_without_experts_all_that_is_used_is_active(name):
    model, inputs = build_case(name)
    summary = parameter_summary(FlopCountAnalysis(model, inputs))
    assert summary[""].active == summary[""].total - summary[""].unused
    assert all(count.active == count.total - count.unused for count in summary.values())


class Odd(nn.Module):
    """A model with a tied weight, a shared module, a frozen one, a buffer, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.shared = nn.Linear(4, 4)
        self.again = self.shared
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.idle = nn.Linear(4, 7)
        self.table = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.table(ids % 3)
        return self.head(self.norm(self.again(self.shared(x))))


ODD = {
    "": ParameterCount(40 + 20 + 8 + 35 + 12, 40 + 20 + 35 + 12, 40 + 20 + 8 + 12, 12, 35, buffers=9),
    "embedding": ParameterCount(40, 40, 40, 0, 0),
    "embedding.weight": ParameterCount(40, 40, 40, 0, 0),
    "shared": ParameterCount(20, 20, 20, 0, 0),
    "norm": ParameterCount(8, 0, 8, 0, 0, buffers=9),
    "idle": ParameterCount(35, 35, 0, 0, 35),
    "table": ParameterCount(12, 12, 12, 12, 0),
    "head": ParameterCount(0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_each_kind_by_hand(execution):
    summary = parameter_summary(FlopCountAnalysis(Odd(), torch.arange(5), execution=execution))
    assert {name: summary[name] for name in ODD} == ODD
    assert "again" not in summary and "head.weight" not in summary
    assert summary["norm"].frozen == 8


def test_what_needs_no_run_needs_none():
    for name, count in parameter_summary(Odd()).items():
        assert (count.active, count.looked_up, count.unused) == (None, None, None)
        if name in ODD:
            wanted = ODD[name]
            assert (count.total, count.trainable, count.buffers) == (wanted.total, wanted.trainable, wanted.buffers)


def test_the_totals_are_those_of_parameter_count():
    model, counts = Odd(), fvflops.parameter_count(Odd())
    summary = parameter_summary(model)
    assert {name: count.total for name, count in summary.items() if count.total} == dict(counts)


def test_names_stand_in_the_order_of_the_model():
    names = list(parameter_summary(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))))
    assert names == ["", "0", "0.weight", "0.bias", "1", "1.0", "1.0.weight", "1.0.bias"]


def test_weights_that_share_their_storage_are_used_where_their_module_runs():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            block = torch.randn(2, 4, 4)
            self.first, self.second, self.idle = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.first.weight, self.second.weight = nn.Parameter(block[0]), nn.Parameter(block[1])
            self.idle.weight = nn.Parameter(block[1])

        def forward(self, x):
            return self.second(self.first(x))

    root = parameter_summary(FlopCountAnalysis(Flat(), torch.randn(2, 4)))[""]
    assert (root.total, root.active, root.unused) == (48, 32, 16)


def test_a_loaded_trace_tells_the_same():
    trace = record_call(experts.ExpertLoop(), (torch.randn(1, 9, WIDTH),), execution="real")
    assert parameter_summary(Trace.from_json(trace.to_json())) == parameter_summary(trace)


def test_an_aggregated_trace_cannot_tell():
    trace = record_call(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(TraceError, match="no ordered events"):
        parameter_summary(trace.aggregate())


class LowRank(nn.Module):
    """A frozen layer with an adapter of rank 2: y = W x + B A x (Hu et al., "LoRA", 2021)."""

    def __init__(self, width=8, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.a = nn.Linear(width, rank, bias=False)
        self.b = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_trainable_and_the_rest_is_frozen():
    summary = parameter_summary(nn.Sequential(LowRank(), LowRank()))
    assert [(summary[name].trainable, summary[name].frozen) for name in ("", "0", "0.base", "0.a")] == [
        *((2 * 32, 2 * 64), (32, 64), (0, 64), (16, 0))
    ]


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_frozen_weight_has_no_gradient(execution):
    rows = 5
    trace = record_call(
        nn.Sequential(LowRank(), LowRank()), (torch.randn(rows, 8),), loss=lambda out: out.sum(), execution=execution
    )
    macs = Counter()
    for entry in FlopCountAnalysis.from_trace(trace).counts().entries:
        macs[entry.scope[-1] if entry.scope else "", entry.phase] += entry.macs
    base, adapter = rows * 8 * 8, rows * 8 * 2
    forward = {name: macs[name, "forward"] for name in ("0.base", "0.a", "0.b", "1.base", "1.a", "1.b")}
    assert forward == {"0.base": base, "0.a": adapter, "0.b": adapter, "1.base": base, "1.a": adapter, "1.b": adapter}
    # The gradient of the second base's input, never of a base's weight; the first inputs want none at all.
    backward = {name: macs[name, "backward"] for name in forward}
    first = {"0.base": 0, "0.a": adapter, "0.b": 2 * adapter}
    assert backward == first | {"1.base": base, "1.a": 2 * adapter, "1.b": 2 * adapter}


def test_a_full_weight_costs_twice_as_much_backward():
    model = nn.Sequential(LowRank(), LowRank()).requires_grad_(True)
    trace = record_call(model, (torch.randn(5, 8),), loss=lambda out: out.sum())
    entries = FlopCountAnalysis.from_trace(trace).counts().entries
    macs = [entry.macs for entry in entries if entry.phase == "backward" and entry.scope[-1:] == ("1.base",)]
    assert sum(macs) == 2 * 5 * 8 * 8


def test_an_adapter_that_is_merged_at_run_time_is_active():
    class Merged(LowRank):
        def forward(self, x):
            return F.linear(x, self.base.weight + self.b.weight @ self.a.weight)

    assert_wholly_active(Merged(), torch.randn(5, 8))


def test_the_table_of_a_model_shows_what_needs_no_run():
    assert parameter_summary_table(LowRank(), max_depth=0).splitlines() == [
        "| name   |   total |   trainable |   frozen |   buffers |",
        "|:-------|--------:|------------:|---------:|----------:|",
        "| model  |      96 |          32 |       64 |         0 |",
    ]


def test_the_table_of_a_run_shows_what_was_active():
    text = parameter_summary_table(FlopCountAnalysis(Odd(), torch.arange(5)), max_depth=1)
    table, _, note = text.partition("\n\n")
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert header == ["name", "total", "trainable", "frozen", "active", "unused", "buffers"]
    assert rows == [
        ["model", "0.115K", "0.107K", "8", "80", "35", "9"],
        ["embedding", "40", "40", "0", "40", "0", "0"],
        ["shared", "20", "20", "0", "20", "0", "0"],
        ["norm", "8", "0", "8", "8", "0", "9"],
        ["idle", "35", "35", "0", "0", "35", "0"],
        ["table", "12", "12", "0", "12", "0", "0"],
    ]
    assert note == "12 of the active are in embedding tables."
