"""One seed, many independent random streams, named by what they are for."""

import hashlib


def stream_seed(seed: int, *purpose: str | int) -> int:
    """Seed of the stream ``purpose`` of a job: equal inputs give equal streams, others do not mix.

    Args:
        seed: Of the job or trial.
        purpose: What the stream is for, for example ``("candidate", stage, path)``.

    Returns:
        A non-negative 63-bit integer, accepted by numpy and torch generators.
    """
    text = "\x1f".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
