"""Models of timm, torchvision and transformers in eval mode: draws or data affect control flow in EXCEPTIONS only."""

from fnmatch import fnmatchcase

import pytest
import torch

from fvflops import record_call
from fvflops.capture.run import ExecutionError
from fvflops.sources.load import load_model, load_source
from fvflops.sources.options import SourceOptions
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

pytestmark = pytest.mark.long

# Patterns of models whose cost depends on the data in eval mode → why.
EXCEPTIONS = {
    "torchvision:*rcnn*": "boxes are selected by score",
    "torchvision:fcos*": "boxes are selected by score",
    "torchvision:retinanet*": "boxes are selected by score",
    "torchvision:ssd*": "boxes are selected by score",
    "transformers:Idefics[23]*": "images of zeros are dropped",
    "transformers:SmolVLM*": "images of zeros are dropped",
    "transformers:*ModernVBert*": "images of zeros are dropped",
    "transformers:Vilt*": "patches are drawn at random, and their mask is read",
    "transformers:SwitchTransformers*": "experts without tokens are skipped",
}
# Library → every how many of its models one is tested.
STEPS = {"timm": 60, "torchvision": 6, "transformers": 80}
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXT_MODELS = ("Bert", "Llama", "Mixtral", "Gemma2", "Qwen3", "Longformer", "DebertaV2", "ModernBert", "Mamba", "Phi3")


@pytest.mark.parametrize("library", STEPS)
def test_control_flow_in_eval_mode_depends_on_neither_draws_nor_data(library):
    pytest.importorskip(library)
    define_torchvision_schemas()
    counted, noted = 0, {}
    for name in load_source(library).list_names()[:: STEPS[library]]:
        model = f"{library}:{name}"
        if any(fnmatchcase(model, pattern) for pattern in EXCEPTIONS):
            continue
        try:
            subject = load_model(model, SourceOptions(device="meta"))
            subject.train(False)
            args = subject.inputs if isinstance(subject.inputs, tuple) else (subject.inputs,)
            info = record_call(subject.model, args, dict(subject.kwargs), quiet=True).info
        except ExecutionError as error:  # without weights, a read of the data
            noted[model] = str(error)
        except Exception:  # a model without default inputs, or another library that is not installed
            continue
        else:
            counted += 1
            if info.random or info.data_dependent:
                noted[model] = info
    assert not noted and counted > 5


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_control_flow_in_real_execution_depends_on_no_activations(name):
    """Their code reads masks, token ids and positions, which real execution must distinguish from activations."""
    transformers = pytest.importorskip("transformers")
    define_torchvision_schemas()
    model_class = getattr(transformers, f"{name}Model")
    config = model_class.config_class(**TEXT)
    for key, value in {"head_dim": 8, "num_local_experts": 4, "attention_window": [8, 8], "pad_token_id": 0}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    ids = torch.randint(5, 90, (2, 24))
    mask = torch.ones_like(ids).index_fill(1, torch.arange(20, 24), 0)
    inputs = {"input_ids": ids} if name == "Mamba" else {"input_ids": ids, "attention_mask": mask}
    info = record_call(model_class(config).eval(), (), inputs, execution="real", quiet=True).info
    assert (info.random, info.data_dependent) == ((), ())
