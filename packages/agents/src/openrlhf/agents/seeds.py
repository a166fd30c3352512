"""One seed per generation call, so that a sample does not depend on order, retries or neighbours."""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # engines take a signed 64-bit integer


def sample_seed(train_seed: int, evaluation: bool, episode: int, position: int, sample: int, turn: int) -> int:
    """A 63-bit hash of everything that identifies one generation call.

    Neighbouring integers would not do: an engine that adds the child index to the seed shares samples between them.
    """
    kind = "eval" if evaluation else "train"
    key = f"{train_seed}/{kind}/{episode}/{position}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - SEED_BITS)
