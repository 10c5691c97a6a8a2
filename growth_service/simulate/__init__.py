"""Studies played in simulated compute, without torch or Ray: to test what decides across trials, and to plan."""

from growth_service.simulate.curves import Scenario, synthetic_trials
from growth_service.simulate.study import Played, play

__all__ = ["Played", "Scenario", "play", "synthetic_trials"]
