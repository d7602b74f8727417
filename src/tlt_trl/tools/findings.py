"""What `tlt-trl doctor` finds, and how it is told. Imports nothing that a broken installation could break."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One line of the report.

    Attributes:
        section (`str`):
            Heading.
        name (`str`):
            What was looked at.
        value (`str`):
            What was found.
        ok (`bool`, *optional*):
            Whether it is as it must be; `None` for what is only told.
    """

    section: str
    name: str
    value: str
    ok: bool | None = None


def collect(section: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """
    All findings of a check; one that ends in an error is a finding of `section` itself.

    The traceback goes to the log: libraries raise whatever they like, and a report that stops there tells nothing.
    """
    findings = []
    try:
        for finding in look():
            findings.append(finding)
    except (Exception, SystemExit) as error:
        logger.error("A check of the section %r ended in an error.", section, exc_info=error)
        findings.append(Finding(section, type(error).__name__, " ".join(str(error).split()), False))
    return findings


def is_ok(findings: Iterable[Finding]) -> bool:
    return all(finding.ok is not False for finding in findings)


def as_table(findings: list[Finding]) -> str:
    """The report for a terminal."""
    marks = {True: "ok", False: "FAIL", None: ""}
    width = max(len(finding.name) for finding in findings)
    lines, section = [], ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        lines.append(f"  {marks[finding.ok]:4}  {finding.name:{width}}  {finding.value}")
    failed = [finding.name for finding in findings if finding.ok is False]
    verdict = f"{len(failed)} problems: " + "; ".join(failed) if failed else "Everything is as it must be."
    return "\n".join([*lines, "", verdict]).strip("\n")
