"""``dgcrun --doctor``: problems that would stop or slow a compressed job here, and the speed of the links.

`diagnoses` judges the facts that are found here. Frameworks are imported in child processes: one that crashes or hangs
is a finding.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dgc_horovod import envvars
from dgc_horovod.launch import hosts
from dgc_horovod.launch.child import MARK, marked
from dgc_horovod.launch.hosts import Ssh
from dgc_horovod.launch.settings import Job
from dgc_horovod.planning.cluster import PAYLOAD
from dgc_horovod.tools.doctor import diagnoses, link
from dgc_horovod.tools.doctor.diagnoses import BAD, Facts, Finding
from dgc_horovod.tools.doctor.link import Link

_COLUMNS = 100
_CHILD_SECONDS, _LINK_SECONDS = 120, 60
_BEGIN = f"""{hosts.OUTSIDE_FOLDER}
import json
found = {{}}
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
print({MARK!r} + json.dumps(found))
"""
# As python -m does it, but for modules of the current folder
_LINK = f"{hosts.OUTSIDE_FOLDER}\nimport runpy\nrunpy.run_module({link.__name__!r}, run_name='__main__')"
_PACKAGES = """
    import importlib.util, pathlib
    found.update(horovod=version("horovod"), torch=version("torch"), triton=version("triton"))
    found["tensorflow"] = version("tensorflow", "tensorflow-cpu")
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
    framework = importlib.import_module({name!r})
    found["version"] = framework.__version__
    if {name!r} == "torch":
        found.update(cuda_built=framework.version.cuda, cuda=framework.cuda.is_available())
    horovod = importlib.import_module("horovod." + {name!r})
    found["parts"] = [part for part in ("gloo", "mpi", "nccl", "cuda") if getattr(horovod, part + "_built")()]
    if found.get("cuda"):
        from dgc_horovod.kernels import registry
        try: found["cuda_kernels"] = registry.choose("cuda:0").name
        except Exception as error: found["cuda_kernels"] = "none (" + str(error) + ")"
"""


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
    findings = _say("environment", diagnoses.judge_environment(envvars.environment()))
    facts = _probe(interpreter)
    findings += _say("Horovod", diagnoses.judge_horovod(facts))
    findings += _say("kernels", diagnoses.judge_kernels(facts))
    reports = hosts.ask(names, interpreter, ssh)
    findings += _say("hosts", diagnoses.judge_hosts(reports))
    fit = {report.host for report in reports if not report.problem}
    links = [_measure(name, interpreter, ssh) for name in remote if name in fit]
    findings += _say("links", diagnoses.judge_links(links, bool(remote)))
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
        print(_wrapped(text, f"  {mark:6}"))
        if advice:
            print(_wrapped(advice, " " * 8), flush=True)
    return findings


def _wrapped(text: str, first: str) -> str:
    wrapper = textwrap.TextWrapper(_COLUMNS, first, " " * 8, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


# -- facts


def _probe(interpreter: str) -> Facts:
    """Examine Horovod, the frameworks and the kernels of this host, each in a child process of its own."""
    packages = _child(interpreter, _PACKAGES)
    names = [name for name in ("torch", "tensorflow") if packages.get(name)]
    with ThreadPoolExecutor() as pool:
        frameworks = pool.map(lambda name: _child(interpreter, _FRAMEWORK.format(name=name)), names)
        return Facts(interpreter, packages, dict(zip(names, frameworks, strict=True)), shutil.which("mpirun") or "")


def _child(interpreter: str, code: str) -> dict[str, Any]:
    command = [interpreter, "-c", _BEGIN + code + _END]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_CHILD_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {_CHILD_SECONDS} s"}
    except OSError as error:
        return {"error": str(error)}
    found = marked(ended.stdout)
    if found is not None:
        return found
    if ended.returncode < 0:
        return {"error": f"it crashed with {signal.Signals(-ended.returncode).name}"}
    said = ended.stderr.strip().splitlines() or ["no output"]
    return {"error": f"it ended with exit code {ended.returncode}: {said[-1]}"}


def _measure(host: str, interpreter: str, ssh: Ssh) -> Link:
    def run(arguments: Sequence[str], token: str) -> subprocess.CompletedProcess[str]:
        return hosts.run_on(host, [interpreter, "-c", _LINK, *arguments], ssh, _LINK_SECONDS, token)

    try:
        return link.measure(host, hosts.own_address_towards(host), run)
    except OSError as error:
        return Link(host, problem=str(error))
