"""Changes to a live network: depth, width, removal, the optimiser's part, the log."""

from growth_service.growth.duplicate import duplicate_units
from growth_service.growth.insert import insert_block, record_jumpboard
from growth_service.growth.log import growth_log
from growth_service.growth.merge import merge
from growth_service.growth.remove import remove_block, remove_units
from growth_service.growth.replay import follow, rebuild
from growth_service.growth.stream import widen_stream
from growth_service.growth.transplant import adopt
from growth_service.growth.widen import new_heads, new_units, widen

__all__ = [
    "adopt",
    "duplicate_units",
    "follow",
    "growth_log",
    "insert_block",
    "merge",
    "new_heads",
    "new_units",
    "rebuild",
    "record_jumpboard",
    "remove_block",
    "remove_units",
    "widen",
    "widen_stream",
]
