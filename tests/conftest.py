"""What every test needs: torchvision's schemas, before anything imports it."""

from tests.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
