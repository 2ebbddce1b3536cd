"""Parts of tensor and expert parallelism: names of modules, transformers' own code, dispatch and routing of tokens."""
