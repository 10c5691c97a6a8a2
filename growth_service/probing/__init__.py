"""Measurements on a live network. Nothing here ever changes the network."""

from growth_service.probing.candidates import Candidate
from growth_service.probing.jumpboard import Jumpboard, jumpboard
from growth_service.probing.probe import probe
from growth_service.probing.report import SaturationReport, SiteReport
from growth_service.probing.sequential import PastLook, probe_until_decided

__all__ = [
    "Candidate",
    "Jumpboard",
    "PastLook",
    "SaturationReport",
    "SiteReport",
    "jumpboard",
    "probe",
    "probe_until_decided",
]
