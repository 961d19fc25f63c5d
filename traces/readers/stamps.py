"""Exact conversion of the microseconds in a Chrome trace to integer nanoseconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from ..model import MAX_DURATION_NS

_MAX_DIGITS = 18  # 10**18 us is 31,000 years: past any epoch, and bounds the integer that is built


class BadStamp(ValueError):
    """A time that cannot be used; the message is the reason in a few words."""


def microseconds_to_ns(value: object, what: str = "time") -> int:
    """Integer ns of a time in us, given as int, Decimal or decimal string; never through a float.

    Raises:
        BadStamp: missing, not a number, not finite, or too large.
    """
    if value is None:
        raise BadStamp(f"no {what}")
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 10**_MAX_DIGITS:
            raise BadStamp(f"{what} out of range")
        return value * 1000
    if isinstance(value, str):
        whole, _, part = value.partition(".")
        if len(part) == 3 and len(whole) <= _MAX_DIGITS and (whole + part).isdecimal() and value.isascii():
            return int(whole + part)
        try:
            value = Decimal(value.strip())
        except InvalidOperation:
            raise BadStamp(f"{what} is not a number") from None
    if not isinstance(value, Decimal):
        raise BadStamp(f"{what} is not a number")
    if not value.is_finite():
        raise BadStamp(f"{what} is {'NaN' if value.is_nan() else 'infinite'}")
    if value and value.adjusted() >= _MAX_DIGITS:
        raise BadStamp(f"{what} out of range")
    return int(value.scaleb(3).to_integral_value())


def check_interval(start: int, end: int) -> None:
    """Reject an interval no kernel can have.

    Raises:
        BadStamp: zero, negative or over seven days long.
    """
    if end == start:
        raise BadStamp("zero duration")
    if end < start:
        raise BadStamp("negative duration")
    if end - start > MAX_DURATION_NS:
        raise BadStamp("duration over seven days")
