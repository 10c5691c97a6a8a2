"""Measurements on a live network. Nothing here ever changes the network."""

from growth_service.probing.candidates import Candidate
from growth_service.probing.jumpboard import Jumpboard, jumpboard
from growth_service.probing.probe import probe
from growth_service.probing.report import SaturationReport, SiteReport

__all__ = ["Candidate", "Jumpboard", "SaturationReport", "SiteReport", "jumpboard", "probe"]
