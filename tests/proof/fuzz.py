"""What others may have written, by the million: each seed is one round of each decoder."""

from __future__ import annotations

from tests.proof.simulated import Seed


def fuzzed(seed: int) -> Seed:
    """Let each decoder read what this *seed* gives."""
    from tests.fuzz.decoder import round_of  # only here, as they import the drivers of all stores
    from tests.fuzz.decoders import DECODERS

    found = {name: text for name, decoder in DECODERS.items() if (text := round_of(decoder, seed))}
    what = "; ".join(text.partition("\n")[0] for text in found.values())
    return Seed(seed, len(DECODERS), what, f"python -m tests.fuzz {' '.join(found)} --seed {seed}" if found else "")
