"""Folders, configurations and tables of strangers: no network, no code, no other file's contents, no endless work."""

import gzip
import json
import os
import subprocess
import sys
import time

import pytest

import fvflops
from fvflops.cli import main
from fvflops.measure.kernels import profiler_trace
from fvflops.measure.kernels.profiler_trace import read_document
from fvflops.sources import SourceOptions, load_model
from tests.support.checkout import ROOT
from tests.support.hostile.forbidden_actions import forbidding_actions

transformers = pytest.importorskip("transformers")

TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
DETR = {
    "model_type": "detr",
    "architectures": ["DetrModel"],
    "use_timm_backbone": False,
    "backbone_config": None,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
# Name → config.json, and what the error says; None where the model is counted and the reference is not followed.
CONFIGS = {
    "a kernel of the hub": ({**TEXT, "attn_implementation": "hostile/kernel"}, "is code on a hub"),
    "a kernel of the hub, private": ({**TEXT, "_attn_implementation": "hostile/kernel:fn"}, "is code on a hub"),
    "a kernel of a part": ({**TEXT, "attn_implementation": {"": "hostile/kernel@main"}}, "is code on a hub"),
    "experts of the hub": ({**TEXT, "experts_implementation": "hostile/kernel"}, "is code on a hub"),
    "a kernel in a nested configuration": (
        {**TEXT, "text_config": {"attn_implementation": "hostile/kernel"}},
        "is code on a hub",
    ),
    "code of the repository": ({**TEXT, "model_type": "own", "auto_map": {"AutoModel": "x.Own"}}, "trust-remote-code"),
    "code of another repository": ({**TEXT, "auto_map": {"AutoModelForCausalLM": "hostile/repo--x.Own"}}, None),
    "a tokenizer elsewhere": ({**TEXT, "tokenizer_class": "hostile/repo", "_name_or_path": "hostile/repo"}, None),
    "a pretrained backbone": ({**DETR, "backbone": "hostile/backbone", "use_pretrained_backbone": True}, ""),
    "a pretrained backbone of timm": (
        {**DETR, "backbone": "resnet18", "use_timm_backbone": True, "use_pretrained_backbone": True},
        "",
    ),
    "timm's architecture on the hub": ({"architecture": "hf-hub:hostile/net", "model_args": {}}, "has no architecture"),
    "timm's weights": (
        {"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"], "architecture": "hf-hub:hostile/net"},
        "",
    ),
    "a million layers": ({**TEXT, "num_hidden_layers": 10**6}, "a model has at most 4,096 layers"),
    "a million experts": ({**TEXT, "model_type": "mixtral", "num_local_experts": 10**6}, "at most 4,096"),
}


def write_folder(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "x.py").write_text("open('canary', 'w')\nOwn = object\n")
    return f"hf:{folder}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_local_folder_uses_no_network_and_runs_no_code(tmp_path, monkeypatch, name, capsys):
    config, expected = CONFIGS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model = write_folder(tmp_path / "folder", config)
    with forbidding_actions(tmp_path) as seen:
        code = main(["count", model])
    error = capsys.readouterr().err
    assert not seen and not (tmp_path / "canary").exists()
    if expected is None:
        assert code == 0
    else:
        assert expected in error and (code == 0 or error.count("\n") == 1), error
    with forbidding_actions(tmp_path) as seen:
        try:
            load_model(model, SourceOptions(device="meta"))
        except ValueError as raised:
            assert code == 2 and "\n" not in str(raised)
    assert not seen


def test_a_pipeline_runs_no_kernel_of_the_hub(tmp_path, capsys):
    pytest.importorskip("diffusers")
    folder = tmp_path / "pipeline"
    (folder / "text_encoder").mkdir(parents=True)
    index = {"_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "CLIPTextModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "text_encoder" / "config.json").write_text(json.dumps({"attn_implementation": "hostile/kernel"}))
    for name in (f"diffusers:{folder}", f"hf:{folder}"):
        with forbidding_actions(tmp_path) as seen:
            assert main(["count", name]) == 2
        assert not seen and "is code on a hub" in capsys.readouterr().err


def test_offline_mode_ends_with_the_folder(tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    load_model(write_folder(tmp_path / "folder", TEXT), SourceOptions(device="meta"))
    assert constants.HF_HUB_OFFLINE is before


def test_an_adapter_imports_no_module_that_it_names(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hostile_core.py").write_text("open('canary', 'w')\n")
    lora = tmp_path / "lora"
    lora.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "megatron_config": {"a": 1}}
    (lora / "adapter_config.json").write_text(json.dumps({**settings, "megatron_core": "hostile_core"}))
    model = write_folder(tmp_path / "folder", TEXT)
    with forbidding_actions(tmp_path) as seen:
        assert main(["count", model, "--adapter", str(lora)]) == 2
    assert not seen and "adapters of Megatron layers are not supported" in capsys.readouterr().err


def test_files_of_the_current_folder_are_imported_only_where_one_is_named(tmp_path):
    for name in ("pebble", "timm", "transformers", "yaml", "huggingface_hub", "tqdm", "scipy", "iopath", "tabulate"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    (tmp_path / "my_net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 3), torch.ones(2, 4)\n"
    )
    code = "import sys; sys.path[0] = sys.argv.pop(1); from fvflops.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["sweep", "zoo:lenet5", "--output", "rows.csv", "--workers", "1"], ["count", "my_net:build"]):
        run = subprocess.run(
            [sys.executable, "-c", code, str(ROOT), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONSAFEPATH": ""},
        )
        assert run.returncode == 0, run.stderr
        assert not (tmp_path / "canary").exists(), arguments


@pytest.mark.parametrize("command", ["table", "budget"])
def test_a_table_shows_nothing_of_another_file(tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("secret:x:0:0\nsecret_key: secret_value\n")
    (tmp_path / "secret.yaml").symlink_to(tmp_path / "secret")
    for name in ("secret", "secret.yaml", str(tmp_path / "secret"), "../" * 20 + "etc/passwd", "secret.yaml/../secret"):
        if command == "table":
            (tmp_path / "mine.yaml").write_text(f"extends: {name}\n")
            code = main(["count", "zoo:lenet5", "--table", "mine.yaml"])
        else:
            (tmp_path / "budget.yaml").write_text(f"models: {{zoo:lenet5: {{flops: 1G, table: {name}}}}}\n")
            code = main(["check", "zoo:lenet5", "--budget", "budget.yaml"])
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1
        assert "secret:x" not in error and "secret_" not in error and "root:" not in error, error


def hostile_traces():
    """Return name → the JSON of a Trace that would take hours, or memory without end."""
    import torch

    trace = fvflops.FlopCountAnalysis(torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.ones(2, 4)).trace()
    good = json.loads(trace.to_json())
    good.pop("checksum", None)

    def change(name, put):
        value = json.loads(json.dumps(good))
        put(value)
        traces[name] = json.dumps(value)

    traces = {}
    spec = {"dtype": "float32", "device": "cpu", "layout": "nested"}
    for name, nested in {
        "a nested tensor of many parts": {"tensor": [1 << 40, 3], "values": [1]},
        "a nested tensor of parts without sizes": {"tensor": [1 << 40, 1 << 20], "values": []},
        "a nested tensor whose parts are larger": {"tensor": [1, 3], "values": [1 << 62]},
    }.items():
        change(name, lambda value, nested=nested: value["signatures"][0][1].__setitem__(0, {**spec, **nested}))
    change("a stack of a million modules", lambda value: value["stacks"].append([1] * 1_000_000))
    return traces


@pytest.mark.parametrize("limit", ["_MAX_CHARACTERS", "_MAX_ITEMS"])
def test_a_chrome_trace_has_a_limit_compressed_or_not(tmp_path, monkeypatch, limit, capsys):
    text = json.dumps({"traceEvents": [{}] * 100_000})
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(text.encode()))
    assert (tmp_path / "x.json.gz").stat().st_size < 10_000
    assert len(read_document(str(tmp_path / "x.json.gz"))["traceEvents"]) == 100_000
    monkeypatch.setattr(profiler_trace, limit, 50_000)
    for name in ("x.json", "x.json.gz"):
        assert main(["annotate", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert f"{name}: a chrome trace has at most" in error and error.count("\n") == 1


def test_hostile_traces_are_refused_quickly(tmp_path, capsys):
    for name, text in hostile_traces().items():
        (tmp_path / "x.json").write_text(text)
        begun = time.process_time()
        assert main(["count", str(tmp_path / "x.json")]) == 2, name
        assert time.process_time() - begun < 30
        error = capsys.readouterr().err
        assert str(tmp_path / "x.json") in error and error.count("\n") == 1
