"""What a check of `leeway doctor` answers, and what the whole is worth.

Checks are functions that yield findings. They never raise for what they look for: a Redis that does
not answer is a finding, not an error of the doctor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

Severity = Literal["ok", "note", "warning", "error"]
"""ok: as it should be. note: worth knowing, nothing to do. warning: the run works, but worse than
it could or not for long. error: the run cannot work, or trains on wrong numbers."""

EXIT_CODES: Final[dict[Severity, int]] = {"ok": 0, "note": 0, "warning": 1, "error": 2}

Number = int | float | str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the answer."""

    part: str
    """What was looked at: machine, versions, memory, redis, clock, transfer, engines, and so on."""
    name: str
    severity: Severity
    text: str
    """What was found, in a few words with the numbers."""
    remedy: str | None = None
    """What to do. None where there is nothing to do: warnings and errors have one."""
    facts: dict[str, Number] = {}
    """The numbers of the text for `--json`, with units in their names."""


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest of them; ok for none. [ok, error, warning] -> error."""
    gravest_first: list[Severity] = ["error", "warning", "note"]
    found = {finding.severity for finding in findings}
    for severity in gravest_first:
        if severity in found:
            return severity
    return "ok"


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without warnings and errors, 1 with a warning, 2 with an error."""
    return EXIT_CODES[worst(findings)]


class Part:
    """Makes the findings of one part."""

    def __init__(self, part: str) -> None:
        self._part = part

    def ok(self, name: str, text: str, **facts: Number) -> Finding:
        """As it should be."""
        return self._finding(name, "ok", text, None, facts)

    def note(self, name: str, text: str, **facts: Number) -> Finding:
        """Worth knowing."""
        return self._finding(name, "note", text, None, facts)

    def warning(self, name: str, text: str, remedy: str, **facts: Number) -> Finding:
        """Works, but worse than it could."""
        return self._finding(name, "warning", text, remedy, facts)

    def error(self, name: str, text: str, remedy: str, **facts: Number) -> Finding:
        """Cannot work."""
        return self._finding(name, "error", text, remedy, facts)

    def _finding(
        self, name: str, severity: Severity, text: str, remedy: str | None, facts: dict[str, Number]
    ) -> Finding:
        return Finding(
            part=self._part, name=name, severity=severity, text=text, remedy=remedy, facts=facts
        )


def at_least(
    part: Part, name: str, value: float, wanted: float, unit: str, remedy: str, *, is_error: bool
) -> Finding:
    """A quantity that must not be too small: 3.2 GiB of at least 6."""
    fact = {f"{unit.lower()}": round(value, 3)}
    shown = f"{value:,.1f} {unit}" if value % 1 else f"{value:,.0f} {unit}"
    if value >= wanted:
        return part.ok(name, shown, **fact)
    text = f"{shown}, less than {wanted:,.4g}"
    return (part.error if is_error else part.warning)(name, text, remedy, **fact)
