"""The YAML files of fvflops, as the package fvflops.configs, so that an editable install finds them too."""
