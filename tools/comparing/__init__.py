"""The parts of tools/comparison.py: the models, the other tools, and how they are run and shown."""
