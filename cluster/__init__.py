"""Where a study runs: the Ray of this machine, and later clusters."""

from cluster.embedded import embedded_ray

__all__ = ["embedded_ray"]
