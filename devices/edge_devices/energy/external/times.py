"""The time column of a meter's table: seconds, milliseconds, epochs, clock times, dates."""

from __future__ import annotations

import re
from datetime import UTC, datetime

DAY_S = 86400.0
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # numbers from here on are an epoch in nano-, micro- or milliseconds
CLOCK = re.compile(r"(\d{1,3}):(\d{2})(?::(\d{2}(?:[.,:]\d{1,9})?))?\s*([ap]m)?", re.IGNORECASE)
DATE = re.compile(r"(\d{1,4})[-./](\d{1,2})[-./](\d{1,4})")


def number(text: str, *, decimal_comma: bool = False) -> float | None:
    """Returns a number, with a decimal comma where the table has them; None for anything else."""
    try:
        return float(text.replace(",", ".") if decimal_comma else text)
    except ValueError:
        return None


def seconds_of(text: str, factor: float, unit: str, *, decimal_comma: bool) -> float | None:
    """Returns the seconds of a time cell, of which only differences count; None for anything else."""
    plain = number(text, decimal_comma=decimal_comma)
    if plain is not None:
        return plain * (factor if unit else next((scale for least, scale in EPOCHS if abs(plain) >= least), factor))
    try:
        moment = datetime.fromisoformat(text.strip().replace(",", "."))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        pass
    clock, date = CLOCK.search(text), DATE.search(text)
    if clock is None:
        return None
    hours, minutes = int(clock[1]) % 12 + 12 * (clock[4].lower() == "pm") if clock[4] else int(clock[1]), int(clock[2])
    seconds = float(re.sub("[,:]", ".", clock[3])) if clock[3] else 0.0
    return _days(date) * DAY_S + hours * 3600 + minutes * 60 + seconds


def _days(date: re.Match[str] | None) -> float:
    if date is None:
        return 0.0
    first, second, third = int(date[1]), int(date[2]), int(date[3])
    year, month, day = (first, second, third) if first > 31 else (third, second, first) if second <= 12 else (third, first, second)
    try:
        return float(datetime(year if year > 99 else 2000 + year, month, day, tzinfo=UTC).toordinal())
    except ValueError:
        return 0.0


def continued(seconds: float, before: float | None) -> float:
    """Returns a clock time after midnight as later than the one before it; a time a little in the past is held (packets)."""
    if before is None or seconds >= before:
        return seconds
    if before - seconds > DAY_S / 2:
        return seconds + DAY_S * -(-(before - seconds) // DAY_S)
    return before
