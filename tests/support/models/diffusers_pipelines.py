"""Small pipelines of diffusers, as folders with configurations only."""

import json
from pathlib import Path

import yaml

# Pipeline → component → library, class and configuration.
PIPELINES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))["pipelines"]


def write_pipeline(folder: Path, name: str) -> Path:
    """Write a pipeline's model_index.json and its components' configurations; return the folder."""
    index = {"_class_name": name, "_diffusers_version": "0.42.1", "feature_extractor": [None, None]}
    for component, (library, class_name, settings) in PIPELINES[name].items():
        index[component] = [library, class_name]
        path = folder / component / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"_class_name": class_name, **settings}))
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
