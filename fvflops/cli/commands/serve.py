"""`fvflops serve`: what serving a language model costs: cache, first token, tokens per second, requests."""

from __future__ import annotations

import argparse

from fvflops.cli import shared_options
from fvflops.cli.argument_values import parse_count
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import choose_network, find_accelerator
from fvflops.serve.requests import read_requests
from fvflops.serve.serve_model import ServingLoad, serve_model
from fvflops.serve.serve_report import ENGINES, serve_report
from fvflops.serve.serving_layout import CACHES, WEIGHTS, ServingLayout
from fvflops.sources.load import load_model

EXAMPLES = (
    "fvflops serve zoo:llama3_8b --device H100",
    "fvflops serve zoo:llama3_70b --device H100 --tp 4 --weights fp8 --concurrency 64",
    "fvflops serve transformers:DeepseekV3ForCausalLM --device H200 --tp 8 --ep 8 --weights fp8",
)
FIRST = ("--device", "--tp", "--weights", "--input-len", "--concurrency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops serve`."""
    parser.add_argument("model", metavar="MODEL", help="a causal language model, as for count")
    add_options(
        parser,
        f"""
        device:
        --device DEVICE  the GPU: a name such as H100, FILE.yaml or FILE.yaml:NAME
        --network NAME  how GPUs are linked, or FILE.yaml:NAME; default: that of the GPU's systems
        --engine {{{",".join(ENGINES)}}}  the inference engine whose scheduler is followed; default: vllm

        layout:
        --tp N  GPUs that divide heads and matrices (tensor parallelism)
        --pp N  stages of a pipeline
        --ep N  GPUs that divide the experts of each layer; default: each has a part of every expert
        --dp-attention N  groups of --tp GPUs that compute the attention of their own sequences
        --weights {{{",".join(WEIGHTS)}}}  precision of the weights; default: bf16
        --cache {{{",".join(CACHES)}}}  precision of the KV cache; default: bf16
        --utilisation PART  part of the memory that the engine takes; default: 0.9
        --max-model-len N  tokens of the longest sequence; default: prompt and output

        load:
        --input-len N  tokens of a prompt; default: 1024
        --output-len N  tokens of an answer; default: 256
        --concurrency N  simulate N clients, each of which sends a request after the last one's answer
        --rate R  simulate requests that arrive at random, R a second
        --requests FILE  simulate the requests of a CSV file with arrival, input_tokens and output_tokens
        --hit-rate PART  part of each prompt that is in the cache of prefixes; default: 0
        """,
        type=dict.fromkeys(
            ("tp", "pp", "ep", "dp_attention", "max_model_len", "input_len", "output_len", "concurrency"), parse_count
        )
        | dict.fromkeys(("utilisation", "rate", "hit_rate"), float),
    )
    shared_options.add_building(parser)
    shared_options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Report what serving a model costs; return the exit code."""
    if arguments.device is None:
        raise ValueError("serve needs --device, the GPU, such as H100; 'fvflops list devices' lists them")
    device = find_accelerator(arguments.device)
    if device is None:
        raise ValueError(f"--device {arguments.device}: name the GPU, such as H100; 'fvflops list devices' lists them")
    layout = ServingLayout(
        tensor=arguments.tp or 1,
        pipeline=arguments.pp or 1,
        expert=arguments.ep or 1,
        data=arguments.dp_attention or 1,
        weights=arguments.weights or "bf16",
        cache=arguments.cache or "bf16",
    )
    load = ServingLoad(
        input_tokens=arguments.input_len or 1024,
        output_tokens=arguments.output_len or 256,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        requests=tuple(read_requests(arguments.requests)) if arguments.requests else (),
        hit_rate=arguments.hit_rate or 0.0,
        longest=arguments.max_model_len,
        utilisation=arguments.utilisation or 0.9,
    )
    options = shared_options.building_options(arguments, device="meta", dtype="bf16")
    model = load_model(arguments.model, options).model.eval()
    estimate = serve_model(
        model,
        device=device,
        layout=layout,
        load=load,
        engine=arguments.engine or "vllm",
        network=choose_network(arguments.network),
        name=arguments.model,
    )
    write_report(serve_report(estimate, name=arguments.model), arguments)
    return 0
