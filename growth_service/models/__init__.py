"""Network families and the places where they may grow."""

from growth_service.models.families import FAMILIES, Family, ResidualMLP, ResNet, build
from growth_service.models.sites import Site, default_block_config, neighbour, resolve, sites

__all__ = [
    "FAMILIES",
    "Family",
    "ResNet",
    "ResidualMLP",
    "Site",
    "build",
    "default_block_config",
    "neighbour",
    "resolve",
    "sites",
]
