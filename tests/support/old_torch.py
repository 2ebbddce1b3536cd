"""Whether the installed torch is older than the one that the tables are written for."""

import torch

# An older torch lacks some ops, or their kernels for the meta device.
WRITTEN_FOR = (2, 13)
OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < WRITTEN_FOR
