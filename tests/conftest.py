"""What every test needs: torchvision's schemas, before anything imports it, and no wish for colour in what is printed."""

import os

from tests.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # set by some CI systems, inherited by the commands that tests start
    os.environ.pop(name, None)
