"""Changes to a live network: exact insertion and widening, the optimiser's part, the log."""

from growth_service.growth.surgery import growth_log, insert_block, rebuild, widen
from growth_service.growth.transplant import adopt

__all__ = ["adopt", "growth_log", "insert_block", "rebuild", "widen"]
