"""``dgcrun --doctor``: problems that would stop or slow a compressed job here, and the speed of the links.

Frameworks are imported in child processes: one that crashes or hangs is a finding. Functions ``judge_...`` turn facts
into findings, each in one line, with advice.
"""

from __future__ import annotations

import functools
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from dgc_horovod import __version__, envvars
from dgc_horovod.launch import hosts
from dgc_horovod.launch.hosts import HostReport, Ssh
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning.cluster import PAYLOAD
from dgc_horovod.tools import link
from dgc_horovod.tools.build_horovod import HOROVOD_VERSION, HOROVODS_NAMES
from dgc_horovod.tools.link import Link

OK, NOTE, BAD = "ok", "note", "BAD"
_BUILD = "dgcrun --build-horovod builds it for what is installed here"
# Versions that must be the same on every host: name, keys in `HostReport.found`, and the mark if they differ.
_SAME_EVERYWHERE = (
    ("Horovod", ("horovod",), BAD),
    ("torch", ("torch",), BAD),
    ("TensorFlow", ("tensorflow", "tensorflow-cpu"), BAD),
    ("Python", ("python_version",), NOTE),
)
# Horovod's variables, each with the value that hinders, and how.
_HINDERING = (
    ("HOROVOD_AUTOTUNE", "1", "toggles Horovod's response cache, on which small messages depend"),
    ("HOROVOD_CACHE_CAPACITY", "0", "turns Horovod's response cache off: every step negotiates every message"),
)
_COLUMNS = 100
_CHILD_SECONDS, _LINK_SECONDS = 120, 60
_LINK = """
from dgc_horovod.tools.link import answer
found["bits"] = answer(sys.argv[1], int(sys.argv[2]), sys.stdin.readline().strip())
"""
_PACKAGES = """
import importlib.util, pathlib
from importlib import metadata
for name in ("horovod", "torch", "triton", "tensorflow", "tensorflow-cpu"):
    try: found[name.removesuffix("-cpu")] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
spec = importlib.util.find_spec("horovod")
record = pathlib.Path(spec.origin).with_name("metadata.json") if spec and spec.origin else None
found["built_for"] = json.loads(record.read_text()) if record and record.exists() else {}
from dgc_horovod.errors import BackendUnavailable
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.native import library
try: library.load()
except BackendUnavailable as error: found["not_native"] = str(error)
kernels = registry.choose("cpu")
found["kernels"], found["instructions"] = kernels.name, getattr(kernels, "instructions", "")
"""
_FRAMEWORK = """
import importlib
name = sys.argv[1]
framework = importlib.import_module(name)
found["version"] = framework.__version__
if name == "torch":
    found.update(cuda_built=framework.version.cuda, cuda=framework.cuda.is_available())
horovod = importlib.import_module("horovod." + name)
found["parts"] = [part for part in ("gloo", "mpi", "nccl", "cuda") if getattr(horovod, part + "_built")()]
if found.get("cuda"):
    from dgc_horovod.kernels import registry
    try: found["cuda_kernels"] = registry.choose("cuda:0").name
    except Exception as error: found["cuda_kernels"] = "none (" + str(error) + ")"
"""


class Finding(NamedTuple):
    """``OK``, ``NOTE`` or ``BAD``; the finding; and advice, if it is not ok."""

    mark: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts that child processes have found on this host; "error" in one of them is its error.

    Args:
        interpreter: Python that they ran.
        packages: versions of horovod, torch, tensorflow, triton; the frameworks that Horovod was built for; kernels.
        frameworks: findings of importing "torch" or "tensorflow", and Horovod for it, by name; those installed.
        mpirun: path of mpirun; "" if there is none.
    """

    interpreter: str
    packages: Mapping[str, Any]
    frameworks: Mapping[str, Mapping[str, Any]]
    mpirun: str = ""


def judge_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Judge environment variables, Horovod's and ours, that change how a compressed job runs."""
    findings = [
        Finding(NOTE, f"{name}={value} {effect}", "unset it")
        for name, value, effect in _HINDERING
        if environment.get(name) == value
    ]
    if (enabled := environment.get(envvars.ENABLED.name)) and not envvars.ENABLED.parse(enabled):
        text = f"{envvars.ENABLED.name}={enabled}: no job is activated, whatever else is set"
        findings.append(Finding(NOTE, text, "unset it to compress"))
    if path := environment.get(envvars.CONFIG_FILE.name):
        findings.append(Finding(OK, f"{envvars.CONFIG_FILE.name}: every job takes settings from {path}"))
    return findings or [Finding(OK, "no variable hinders a compressed job")]


def judge_horovod(facts: Facts) -> list[Finding]:
    """Judge Horovod's version, the frameworks it was built for, and its controllers."""
    version = facts.packages.get("horovod")
    if version is None:
        reason = facts.packages.get("error")
        text = f"{facts.interpreter} has no Horovod" + (f" ({reason})" if reason else "")
        return [Finding(BAD, text, _BUILD)]
    findings = [Finding(OK, f"Horovod {version}")]
    if version != HOROVOD_VERSION:
        findings = [Finding(NOTE, f"Horovod {version}: only {HOROVOD_VERSION} is tested", _BUILD)]
    findings += [_judge_framework(name, facts) for name in facts.frameworks]
    if not facts.frameworks:
        advice = "install one (pip install torch), then run dgcrun --build-horovod"
        return [*findings, Finding(BAD, "neither torch nor TensorFlow is installed", advice)]
    built = [found["parts"] for found in facts.frameworks.values() if "parts" in found]
    return findings + (_judge_parts(built[0], facts) if built else [])


def _judge_framework(name: str, facts: Facts) -> Finding:
    found = facts.frameworks[name]
    version = found.get("version") or facts.packages[name]
    built_for = facts.packages.get("built_for", {})
    built = built_for.get(HOROVODS_NAMES[name])
    if built not in (None, version):
        return Finding(BAD, f"Horovod was built for {name} {built}, installed is {version}", _BUILD)
    if "error" not in found:
        return Finding(OK, f"{name} {version}: Horovod is built for it" if built else f"{name} {version}")
    if built_for and built is None:
        return Finding(NOTE, f"Horovod was not built for {name}, of which {version} is installed", _BUILD)
    return Finding(BAD, f"import of {name} {version} and horovod.{name}: {found['error']}", _BUILD)


def _judge_parts(parts: Sequence[str], facts: Facts) -> list[Finding]:
    findings = []
    controllers = [name for part, name in (("gloo", "Gloo"), ("mpi", "MPI")) if part in parts]
    if not controllers:
        findings.append(Finding(BAD, "Horovod was built with neither Gloo nor MPI", _BUILD))
    elif "mpi" in parts and not facts.mpirun:
        advice = "launch with --gloo, or put the folder of mpirun on PATH"
        findings.append(Finding(NOTE, f"controllers: {', '.join(controllers)}, but no mpirun on PATH", advice))
    else:
        path = f" ({facts.mpirun})" if "mpi" in parts else ""
        findings.append(Finding(OK, f"controllers: {', '.join(controllers)}{path}"))
    torch = facts.frameworks.get("torch", {})
    if torch.get("cuda") and "cuda" not in parts:
        text = "Horovod was built without CUDA: it ends the process that gives it a CUDA tensor (broadcast_parameters)"
        findings.append(Finding(BAD, text, "docs/cuda.md, With Horovod; or broadcast before the model goes to the GPU"))
    elif (torch.get("cuda") or torch.get("cuda_built")) and "nccl" not in parts:
        advice = "build with HOROVOD_GPU_OPERATIONS=NCCL: dgcrun --build-horovod"
        findings.append(Finding(NOTE, "built without NCCL: GPU gradients go through host memory", advice))
    return findings


def judge_kernels(facts: Facts) -> list[Finding]:
    """Judge the kernels for CPU tensors, and for CUDA tensors if there is a GPU."""
    packages, torch = facts.packages, facts.frameworks.get("torch", {})
    name = packages.get("kernels")
    if name is None:
        advice = f"install dgc_horovod {__version__} for {facts.interpreter}"
        return [Finding(BAD, f"no kernels: {packages.get('error', 'unknown error')}", advice)]
    if name == "native":
        findings = [Finding(OK, f"CPU tensors: native ({packages['instructions']})")]
    else:
        reason = packages.get("not_native", f"{envvars.BACKEND.name} asks for them")
        advice = "install a C++ compiler, then dgc_horovod again" if "not_native" in packages else "set it to auto"
        findings = [Finding(NOTE, f"CPU tensors: {name}, several times slower than native: {reason}", advice)]
    if torch.get("cuda"):
        kernels, triton = torch.get("cuda_kernels", "none"), packages.get("triton")
        text = f"CUDA tensors: {kernels} (Triton {triton or 'is not installed'}); packets go through host memory"
        advice = "compare a short run with one of --compression none" if triton else "install triton: fewer launches"
        findings.append(Finding(NOTE, text, advice))
    elif torch.get("cuda_built"):
        text = f"torch is built for CUDA {torch['cuda_built']} and sees no CUDA device"
        findings.append(Finding(NOTE, text, "for a GPU look at nvidia-smi and CUDA_VISIBLE_DEVICES"))
    return findings


def judge_hosts(reports: Sequence[HostReport]) -> list[Finding]:
    """Judge whether every host is usable, and the versions that must be the same."""
    findings = []
    for report in reports:
        if report.problem:
            text, _, advice = report.problem.rpartition("; ")
            same = "the same Python environment must be at the same path on every host"
            findings.append(Finding(BAD, f"{report.host}: {text or advice}", advice if text else same))
    answered = [report for report in reports if report.found]
    shared = []
    for name, keys, mark in _SAME_EVERYWHERE:
        with_version: dict[str, list[str]] = {}
        for report in answered:
            version = next((report.found[key] for key in keys if report.found.get(key)), "none")
            with_version.setdefault(version, []).append(report.host)
        if len(with_version) > 1:
            parts = [f"{version} on {_some(names)}" for version, names in with_version.items()]
            findings.append(Finding(mark, f"{name}: {'; '.join(parts)}", "install the same version on every host"))
        shared += [f"{name} {version}" for version in with_version if len(with_version) == 1 and version != "none"]
    fit = [report.host for report in reports if not report.problem]
    if fit:
        findings.insert(0, Finding(OK, f"{_some(fit)}: {', '.join(shared)}"))
    return findings


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def judge_links(links: Sequence[Link], any_remote: bool) -> list[Finding]:
    """Judge the measured links; `any_remote`: whether the job has other hosts than this one."""
    if not any_remote:
        text = "only this host: its ranks exchange through memory, where compression rarely pays"
        return [Finding(NOTE, text, "name the hosts with -H a:8,b:8")]
    if not links:
        return [Finding(NOTE, "none measured: no other host is usable", "solve the problems marked BAD above")]
    return [_judge_link(each) for each in links]


def _judge_link(each: Link) -> Finding:
    if each.problem:
        advice = "let the hosts connect to one another on any TCP port: Horovod's ranks need it too"
        return Finding(BAD, f"{each.host}: {each.problem}", advice)
    there, back = each.there_bits, each.back_bits
    text = f"{each.host}: {_rate(there)} there, {_rate(back)} back, round trip {1e3 * each.round_trip:.2f} ms"
    if max(there, back) > 2 * min(there, back):
        return Finding(NOTE, text, "the slower direction decides: look for other traffic, limits, a duplex mismatch")
    return Finding(OK, text)


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 10**10 else f"{bits / 1e6:,.0f} Mbit/s"


# -- all of it


def run(args: Namespace, job: Job, ssh: Ssh) -> int:
    """Run ``dgcrun --doctor``, see `diagnose`.

    Args:
        args: Horovod's parsed arguments, with ours.
        job: resolved settings of the job.
        ssh: way in which the other hosts are reached.
    """
    envvars.put_into_environment({envvars.BACKEND.name: job.get(envvars.BACKEND)})
    interpreter = hosts.interpreter_of(args.command) or sys.executable
    return diagnose(hosts.host_slots(args), interpreter, ssh)


def diagnose(slots: str, interpreter: str, ssh: Ssh) -> int:
    """Print the findings; returns 1 if one would stop a compressed job, else 0.

    Args:
        slots: hosts and their slots, ``a:8,b:8``; "" for this host.
        interpreter: Python that the job runs.
        ssh: way in which the other hosts are reached.
    """
    names = hosts.names_of(slots) or ["localhost"]
    remote = [name for name in names if hosts.is_remote(name)]
    findings = _say("environment", judge_environment(envvars.environment()))
    facts = _probe(interpreter)
    findings += _say("Horovod", judge_horovod(facts))
    findings += _say("kernels", judge_kernels(facts))
    reports = hosts.examine(names, interpreter, ssh)
    findings += _say("hosts", judge_hosts(reports))
    fit = {report.host for report in reports if not report.problem}
    links = [_measure(name, interpreter, ssh) for name in remote if name in fit]
    findings += _say("links", judge_links(links, bool(remote)))
    bad = sum(finding.mark == BAD for finding in findings)
    print(f"\n{f'{bad} of the findings, marked BAD,' if bad else 'nothing here'} would stop a compressed job")
    rates = [min(each.there_bits, each.back_bits) / PAYLOAD / 1e9 for each in links if not each.problem]
    link_gbps, workers = f"{min(rates, default=1.0):.3g}", max(hosts.sizes_of(slots), default=1)
    print(
        "whether it pays for your model: dgcrun --plan --model-size 25.6M --step-ms 180 "
        f"--link-gbps {link_gbps} --workers-per-node {workers}"
    )
    return 1 if bad else 0


def _say(title: str, findings: list[Finding]) -> list[Finding]:
    print(title, flush=True)
    for mark, text, advice in findings:
        for words, first in ((text, f"  {mark:6}"), (advice, " " * 8)):
            wrapper = textwrap.TextWrapper(_COLUMNS, first, " " * 8, break_long_words=False, break_on_hyphens=False)
            if words:
                print(wrapper.fill(words), flush=True)
    return findings


# -- facts


def _probe(interpreter: str) -> Facts:
    """Examine Horovod, the frameworks and the kernels of this host, each in a child process of its own."""
    here = functools.partial(hosts.ask, "localhost", interpreter, ssh=Ssh(), seconds=_CHILD_SECONDS)
    packages = here(_PACKAGES)
    names = [name for name in ("torch", "tensorflow") if packages.get(name)]
    with ThreadPoolExecutor() as pool:
        frameworks = pool.map(lambda name: here(_FRAMEWORK, arguments=[name]), names)
        return Facts(interpreter, packages, dict(zip(names, frameworks, strict=True)), shutil.which("mpirun") or "")


def _measure(host: str, interpreter: str, ssh: Ssh) -> Link:
    there = functools.partial(hosts.ask, host, interpreter, _LINK, ssh, _LINK_SECONDS)
    return link.measure(host, hosts.own_address_towards(host), there)
