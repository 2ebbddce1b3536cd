"""What every test needs: torchvision's schemas, before anything imports it, and nobody who forces colours."""

import os

from tests.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # set by some CI systems, inherited by the commands that tests start
    os.environ.pop(name, None)
