"""Models and pipelines of diffusers, from configurations without weights."""

import inspect
import json
from collections import Counter

import pytest
import torch
from PIL import Image

from fvflops import FlopCountAnalysis, parameter_count
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from tests.support.models.diffusers_pipelines import PIPELINES, write_pipeline
from tests.support.random_cases import long_except
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="pipelines have text encoders of transformers")

# Pipelines that call the denoiser twice instead of with a doubled batch, or once, as Flux's guidance is an input.
SINGLE = ("FluxPipeline", "WanPipeline")
# Pipelines whose text has one length, or none.
FIXED_TEXT = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "DiTPipeline", "StableVideoDiffusionPipeline")
VIDEOS = ("CogVideoXPipeline", "WanPipeline", "LTXPipeline", "StableVideoDiffusionPipeline")


def options_for(name, **changes):
    fields = {"image_size": (32, 32), "seq": None if name in FIXED_TEXT else 20, **changes}
    if name in VIDEOS:
        fields["args"] = ("num_frames=5",)
    return SourceOptions(**fields)


def count(name, folder, **changes):
    subject = load_model(f"diffusers:{folder}", options_for(name, **changes))
    return FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False)


@pytest.mark.parametrize("name", long_except(("StableDiffusionPipeline", "WanPipeline", "DiTPipeline"), PIPELINES))
def test_steps_and_guidance_multiply_the_denoiser_alone(name, tmp_path):
    folder = write_pipeline(tmp_path / "pipeline", name)
    once = count(name, folder).by_module()
    assert all(once[component] > 0 for component in PIPELINES[name])
    assert once[""] == sum(once[component] for component in PIPELINES[name])
    steps = count(name, folder, denoising_steps=4, guidance=True).by_module()
    for component in PIPELINES[name]:
        assert steps[component] == once[component] * (8 if component in ("unet", "transformer") else 1)


@pytest.mark.parametrize("name", PIPELINES)
def test_components_get_the_shapes_that_the_pipeline_passes(name, tmp_path):
    """The twin: the pipeline's own call on random weights, with the tensors that reach its denoiser and decoder."""
    folder = write_pipeline(tmp_path / "pipeline", name)
    subject = load_model(f"diffusers:{folder}", options_for(name, device="cpu", guidance=name not in SINGLE))
    calls = run_pipeline(name, subject)
    denoiser = "unet" if "unet" in PIPELINES[name] else "transformer"
    expected, passed = calls[denoiser], describe(subject.kwargs[denoiser])
    assert {key: value for key, value in passed.items() if key not in OPTIONAL} == {
        key: value for key, value in expected.items() if key not in OPTIONAL
    }
    assert calls["vae"]["z"] == describe(subject.kwargs["vae"])["z"]


# Tensors that the pipelines pass and that change no count: masks, of which all positions are kept, and scales.
OPTIONAL = ("encoder_attention_mask", "attention_mask", "rope_interpolation_scale", "video_coords")


def describe(kwargs):
    """Name → shape of the tensors, nested ones by their path, and the value of integers; a scalar is a batch of one."""
    found = {}
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            found[key] = tuple(value.shape)
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": shape for inner, shape in describe(value).items()}
        elif isinstance(value, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in value):
            found |= {f"{key}.{index}": tuple(item.shape) for index, item in enumerate(value)}
        elif isinstance(value, int) and not isinstance(value, bool):
            found[key] = value
    return {key: value for key, value in found.items() if key != "timestep"}


def run_pipeline(name, subject):
    """Run the pipeline for one step and return component → name → shape of its last call."""
    calls, counts = {}, Counter()
    pipeline_class = getattr(diffusers, name)
    components = dict(subject.model.named_children())
    vae = components["vae"]
    denoiser_name = "unet" if "unet" in components else "transformer"
    denoiser = components[denoiser_name]

    def remember(module, args, kwargs):
        names = list(inspect.signature(module.forward).parameters)
        calls[denoiser_name] = describe({**dict(zip(names, args, strict=False)), **kwargs})
        counts[denoiser_name] += 1

    decode = vae.decode

    def remember_decode(z, *args, **kwargs):
        calls["vae"] = describe({"z": z})
        return decode(z, *args, **kwargs)

    vae.decode = remember_decode
    denoiser.register_forward_pre_hook(remember, with_kwargs=True)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    missing = {key: None for key, item in parameters.items() if item.default is item.empty and key != "self"}
    flow = name in ("StableDiffusion3Pipeline", "FluxPipeline", "WanPipeline", "LTXPipeline")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler() if flow else diffusers.DDIMScheduler()
    if name == "StableDiffusionXLPipeline":
        missing["add_watermarker"] = False
    if name == "StableVideoDiffusionPipeline":
        scheduler = diffusers.EulerDiscreteScheduler(prediction_type="v_prediction", use_karras_sigmas=True)
        missing["feature_extractor"] = feature_extractor()
    pipeline = pipeline_class(**{**missing, **components, "scheduler": scheduler})
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        pipeline(**call_arguments(name, subject.kwargs[denoiser_name]), num_inference_steps=1, output_type="pt")
    assert counts[denoiser_name] in (1, 2)  # two: guidance as two calls
    return calls


def feature_extractor():
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor()


def call_arguments(name, inputs):
    """Arguments of the pipeline's call: the text's embeddings instead of a prompt, since there is no tokenizer."""
    if name == "DiTPipeline":
        return {"class_labels": [1]}
    if name == "StableVideoDiffusionPipeline":
        return {"image": Image.new("RGB", (32, 32)), "height": 32, "width": 32, "num_frames": 5}
    arguments = {"height": 32, "width": 32, **({"num_frames": 5} if name in VIDEOS else {})}
    text = inputs["encoder_hidden_states"][:1]
    if name == "FluxPipeline":  # its guidance is an input, so that the batch is not doubled
        return {**arguments, "prompt_embeds": text, "pooled_prompt_embeds": inputs["pooled_projections"][:1]}
    arguments |= {"prompt_embeds": text, "negative_prompt_embeds": text, "guidance_scale": 5.0}
    if name == "StableDiffusionXLPipeline":
        pooled = inputs["added_cond_kwargs"]["text_embeds"][:1]
        return {**arguments, "pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": pooled}
    if name == "StableDiffusion3Pipeline":
        pooled = inputs["pooled_projections"][:1]
        return {**arguments, "pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": pooled}
    if name in ("PixArtAlphaPipeline", "LTXPipeline"):
        mask = torch.ones(1, text.shape[1])
        arguments |= {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask, "negative_prompt": None}
    if name == "PixArtAlphaPipeline":
        arguments["use_resolution_binning"] = False
    return arguments


def test_equal_steps_run_twice_and_count_fifty_times(tmp_path):
    folder = write_pipeline(tmp_path / "pipeline", "PixArtAlphaPipeline")
    subject = load_model(f"diffusers:{folder}", options_for("", denoising_steps=50))
    calls = []
    subject.model.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    flops = FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False)
    rows = [row for row in flops.module_calls() if row.module == "transformer"]
    assert len(rows) == 50 and len({row.flops for row in rows}) == 1
    assert len(calls) == 2


def test_the_command_shows_a_row_for_each_component(tmp_path, capsys):
    folder = write_pipeline(tmp_path / "pipeline", "StableDiffusionPipeline")
    assert main(["count", f"diffusers:{folder}", "--denoising-steps", "20", "--guidance", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["about"]["model"] == "StableDiffusionPipeline"
    rows = report["columns"]["flops"]
    subject = load_model(f"diffusers:{folder}")
    once = FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False).by_module()
    assert rows["unet"] == 40 * once["unet"] and rows["vae"] == once["vae"]


def test_a_model_of_a_configuration_has_the_inputs_of_its_forward(tmp_path):
    folder = write_pipeline(tmp_path / "pipeline", "StableDiffusionPipeline")
    options = SourceOptions(config=str(folder / "unet"), args=("layers_per_block=2",), batch=2, seq=7)
    subject = load_model("diffusers:UNet2DConditionModel", options)
    by_hand = diffusers.UNet2DConditionModel(
        **{**PIPELINES["StableDiffusionPipeline"]["unet"][2], "layers_per_block": 2}
    )
    inputs = torch.zeros(2, 4, 16, 16), torch.ones(2), torch.zeros(2, 7, 32)
    expected = FlopCountAnalysis(by_hand, inputs, warn=False)
    counted = FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False)
    assert counted.by_module() == expected.by_module()


# huggingface.co: Stable Diffusion 1.5's UNet and autoencoder.
@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [
        ("UNet2DConditionModel", {"cross_attention_dim": 768}, 859_520_964),
        (
            "AutoencoderKL",
            {
                "block_out_channels": [128, 256, 512, 512],
                "down_block_types": ["DownEncoderBlock2D"] * 4,
                "up_block_types": ["UpDecoderBlock2D"] * 4,
                "layers_per_block": 2,
            },
            83_653_863,
        ),
    ],
)
def test_parameters_are_those_published(name, settings, parameters):
    subject = load_model(f"diffusers:{name}", SourceOptions(config=json.dumps(settings)))
    assert parameter_count(subject.model)[""] == parameters


@pytest.mark.parametrize(
    "name", ["AutoencoderTiny", "AutoencoderKLWan", "FluxTransformer2DModel", "ControlNetModel", "UNetMotionModel"]
)
def test_models_of_default_configurations_run(name):
    subject = load_model(f"diffusers:{name}")
    assert FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False).total() > 1e9


def damage(folder, change):
    index = json.loads((folder / "model_index.json").read_text())
    change(index, folder)
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda index, _: index.update(_class_name="StableDifusionPipeline"), {}, "the nearest are 'StableDiffusion"),
        (lambda index, _: index.pop("unet"), {}, "has no unet and no transformer"),
        (lambda index, _: index.update(controlnet=["diffusers", "ControlNetModel"]), {}, None),
        (lambda _, folder: (folder / "vae" / "config.json").unlink(), {}, "vae: this folder has no config.json"),
        (lambda index, _: index.update(vae=["diffusers", "AutoencoderK"]), {}, "the nearest are 'AutoencoderKL'"),
        (lambda index, _: index.update(vae=["mine", "AutoencoderKL"]), {}, "diffusers has no pipeline library 'mine'"),
        (lambda index, _: None, {"args": ("heigth=64",)}, "has no such size: did you mean 'height'?"),
        (lambda index, _: None, {"args": ("height=0",)}, "--arg height=0: must be an integer of at least 1"),
        (lambda index, _: None, {"image_size": (33, 32)}, "a height of 33 pixels is not a multiple of 2"),
        (lambda index, _: None, {"config": "{}"}, "--config: the pipeline "),
        (lambda index, _: None, {"seq": 20}, "--seq does not apply to this pipeline, which pads every text"),
    ],
)
def test_a_wrong_pipeline_is_an_error_that_says_what_to_do(tmp_path, change, options, message):
    folder = write_pipeline(tmp_path / "pipeline", "StableDiffusionPipeline")
    damage(folder, change)
    if message is None:  # a model that no rule runs
        (folder / "controlnet").mkdir()
        (folder / "controlnet" / "config.json").write_text("{}")
        message = "the component controlnet (ControlNetModel) cannot be counted in a pipeline: count it alone"
    with pytest.raises(ValueError) as caught:
        load_model(f"diffusers:{folder}", SourceOptions(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("UNet2DConditionModle", {}, "the nearest are 'UNet2DConditionModel'"),
        ("UNet2DModel", {"args": ("sample_sise=3",)}, "did you mean 'sample_size'?"),
        ("UNet2DModel", {"denoising_steps": 3}, "--denoising-steps applies to a pipeline"),
        ("UNet2DModel", {"seq": 20}, "--seq does not apply to the default inputs of diffusers:UNet2DModel"),
        ("UNet2DModel", {"image_size": (100, 64)}, "a height of 100 pixels is not a multiple of 8"),
        ("UNet2DModel", {"config": '{"block_out_channels": 3}'}, "cannot be built from this configuration"),
        ("some/folder", {}, "there is no such folder"),
        ("UVit2DModel", {}, "has no default input input_ids, encoder_hidden_states"),
    ],
)
def test_a_wrong_model_is_an_error_that_says_what_to_do(name, options, message):
    with pytest.raises(ValueError) as caught:
        load_model(f"diffusers:{name}", SourceOptions(**options))
    assert message in str(caught.value)
