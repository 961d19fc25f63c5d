"""Constants of the choice's arithmetic: the same in every engine, so that all choose alike to the bit."""

from __future__ import annotations

import math
import struct

LOG2E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
"""ln 2 with its low bits cut off; the rest is :data:`LN2_LOW`."""
LN2_LOW = math.log(2.0) - LN2_HIGH
MAGIC = 12582912.0
"""1.5 * 2^23: added to a number below 2^22 it leaves the nearest integer in the lowest bits."""
LEAST, BIG = -87.0, 88.0
"""exp of anything below the first is as good as zero beside one; above the second it is infinite, the sigmoid zero."""
POLYNOMIAL = (0.0013863713247701526, 0.008367558009922504, 0.04166724160313606, 0.16666533052921295, 0.5, 1.0, 1.0)
"""exp on +-ln(2)/2, the highest power first; off by less than 2^-26 of its value before rounding."""
TINY = 1e-20
"""Added to the sum of the chosen scores."""


def fp32_bits(value: float) -> int:
    """The 32 bits of the nearest FP32 value."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
