"""Whether a lab is up and whole, in words."""

from __future__ import annotations

from benchmarks.netlab import network, state
from benchmarks.netlab.hosts import Lab
from benchmarks.netlab.state import Record


def links(record: Record) -> str:
    """Nominal and measured rate of a lab's links."""
    link = record.link
    nominal = "not shaped" if link.rate == network.UNSHAPED else f"{link.rate} in each direction"
    if link.is_relayed:
        nominal += f", {link.delay} of delay and {link.loss} of loss from host to host"
    if not record.measured:
        return f"{nominal}, not measured"
    there, back = record.measured
    return f"{nominal}; measured {there:.0f} Mbit/s from host1 to host2, {back:.0f} Mbit/s back"


def describe() -> tuple[bool, str]:
    """Whether a lab is up and all of it is there, and what there is to say about it."""
    found = network.names()
    if not (record := state.read()):
        remains = found or state.STATE.exists() or any(network.OVERLAYS.glob(f"{network.PREFIX}*"))
        return False, "no lab is up" + ("; something of one is there, which down removes" if remains else "")
    lab = Lab(record.hosts, record.ranks)
    lines = [f"{lab.hosts} hosts, -np {lab.num_proc} -H {lab.slots}", f"links: {links(record)}"]
    whole = network.SWITCH in found
    if not whole:
        lines.append("damaged: the switch between the hosts is gone")
    for number, (name, address) in enumerate(zip(lab.names, lab.addresses, strict=True), 1):
        sound, text = _host(number, found)
        whole = whole and sound
        lines.append(f"{name} at {address}: {text}")
    return whole, "\n".join(lines)


def _host(number: int, found: list[str]) -> tuple[bool, str]:
    if network.namespace(number) not in found:
        return False, "damaged: its network namespace is gone"
    server = state.server(number)
    others = len([pid for pid in network.processes(network.namespace(number)) if pid != server])
    text = "ssh server alive" if server else "damaged: its ssh server has ended"
    return server is not None, f"{text}; other processes: {others}"
