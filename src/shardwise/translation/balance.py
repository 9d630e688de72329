"""How often each language is drawn: sampling with a temperature.

Sizes of languages follow a power law, so drawing pairs evenly starves most languages, and drawing
languages evenly repeats the small ones hundreds of times.  Multilingual translation draws language l with

    p_l = n_l^(1/T) / sum_k n_k^(1/T)

and a pair of it evenly (Arivazhagan et al. 2019, section 4.2): T = 1 keeps the data's own shares, large
T makes languages equal.  They use T = 5, for languages of 10^4 to 10^9 pairs.  Here sizes range from one
to some 10^4 pairs, where T = 5 would show the smallest hundreds of times before the largest once:
the default is 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

TEMPERATURE = 2.0


def shares(sizes: Mapping[str, int], temperature: float = TEMPERATURE) -> dict[str, float]:
    """Language -> probability of drawing it; a language without pairs has none.

    Raises:
      ValueError: a temperature that is not positive, or no pairs at all.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, not {temperature}")
    counts = np.array(list(sizes.values()), np.float64)
    if not counts.sum() > 0:
        raise ValueError("no language has pairs to draw from")
    # In logarithms, so that a small temperature does not overflow.
    with np.errstate(divide="ignore"):
        logs = np.log(counts) / temperature
    weights = np.exp(logs - logs.max())
    return dict(zip(sizes, (weights / weights.sum()).tolist(), strict=True))
