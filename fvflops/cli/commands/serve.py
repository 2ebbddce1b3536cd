"""`fvflops serve`: what serving a language model costs: cache, first token, tokens per second, requests."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import replace

from torch import nn

from fvflops.cli import argument_values as values
from fvflops.cli import shared_options
from fvflops.cli.argument_values import find_chosen, refuse
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import choose_network, find_accelerator
from fvflops.cli.planning.step_options import OF_OUTPUT, typed_words
from fvflops.devices.devices import Device
from fvflops.reports.document import Document
from fvflops.serve.serve_model import ServingLoad, serve_model
from fvflops.serve.serve_report import ENGINES, serve_report
from fvflops.serve.serving_layout import CACHES, WEIGHTS, ServingLayout
from fvflops.serve.serving_search import ServingPoint, search_serving
from fvflops.serve.serving_search_report import serving_search_report
from fvflops.serve.simulation.engine_settings import Speculation
from fvflops.serve.simulation.request_simulation import LatencyLimits
from fvflops.serve.simulation.requests import read_requests
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import LoadedModel

EXAMPLES = (
    "fvflops serve zoo:llama3_8b --device H100",
    "fvflops serve zoo:llama3_70b --device H100 --tp 4 --concurrency 64",
    "fvflops serve zoo:mixtral_8x7b --device H100 --search --gpus 4 --tpot 30ms",
)
RARE = ("--image-size",)
_OF_SEARCH = ("gpus", "ttft", "tpot", "at")
FIRST = ("--device", "--tp", "--weights", "--input-len", "--concurrency")
_COUNTS = ("tp", "pp", "ep", "dp_attention", "max_model_len", "input_len", "output_len", "concurrency", "gpus")
_OPTIONS = f"""
device:
--device DEVICE  the GPU: a name such as H100, FILE.yaml or FILE.yaml:NAME
--network NAME  how GPUs are linked, or FILE.yaml:NAME; default: the GPU's usual nodes
--engine {{{",".join(ENGINES)}}}  the inference engine whose scheduler is simulated; default: vllm

layout:
--tp N  GPUs that divide heads and matrices (tensor parallelism)
--pp N  stages of a pipeline
--ep N  GPUs that divide the experts of each layer; default: each has a part of every expert
--dp-attention N  groups of --tp GPUs that compute the attention of their own sequences
--weights {{{",".join(WEIGHTS)}}}  precision of the weights; default: bf16
--cache {{{",".join(CACHES)}}}  precision of the KV cache; default: bf16
--utilisation PART  share of the memory that the engine uses; default: 0.9
--max-model-len N  tokens of the longest sequence; default: prompt and output

load:
--input-len N  tokens of a prompt, which an encoder reads if there is one; default: 1024
--output-len N  tokens of an answer; default: 256
--concurrency N  simulate N clients, each of which sends a request after the last one's answer
--rate R  simulate requests that arrive at random, R a second
--requests FILE  simulate the requests of a CSV file with arrival, input_tokens and output_tokens
--images N  images of each prompt, before its tokens of text; default: 0
--image-size N|HxW  height and width of --images; default: the model's
--hit-rate PART  share of each prompt that is in the prefix cache; default: 0

--draft-tokens N  tokens that speculative decoding drafts for each step
--acceptance PART  probability that a drafted token is accepted; default: 0.7
--price X  price of a GPU hour, for the cost of a million output tokens
--watts W  power of a GPU, for the energy of a million output tokens

search:
--search  find the layout with the highest throughput on --gpus GPUs, within the limits
--gpus N  GPUs of the search
--ttft TIME  limit of the time to first token, such as 200ms
--tpot TIME  limit of the time per output token, such as 50ms
--at {{mean,p50,p90,p95,p99}}  statistic that the limits apply to; default: p95
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a language model, with an encoder or without, as for count")
    add_options(
        parser,
        _OPTIONS,
        type=dict.fromkeys((*_COUNTS, "draft_tokens"), values.parse_count)
        | {"images": values.parse_depth, "image_size": values.parse_sides}
        | dict.fromkeys(("rate", "price", "watts"), values.parse_amount)
        | dict.fromkeys(("utilisation", "hit_rate", "acceptance"), values.parse_part)
        | dict.fromkeys(("ttft", "tpot"), values.parse_seconds),
    )
    shared_options.add_building(parser)
    shared_options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Report the cost of serving a model; return the exit code."""
    if arguments.device is None:
        raise ValueError("serve needs --device, the GPU, such as H100; 'fvflops list devices' lists them")
    device = find_accelerator(arguments.device)
    if device is None:
        raise ValueError(f"--device {arguments.device}: name the GPU, such as H100; 'fvflops list devices' lists them")
    _check(arguments)
    loaded = _load(arguments)
    load = _read_load(arguments, loaded)
    if arguments.search:
        write_report(_search(arguments, loaded.model, device, load), arguments)
        return 0
    layout = ServingLayout(
        tensor=arguments.tp or 1,
        pipeline=arguments.pp or 1,
        expert=arguments.ep or 1,
        data=arguments.dp_attention or 1,
        weights=arguments.weights or "bf16",
        cache=arguments.cache or "bf16",
    )
    estimate = serve_model(
        loaded.model,
        device=device,
        layout=layout,
        load=load,
        engine=arguments.engine or "vllm",
        network=choose_network(arguments.network),
        name=arguments.model,
    )
    write_report(serve_report(estimate, name=arguments.model, price=arguments.price, watts=arguments.watts), arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option that would have no effect."""
    is_search, is_file = arguments.search, arguments.requests is not None
    is_load = is_search or find_chosen(arguments, ("concurrency", "rate", "requests"))
    if is_search and arguments.gpus is None:
        raise ValueError("--search needs --gpus, the number of GPUs, such as --gpus 8")
    refuse(
        arguments,
        (not is_search, _OF_SEARCH, "{} applies to --search: add it"),
        (is_search, ("tp", "ep", "dp_attention", "concurrency"), "--search tries every {}: omit it"),
        (is_search, ("pp", "rate", "requests", "price", "watts"), "{} applies to one layout: omit it, or --search"),
        (not is_load, ("hit_rate", "draft_tokens", "price", "watts"), "{} applies to --concurrency or --rate: add one"),
        (is_file, ("hit_rate",), "{} applies to requests drawn at random: write prefix_tokens into the file"),
        (not arguments.images, ("image_size",), "{} applies to --images: add it"),
        (arguments.draft_tokens is None, ("acceptance",), "{} applies to --draft-tokens: add it"),
    )


def _load(arguments: argparse.Namespace) -> LoadedModel:
    """Return the model, with the inputs of a call with an image where prompts have some."""
    options = replace(shared_options.building_options(arguments), device="meta", dtype="bf16")
    if not arguments.images:  # serve_model makes the prompts
        loaded = load_model(arguments.model, replace(options, inputs=("1,1:int64",)))
    else:
        try:
            loaded = load_model(arguments.model, replace(options, image_size=arguments.image_size))
        except (RuntimeError, ValueError) as error:
            remedy = "try another --image-size, by default the model's own, or omit --images"
            raise ValueError(f"{arguments.model} does not run on such an image: {remedy} ({error})") from error
    loaded.model.eval()
    return loaded


def _read_load(arguments: argparse.Namespace, loaded: LoadedModel) -> ServingLoad:
    acceptance = 0.7 if arguments.acceptance is None else arguments.acceptance
    return ServingLoad(
        input_tokens=arguments.input_len or 1024,
        output_tokens=arguments.output_len or 256,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        requests=tuple(read_requests(arguments.requests)) if arguments.requests else (),
        hit_rate=arguments.hit_rate or 0.0,
        longest=arguments.max_model_len,
        utilisation=0.9 if arguments.utilisation is None else arguments.utilisation,
        speculation=arguments.draft_tokens and Speculation(arguments.draft_tokens, acceptance),
        images=arguments.images or 0,
        image=loaded.kwargs if arguments.images else None,
    )


def _search(arguments: argparse.Namespace, model: nn.Module, device: Device, load: ServingLoad) -> Document:
    weights = [arguments.weights] if arguments.weights else ["bf16", "fp8"]
    found = search_serving(
        model,
        device=device,
        gpus=arguments.gpus,
        load=load,
        limits=LatencyLimits(arguments.ttft or math.inf, arguments.tpot or math.inf, arguments.at or "p95"),
        precisions=[(name, arguments.cache or ("fp8" if name == "fp8" else "bf16")) for name in weights],
        engine=arguments.engine or "vllm",
        network=choose_network(arguments.network),
    )
    command = "".join(_describe_command(arguments, point) for point in found.best(1) if not point.prefill)
    return serving_search_report(found, name=arguments.model, command=command)


def _describe_command(arguments: argparse.Namespace, point: ServingPoint) -> str:
    """Return the command that estimates one engine of a layout, with its part of the clients."""
    omitted = [*OF_OUTPUT, *(f"--{name}" for name in (*_OF_SEARCH, "weights", "cache"))]
    words = [word for word in typed_words(arguments, omitted) if word != "--search"]
    layout = point.layout
    for name, size in (("tp", layout.tensor), ("ep", layout.expert), ("dp-attention", layout.data)):
        words += [f"--{name}", str(size)] if size > 1 else []
    clients = max(1, point.clients // point.engines)
    return shlex.join([*words, "--weights", layout.weights, "--cache", layout.cache, "--concurrency", str(clients)])
