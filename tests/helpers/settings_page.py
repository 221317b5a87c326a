"""``python -m tests.helpers.settings_page > docs/environment.md`` writes the page from ``envvars.ALL``."""

from __future__ import annotations

from dgc_horovod import envvars
from dgc_horovod.settings import Setting

_HEAD = """\
# Settings

<!-- Written by `python -m tests.helpers.settings_page`; a test compares. -->

Every setting has three names. The first of these sources that has a value is used: the flag of `dgcrun`, the
environment variable, the key in the `compression:` section of a config file (`--config-file`, then the file that
`DGC_CONFIG_FILE` names), the default. On and off may be written 1/0, true/false, yes/no. If settings are given without
a method, the method is `local` if `local_steps` is one of them, otherwise `dgc`. Methods have
[defaults of their own](guide.md#choices); the table has those of `dgc`. Settings under the two headings *what is sent*
and *over the run* belong to the method of their source: they [are ignored](clusters.md#for-everyone) if a source of
higher priority selects another method. `dgcrun --show-config` lists the settings of a job and their sources.

```yaml
# job.yaml: it may have Horovod's own sections as well
compression:
  method: dgc
  density: 0.001
  warmup_steps: 2000
```

Column *acts*: a script for Horovod is *activated* if `dgcrun` starts it, if it runs with the environment that
`dgcrun --print-env` prints, or if it calls `dgc_horovod.launch.activate.activate()`; one for
[DDP](ddp.md#without-changing-the-script) also if a variable is set and the package is installed. A script that imports
`dgc_horovod.torch` or `dgc_horovod.tensorflow` itself sets its compression in its code; settings that act *everywhere*
apply to it too. The metrics file begins with `hvd.init()` or `init_process_group()` in an activated script, otherwise
with the first compressed optimizer or tape.
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
