"""What Horovod's own timeline says of the operations of a rank."""

from __future__ import annotations

import json
from pathlib import Path


def operations(file: Path) -> list[tuple[str, int, int]]:
    """(name, microsecond asked for, microsecond done) of each, in the order in which they were done."""
    events = json.loads(file.read_text().rstrip().rstrip(",").removesuffix("]") + "]")
    names: dict[int, str] = {}
    found, under_way, begun = [], dict[int, list[str]](), dict[int, int]()
    for event in events:
        pid, phase = event["pid"], event["ph"]
        if phase == "M" and "name" in event["args"]:
            names[pid] = event["args"]["name"]
        elif phase == "B":
            under_way.setdefault(pid, []).append(event["name"])
            begun.setdefault(pid, event["ts"])
        elif phase == "E" and not under_way[pid].pop().startswith("NEGOTIATE") and not under_way[pid]:
            found.append((names[pid], begun.pop(pid), event["ts"]))
    return found
