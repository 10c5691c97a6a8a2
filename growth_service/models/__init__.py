"""Network families and the places where they may grow."""

from growth_service.models.families import FAMILIES, GPT, Family, ResidualMLP, ResNet, build
from growth_service.models.sites import Site, default_block, default_block_config, neighbour, resolve, site_of, sites

__all__ = [
    "FAMILIES",
    "GPT",
    "Family",
    "ResNet",
    "ResidualMLP",
    "Site",
    "build",
    "default_block",
    "default_block_config",
    "neighbour",
    "resolve",
    "site_of",
    "sites",
]
