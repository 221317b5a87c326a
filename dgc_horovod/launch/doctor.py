"""``dgcrun --doctor``: what would stop a compressed job here, what would slow it, and whether it pays.

What is found (`_probe`, `hosts.ask`, `link.measure`) is kept apart from what is made of it (the ``judge_`` functions,
which only look at facts). Frameworks are imported in child processes: one that crashes or hangs is a finding.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dgc_horovod import __version__, envvars
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import hosts, link
from dgc_horovod.launch.build_horovod import HOROVOD_VERSION
from dgc_horovod.launch.hosts import HostReport, Ssh
from dgc_horovod.launch.link import Link
from dgc_horovod.launch.plan import Plan, measure_compress, price, show
from dgc_horovod.launch.settings import Job

OK, NOTE, BAD = "ok", "note", "BAD"
_COLUMNS = 100
_CHILD_SECONDS, _LINK_SECONDS = 120, 60
_PAYLOAD = 1448 / 1538  # of what Ethernet carries in full frames is what TCP delivers
_BUILD = "dgcrun --build-horovod builds it for what is installed here"
_MARK = "DGC_FOUND "
_BEGIN = """
import json
found = {}
def version(*names):
    from importlib import metadata
    for name in names:
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: pass
try:
"""
_END = f"""
except Exception as error:
    found["error"] = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
print({_MARK!r} + json.dumps(found))
"""
_PACKAGES = """
    import importlib.util, pathlib
    found.update(horovod=version("horovod"), torch=version("torch"), triton=version("triton"))
    found["tensorflow"] = version("tensorflow", "tensorflow-cpu")
    spec = importlib.util.find_spec("horovod")
    record = pathlib.Path(spec.origin).with_name("metadata.json") if spec and spec.origin else None
    found["built_for"] = json.loads(record.read_text()) if record and record.exists() else {}
    from dgc_horovod.errors import BackendUnavailable
    from dgc_horovod.ops import native, registry
    try: native.load()
    except BackendUnavailable as error: found["not_native"] = str(error)
    kernels = registry.choose("cpu")
    found["kernels"], found["instructions"] = kernels.name, getattr(kernels, "instructions", "")
"""
_TORCH = """
    import torch
    found.update(version=torch.__version__, cuda_built=torch.version.cuda, cuda=torch.cuda.is_available())
    import horovod.torch as horovod
    found["parts"] = [part for part in ("gloo", "mpi", "nccl") if getattr(horovod, f"{part}_built")()]
    if found["cuda"]:
        from dgc_horovod.ops import registry
        try: found["cuda_kernels"] = registry.choose("cuda:0").name
        except Exception as error: found["cuda_kernels"] = f"none ({error})"
"""
_TENSORFLOW = """
    import tensorflow
    found["version"] = tensorflow.__version__
    import horovod.tensorflow as horovod
    found["parts"] = [part for part in ("gloo", "mpi", "nccl") if getattr(horovod, f"{part}_built")()]
"""
_KEYS_OF_BUILD = {"torch": "pytorch", "tensorflow": "tensorflow"}  # in Horovod's metadata.json
# What must be the same on every host, the keys of `HostReport.found` that tell, and how bad it is if it is not.
_SAME_EVERYWHERE = (
    ("Horovod", ("horovod",), BAD),
    ("torch", ("torch",), BAD),
    ("TensorFlow", ("tensorflow", "tensorflow-cpu"), BAD),
    ("Python", ("python_version",), NOTE),
)


class Finding(NamedTuple):
    """``OK``, ``NOTE`` or ``BAD``; what was found; and, where it is not ok, what to do."""

    mark: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Facts:
    """What child processes have found on this host; "error" in one of them says what went wrong there.

    Args:
        interpreter: the Python they ran.
        packages: versions of horovod, torch, tensorflow, triton; what Horovod was built for; the kernels.
        frameworks: "torch", "tensorflow" -> what importing it and Horovod for it has shown; those installed.
        mpirun: its path, "" if there is none.
    """

    interpreter: str
    packages: Mapping[str, Any]
    frameworks: Mapping[str, Mapping[str, Any]]
    mpirun: str = ""


def diagnose(slots: str, interpreter: str, ssh: Ssh, job: Job, plan: Plan | None) -> int:
    """Print what was found; returns 1 if something would stop a compressed job, else 0.

    Args:
        slots: the hosts, ``a:8,b:8``; "" for this one.
        interpreter: the Python that the job runs.
        ssh: how to reach the other hosts.
        job: what it asks for.
        plan: a model and a step for which to say whether compression pays; None: not asked.

    Raises:
        ConfigError: the plan needs a link, and none was given or measured.
    """
    names = list(dict.fromkeys(part.split(":")[0] for part in slots.split(",") if part)) or ["localhost"]
    remote = [name for name in names if hosts.is_remote(name)]
    if plan is not None and plan.link_bits is None and not remote:
        raise ConfigError("there is only this host, so no link to measure; give the plan its link with --link-gbps 1")
    findings = _say("environment", judge_environment(envvars.environment()))
    facts = _probe(interpreter, job)
    findings += _say("Horovod", judge_horovod(facts))
    findings += _say("kernels", judge_kernels(facts))
    reports = _ask(names, interpreter, ssh)
    findings += _say("hosts", judge_hosts(reports))
    fit = {report.host for report in reports if not report.problem}
    links = [_measure(name, interpreter, ssh) for name in remote if name in fit]
    findings += _say("links", judge_links(links, bool(remote)))
    bad = sum(finding.mark == BAD for finding in findings)
    print(f"\n{f'{bad} of the findings, marked BAD,' if bad else 'nothing here'} would stop a compressed job")
    if plan is not None:
        _say_whether_it_pays(_with_link(plan, links), job)
    else:
        print("whether it pays for your model: add --model-size 25.6M --step-ms 180 -np 16 [--link-gbps 1]")
    return 1 if bad else 0


def _say(title: str, findings: list[Finding]) -> list[Finding]:
    print(title, flush=True)
    for mark, text, advice in findings:
        print(_wrapped(text, f"  {mark:6}"))
        if advice:
            print(_wrapped(advice, " " * 8), flush=True)
    return findings


def _wrapped(text: str, first: str) -> str:
    wrapper = textwrap.TextWrapper(_COLUMNS, first, " " * 8, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def _say_whether_it_pays(plan: Plan, job: Job) -> None:
    method = job.method if job.config is not None else "dgc"
    config = job.config or DGCConfig(**PRESETS[method])
    rows = price(plan, config, method, measure_compress(plan.elements, config, plan.workers))
    print(f"\ndoes it pay?\n{textwrap.indent(show(plan, rows), '  ')}")


def _with_link(plan: Plan, links: Sequence[Link]) -> Plan:
    if plan.link_bits is not None:
        return plan
    measured = [min(each.there_bits, each.back_bits) for each in links if not each.problem]
    if not measured:
        raise ConfigError("no link could be measured; give the plan its link with --link-gbps 1")
    return replace(plan, link_bits=min(measured) / _PAYLOAD)


# -- finding out


def _probe(interpreter: str, job: Job) -> Facts:
    """Look at Horovod, the frameworks and the kernels of this host, each in a child process of its own."""
    environment = {**envvars.environment(), envvars.BACKEND.name: job.get(envvars.BACKEND)}
    packages = _child(interpreter, _PACKAGES, environment)
    codes = {name: code for name, code in (("torch", _TORCH), ("tensorflow", _TENSORFLOW)) if packages.get(name)}
    with ThreadPoolExecutor() as pool:
        frameworks = pool.map(lambda code: _child(interpreter, code, environment), codes.values())
        return Facts(interpreter, packages, dict(zip(codes, frameworks, strict=True)), shutil.which("mpirun") or "")


def _child(interpreter: str, code: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [interpreter, "-c", _BEGIN + code + _END]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_CHILD_SECONDS, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {_CHILD_SECONDS} s"}
    except OSError as error:
        return {"error": str(error)}
    lines = [line for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    if lines:
        return json.loads(lines[-1].removeprefix(_MARK))
    if ended.returncode < 0:
        return {"error": f"it crashed with {signal.Signals(-ended.returncode).name}"}
    said = ended.stderr.strip().splitlines() or ["no output"]
    return {"error": f"it ended with exit code {ended.returncode}: {said[-1]}"}


def _ask(names: Sequence[str], interpreter: str, ssh: Ssh) -> list[HostReport]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda report: _with_python(report, interpreter, ssh), hosts.ask(names, interpreter, ssh)))


def _with_python(report: HostReport, interpreter: str, ssh: Ssh) -> HostReport:
    if not report.found:
        return report
    try:
        said = hosts.run_on(report.host, [interpreter, "-V"], ssh).stdout.split()
    except subprocess.TimeoutExpired:
        return report
    return replace(report, found={**report.found, "python_version": said[-1] if said else ""})


def _measure(host: str, interpreter: str, ssh: Ssh) -> Link:
    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return hosts.run_on(host, [interpreter, "-m", link.__name__, *arguments], ssh, _LINK_SECONDS)

    try:
        return link.measure(host, hosts.own_address_towards(host), run)
    except OSError as error:
        return Link(host, problem=str(error))


# -- judging


def judge_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Settings of Horovod and of ours that change how a compressed job runs."""
    findings = []
    if environment.get("HOROVOD_AUTOTUNE") == "1":
        text = "HOROVOD_AUTOTUNE=1 toggles Horovod's response cache, on which small messages depend"
        findings.append(Finding(NOTE, text, "unset it"))
    if environment.get("HOROVOD_CACHE_CAPACITY") == "0":
        text = "HOROVOD_CACHE_CAPACITY=0 turns Horovod's response cache off: every step negotiates every message"
        findings.append(Finding(NOTE, text, "unset it"))
    if cycle := environment.get("HOROVOD_CYCLE_TIME"):
        if not _is_near_one(cycle):
            text = f"HOROVOD_CYCLE_TIME={cycle}: a message waits for the next cycle, by default one every 1 ms"
            findings.append(Finding(NOTE, text, "unset it"))
    if (enabled := environment.get(envvars.ENABLED.name)) and not envvars.ENABLED.parse(enabled):
        text = f"{envvars.ENABLED.name}={enabled}: nothing is compressed, whatever else is set"
        findings.append(Finding(NOTE, text, "unset it to compress"))
    if path := environment.get(envvars.CONFIG_FILE.name):
        findings.append(Finding(OK, f"{envvars.CONFIG_FILE.name}: every job takes settings from {path}"))
    return findings or [Finding(OK, "no setting stands in the way")]


def _is_near_one(cycle: str) -> bool:
    try:
        return 0.25 <= float(cycle) <= 4
    except ValueError:
        return False


def judge_horovod(facts: Facts) -> list[Finding]:
    """Horovod's version, what it was built for, and its controllers."""
    version = facts.packages.get("horovod")
    if version is None:
        reason = facts.packages.get("error")
        text = f"{facts.interpreter} has no Horovod" + (f" ({reason})" if reason else "")
        return [Finding(BAD, text, _BUILD)]
    right = version == HOROVOD_VERSION
    findings = [Finding(OK, f"Horovod {version}")] if right else [
        Finding(NOTE, f"Horovod {version}: only {HOROVOD_VERSION} is tested", _BUILD)
    ]  # fmt: skip
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
    built = built_for.get(_KEYS_OF_BUILD[name])
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
    if (torch.get("cuda") or torch.get("cuda_built")) and "nccl" not in parts:
        advice = "build with HOROVOD_GPU_OPERATIONS=NCCL: dgcrun --build-horovod"
        findings.append(Finding(NOTE, "built without NCCL: GPU gradients go through host memory", advice))
    return findings


def judge_kernels(facts: Facts) -> list[Finding]:
    """What compresses CPU tensors, and CUDA tensors where there are any."""
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
        triton = packages.get("triton")
        text = f"CUDA tensors: {torch.get('cuda_kernels', 'none')}; packets go through host memory; " + (
            f"Triton {triton} is installed, not used" if triton else "Triton is not installed"
        )
        findings.append(Finding(NOTE, text, "compare a short run with one of --compression none"))
    elif torch.get("cuda_built"):
        text = f"torch is built for CUDA {torch['cuda_built']} and sees no CUDA device"
        findings.append(Finding(NOTE, text, "for a GPU look at nvidia-smi and CUDA_VISIBLE_DEVICES"))
    return findings


def judge_hosts(reports: Sequence[HostReport]) -> list[Finding]:
    """Whether every host is fit, and the versions that must be the same."""
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
    """The measured links; `any_remote`: whether the job has a host but this one."""
    if not any_remote:
        text = "only this host: its ranks talk through memory, where compression rarely pays"
        return [Finding(NOTE, text, "name the hosts with -H a:8,b:8")]
    if not links:
        return [Finding(NOTE, "none measured: no other host is fit", "cure what is BAD above")]
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
