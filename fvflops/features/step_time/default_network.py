"""The network that is assumed where none is given: that of the vendor's own node of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fvflops.features.step_time.calibration import find_network
from fvflops.features.step_time.network import Network
from fvflops.features.utilisation.devices import Device

# Beginning of a device's name → network.
_NETWORKS: Mapping[str, str] = {
    "A100 SXM": "HGX A100 1600G",
    "H100 SXM": "HGX H100 3200G",
    "H200": "HGX H100 3200G",
}


def assume_network(device: Device) -> Network | None:
    """Return the network of a device's family, which says in `source` that it is assumed; None for other devices.

    >>> from fvflops import find_device
    >>> network = assume_network(find_device("H100"))
    >>> network.name, network.source.partition(":")[0], assume_network(find_device("MI300X"))
    ('HGX H100 3200G', 'assumed for H100 SXM, since none is given', None)
    """
    name = next((network for prefix, network in _NETWORKS.items() if device.name.startswith(prefix)), None)
    if name is None:
        return None
    network = find_network(name)
    return replace(network, source=f"assumed for {device.name}, since none is given: {network.source}")
