"""``python -m tests.helpers.settings_page > docs/environment.md`` writes the page from ``envvars.ALL``."""

from __future__ import annotations

from dgc_horovod import envvars
from dgc_horovod.settings import Setting

_HEAD = """\
# Settings

<!-- Written by `python -m tests.helpers.settings_page`; a test compares. -->

Every setting has three names. A flag of `dgcrun` goes before the environment variable, that before the key in the
`compression:` section of a config file (`--config-file`, then the file that `DGC_CONFIG_FILE` names), that before the
default. On and off may be written 1/0, true/false, yes/no. Where other settings are given and no method, it is `local`
if `local_steps` is one of them, else `dgc`. Methods have [defaults of their own](guide.md#choices); the table has those
of `dgc`. What is sent, and over the run, was chosen for the method that stands beside it: with another method from a
place that goes before, it [is not used](clusters.md#for-everyone).
`dgcrun --show-config` prints what a job would get and where each value comes from.

```yaml
# job.yaml: Horovod's own sections may stand beside it
compression:
  method: dgc
  density: 0.001
  warmup_steps: 2000
```

Where it acts: a script for Horovod is *activated* if `dgcrun` starts it, if it runs with what `dgcrun --print-env`
prints, or if it calls `dgc_horovod.launch.activate.activate()`; one for [DDP](ddp.md#without-changing-the-script) also
if a variable is set, where the package is installed. A script that imports `dgc_horovod.torch` or
`dgc_horovod.tensorflow` itself says in its code how it compresses; what acts *everywhere* acts there too. The metrics
file begins with `hvd.init()` or `init_process_group()` where the script is activated, else with the first compressed
optimizer or tape.
"""
_TABLE = "| variable | flag | key | default | acts | |\n|---|---|---|---|---|---|\n"


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for group in dict.fromkeys(variable.group for variable in envvars.ALL):
        parts += [f"\n## {group[0].upper()}{group[1:]}\n\n{_TABLE}"]
        parts += [_row(variable) for variable in envvars.ALL if variable.group == group]
    return "".join(parts)


def _row(variable: Setting) -> str:
    key = variable.key if variable in envvars.SETTABLE else ""
    cells = [f"`{text}`" if text else "" for text in (variable.name, variable.flag, key, variable.default_text)]
    return f"| {' | '.join([*cells, variable.acts, variable.explained])} |\n"


if __name__ == "__main__":
    print(page(), end="")
