"""Options of a training step: its optimizer, its loss, the modules that are checkpointed, and its mesh of ranks."""

from __future__ import annotations

import argparse
import re
import shlex
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from fvflops.analysis.training_step_analysis import sum_results
from fvflops.capture.model.model_index import has_packed, read_modules
from fvflops.capture.model.read_module_tree import module_paths
from fvflops.capture.model_call import loss_in
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.run import Loss
from fvflops.cli.argument_values import parse_assumptions, parse_mesh, refuse
from fvflops.cli.parser import add_options
from fvflops.formulas import FormulaTable
from fvflops.plan.added_optimizers import BLOCKWISE_NAMES, MasterWeights, Muon, find_blockwise
from fvflops.plan.checkpointing import Checkpoint, find_checkpointed, is_policy
from fvflops.plan.memory.memory_savings import ADAFACTOR_ASSUMES, CHUNKED, compute_loss_in_chunks, find_head
from fvflops.plan.memory.offload import OFFLOADS
from fvflops.plan.parallel_axes import AXES, count_shares
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.sharding.fully_sharded import unsharded_class
from fvflops.sources.imports import import_library, load_function
from fvflops.sources.loaded_model import LoadedModel
from fvflops.text import suggest

NO_OPTIMIZER = "none"
_CALL = re.compile(r"(\w+)\((.+)\)")
_CROSS_ENTROPY = "cross entropy of the model's logits in float32"
_SUM = "the sum of the model's outputs"
OF_OUTPUT = ("--format", "--output")
# Options of plans that need not be parsed.
_AS_TYPED = (
    *("rank", "sequence_parallel", "microbatches", "schedule", "stages_per_rank", "reshard_after_forward"),
    *("optimizer_sharding", "gradient_dtype", "offload"),
)
# Option → the axis without which it has no effect.
AXIS_OF: Mapping[str, str] = {option: name for name, axis in AXES.items() for option in axis.options}


def add_step(step: argparse._ActionsContainer, *, default: str) -> None:
    """Add the optimizer, checkpointing and the loss; `default` is help text."""
    add_options(
        step,
        f"""
        --optimizer NAME  optimizer of torch.optim, in any case, also with options: AdamW(fused=True); one of
            bitsandbytes, such as AdamW8bit or PagedAdamW; Muon for matrices with AdamW for embeddings and the rest;
            or none for forward and backward only; default: {default}
        --master-weights  the optimizer keeps float32 copies of the parameters
        --checkpoint POLICY ...  activation checkpointing of the layers: full, selective or 'every 2'; or a class of
            modules whose activations are recomputed (torch.utils.checkpoint), which may be repeated
        --loss PATH:FUNCTION  function of the model's result, or 'chunked': cross entropy with the output projection
            in chunks of tokens (as liger's); default: its attribute loss, or else cross entropy of a language model's
            logits, or else the sum of the outputs
        --offload  keep on the host the optimizer, also the gradients (ZeRO-Offload), or activations; may be repeated
        """,
        action={"offload": "append"},
        default={"offload": []},
        choices={"offload": tuple(OFFLOADS)},
    )


def prepare_training(subject: LoadedModel) -> None:
    """Set a model to training mode without a KV cache, in which a recomputed layer would find its keys and values."""
    subject.train(True)
    for module in subject.model.modules():  # a decoder's config is a copy of its model's
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def choose_loss(arguments: argparse.Namespace, model: nn.Module) -> Loss:
    """Return the function that `--loss` names, or a DefaultLoss; 'chunked' changes the model."""
    if arguments.loss == CHUNKED:
        compute_loss_in_chunks(model)
    elif arguments.loss is not None:
        return load_function(arguments.loss, "--loss")
    return DefaultLoss(None if arguments.loss == CHUNKED else find_vocabulary(model))


@contextmanager
def chunked_loss_explained(arguments: argparse.Namespace) -> Iterator[None]:
    """Let an error of a model whose logits are replaced by their chunked loss say so."""
    try:
        yield
    except Exception as error:
        if arguments.loss == CHUNKED and error.args:
            note = "with --loss chunked the model gets the loss in place of logits: build it without labels"
            error.args = (f"{error.args[0]} ({note})", *error.args[1:])
        raise


def make_optimizer(arguments: argparse.Namespace, default: str, model: nn.Module) -> Any:
    """Return the factory of the arguments' optimizer, None for none; `default` is the name without one."""
    optimizer: Any = find_optimizer(arguments.optimizer or default)
    if optimizer is Muon:
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        optimizer = partial(Muon, by_adamw={tuple(table.shape) for table in tables})
    return partial(MasterWeights, make=optimizer) if arguments.master_weights else optimizer


def check_optimizer(arguments: argparse.Namespace, default: str) -> None:
    """Raise ValueError for an unknown optimizer, and for master weights without one, before a model is loaded."""
    if find_optimizer(arguments.optimizer or default) is None and arguments.master_weights:
        raise ValueError("--master-weights need an optimizer: add --optimizer, such as --optimizer AdamW")


def find_optimizer(name: str) -> Any:
    """Return the class of an optimizer by its name in any case, None for "none"; another one raises ValueError.

    With options, as in "AdamW(fused=True)", it is a partial of the class.

    >>> find_optimizer("adamw").__name__, find_optimizer("none"), find_optimizer("muon").__name__
    ('AdamW', None, 'Muon')
    >>> find_optimizer("AdamW(fused=True)").keywords
    {'fused': True}
    """
    if (called := _CALL.fullmatch(name)) is not None:
        try:
            options = {k.strip(): literal_eval(v) for k, v in (item.split("=") for item in called[2].split(","))}
        except (ValueError, SyntaxError):
            raise ValueError(f"--optimizer {name}: write options as in AdamW(fused=True)") from None
        found = find_optimizer(called[1])
        if unknown := options.keys() - (() if found in (None, Muon) else signature(found).parameters):
            raise ValueError(f"--optimizer {name}: {called[1]} takes no option {', '.join(sorted(unknown))}")
        return partial(found, **options)
    classes: dict[str, type[Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if "muon" in classes:
        classes["muon"] = Muon
    if name.lower() == NO_OPTIMIZER:
        return None
    blockwise = find_blockwise(name)
    if blockwise is not None:
        import_library("bitsandbytes", extra="bitsandbytes")
        return blockwise
    if name.lower() not in classes:
        names = sorted(value.__name__ for value in classes.values())
        known = {**classes, **{item.lower(): item for item in BLOCKWISE_NAMES}, NO_OPTIMIZER: ""}
        hint = suggest(name.lower(), dict.fromkeys(known, ""))
        raise ValueError(
            f"--optimizer {name}: torch.optim has {', '.join(names)}, bitsandbytes {', '.join(BLOCKWISE_NAMES)}{hint}"
        )
    return classes[name.lower()]


def choose_precision(arguments: argparse.Namespace, model: nn.Module, *, has_bf16: bool) -> None:
    """Let `--precision` be bf16-mixed for a float32 model where the accelerator has it and nothing else is chosen."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_plain = not (arguments.precision or arguments.dtype or arguments.master_weights or has_packed(model))
    if is_plain and has_bf16 and dtypes == {torch.float32}:
        arguments.precision = "bf16-mixed"


def typed_words(arguments: argparse.Namespace, omitted: Collection[str]) -> list[str]:
    """Return the command line as it was typed, without some options, each of which has a value."""
    words, skipped = ["fvflops"], False
    for word in arguments.argv:
        name, has_value, _ = word.partition("=")
        if not skipped and name not in omitted:
            words.append(word)
        skipped = not skipped and name in omitted and not has_value
    return words


def repeat_command(arguments: argparse.Namespace, optimizer: str | None = None) -> str:
    """Return the command line that repeats a report, with the defaults that were chosen, without where it is written.

    >>> typed = ("plan", "zoo:gpt2", "--format=json", "--output", "a b.json")
    >>> repeat_command(argparse.Namespace(argv=typed, precision="bf16-mixed", optimizer=None), "AdamW")
    'fvflops plan zoo:gpt2 --precision bf16-mixed --optimizer AdamW'
    """
    words = typed_words(arguments, OF_OUTPUT)
    for option, value in (("--precision", arguments.precision), ("--optimizer", arguments.optimizer or optimizer)):
        if value is not None and option not in {word.partition("=")[0] for word in words}:
            words += [option, value]
    return shlex.join(words)


def typed_settings(arguments: argparse.Namespace, loss: Loss | None) -> dict[str, str]:
    """Return the settings as they are typed, in place of names of functions and classes."""
    chunked = "cross entropy in chunks of tokens"
    typed = {"loss": chunked if arguments.loss == CHUNKED else arguments.loss or str(loss)}
    if "(" in (arguments.optimizer or ""):
        typed["optimizer"] = arguments.optimizer
    return typed | ({"checkpointing": ", ".join(arguments.checkpoint)} if arguments.checkpoint else {})


def read_assumptions(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the assumptions of `--assume`, and the ones that a step of the optimizer needs.

    >>> read_assumptions(argparse.Namespace(assume=[], optimizer="adafactor"))
    {'aten::_local_scalar_dense': 1.0}
    """
    needed = ADAFACTOR_ASSUMES if (arguments.optimizer or "").lower().partition("(")[0] == "adafactor" else {}
    return {**needed, **parse_assumptions(arguments.assume)}


@dataclass(slots=True, eq=False)
class DefaultLoss:
    """The loss in a model's result if it is there, else one of its outputs.

    That is the cross entropy in float32 of logits over the tokens of a `vocabulary`, as trainers of language models
    compute it, with labels of zeros; without one, or with other outputs, their sum. `used` says which it was.
    """

    vocabulary: int | None = None
    used: str = ""

    def __call__(self, result: Any) -> torch.Tensor:
        loss = loss_in(result)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.used = "the model's own"
            return loss
        if not any(tensor.requires_grad for tensor in tensors_of(result)):
            raise ValueError(
                "no tensor in the model's result requires a gradient: pass --loss, omit --backward, or pass memory's "
                "--inference"
            )
        found = tensors_of(getattr(result, "logits", result))
        # Axes of logits are batch, tokens and vocabulary.
        logits = [item for item in found if item.ndim == 3 and item.shape[-1] == self.vocabulary]
        if len(logits) == 1:
            self.used = _CROSS_ENTROPY
            labels = torch.zeros(logits[0].shape[:-1], dtype=torch.int64, device=logits[0].device)
            return cross_entropy(logits[0].float().flatten(0, 1), labels.flatten())
        self.used = _SUM
        return sum_results(result)

    def __str__(self) -> str:
        others = [] if self.vocabulary is None else [_CROSS_ENTROPY]
        return self.used or ", else ".join(["the model's if it returns one", *others, _SUM])


def find_vocabulary(model: nn.Module) -> int | None:
    """Return the number of tokens that a language model embeds and computes logits of, None of another model.

    >>> from fvflops.zoo import build
    >>> find_vocabulary(build("llama_tiny")), find_vocabulary(build("lenet5"))
    (256, None)
    """
    head = find_head(model)
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    size = getattr(head, "out_features", None)
    return size if size in tables else None


def find_modules(subject: LoadedModel, classes: Sequence[str], *, option: str = "--checkpoint") -> list[str]:
    """Return the names of the modules of some classes; a class without a module raises ValueError."""
    by_class: dict[str, list[str]] = {}
    for module in read_modules(subject.model).modules():
        if module.has_forward:
            by_class.setdefault(module.class_name, []).append(module.name)
    for name in classes:
        if name not in by_class:
            hint = suggest(name, by_class)
            raise ValueError(f"{option} {name}: the classes of the model's modules are {', '.join(by_class)}{hint}")
    return [name for class_name in classes for name in by_class[class_name]]


def find_policy(subject: LoadedModel, names: Sequence[str]) -> Checkpoint:
    """Return the policy of planning that `--checkpoint` names, or which modules have the classes that it names."""
    if len(names) == 1 and is_policy(names[0]):
        return names[0]
    wanted = set(find_modules(subject, names))
    classes = {type(module) for name, module in module_paths(subject.model) if name in wanted}
    # A stage of a pipeline has other names, and FSDP2 changes the classes of modules.
    return lambda _, module: bool(classes.intersection((type(module), unsharded_class(module))))


def find_checkpointed_names(subject: LoadedModel, names: Sequence[str]) -> list[str]:
    """Return the modules of one process that `--checkpoint` names; a policy that it does not have raises ValueError."""
    if len(names) != 1 or not is_policy(names[0]):
        return find_modules(subject, names)
    if names[0] == "selective":
        raise ValueError("--checkpoint selective is planned for a rank: add --mesh, such as --mesh dp=1")
    chosen = {id(module) for module in find_checkpointed(subject.model, names[0])}
    return [name for name, module in module_paths(subject.model) if id(module) in chosen]


def read_plan_options(arguments: argparse.Namespace, table: FormulaTable) -> PlanOptions:
    """Return the options of a plan on `--mesh`, or of a search, that do not depend on the model."""
    mesh = {} if arguments.mesh is None else parse_mesh(arguments.mesh)
    if mesh:
        _check_mesh_options(arguments, mesh)
    return PlanOptions(
        **{name: getattr(arguments, name) for name in _AS_TYPED},
        mesh=mesh,
        shard_by=None if arguments.shard is None else load_function(arguments.shard, "--shard"),
        stage_layers=_parse_numbers(arguments, "stage_layers", "the layers of each stage, such as 7,8,8,7"),
        reduce_each_microbatch=arguments.reduce_each_microbatch is not False,
        routing=_parse_numbers(arguments, "routing", "the tokens of each expert, such as 3,3,1,1"),
        assume=read_assumptions(arguments),
        table=table,
    )


def _parse_numbers(arguments: argparse.Namespace, name: str, expected: str) -> list[int] | None:
    """Return the numbers of an option such as 7,8,8,7, None without it; a mistake raises ValueError."""
    text = getattr(arguments, name)
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{arguments.options[name][0]} {text}: expected {expected}")
    return [int(part) for part in parts]


def _check_mesh_options(arguments: argparse.Namespace, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for an option without effect on the mesh; axes that do not exist are the plan's to report."""
    no_effect = f"{{}} has no effect on --mesh {arguments.mesh}: omit it, or "
    for name, axis in AXIS_OF.items() if mesh.keys() <= set(AXES) else ():
        refuse(arguments, (axis not in mesh, [name], f"{no_effect}add the axis {axis}"))
    are_without = count_shares(mesh, "tokens") == 1 or mesh.get("fsdp", 1) > 1
    of_replicas = [name for name in ("bucket_cap_mb", "optimizer_sharding") if name in arguments.options]
    refuse(arguments, (are_without, of_replicas, f"{no_effect}use the axis dp without fsdp"))
    if arguments.gradient_dtype and not (arguments.optimizer_sharding or arguments.master_weights):
        raise ValueError("--gradient-dtype is for --optimizer-sharding or --master-weights: omit it, or add one")
