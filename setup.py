"""Lists the packages, which setup.cfg cannot: those under fvflops/, and configs/ as fvflops.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fvflops", "fvflops.*"]), "fvflops.configs"],
    package_dir={"fvflops.configs": "configs"},
)
