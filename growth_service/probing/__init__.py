"""Measurements on a live network. Nothing here ever changes the network."""

from growth_service.probing.candidates import Candidate
from growth_service.probing.informed import Informed, informed_block
from growth_service.probing.jumpboard import Jumpboard, jumpboard
from growth_service.probing.probe import probe
from growth_service.probing.removal import RemovalCost, UnitCost, removal_costs, unit_costs
from growth_service.probing.report import SaturationReport, SiteReport
from growth_service.probing.sequential import Looks

__all__ = [
    "Candidate",
    "Informed",
    "Jumpboard",
    "Looks",
    "RemovalCost",
    "SaturationReport",
    "SiteReport",
    "UnitCost",
    "informed_block",
    "jumpboard",
    "probe",
    "removal_costs",
    "unit_costs",
]
