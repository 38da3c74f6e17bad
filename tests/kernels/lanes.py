"""What lanes of a kernel decide by, read from its compiled code.

A number that a program holds once lies in many lanes, as copies. Copies are equal where they come from memory, and stay
equal under everything that lanes do alike: elementwise operations, and reductions that do not round (of integers, or
the least and the greatest). A sum or a scan of floating-point numbers rounds, and lanes may add in different orders or
fuse different products: its copies may differ in the last bit. If lanes branch on such a number, some leave and others
stay, and every later exchange between them is garbage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

EXACT = ("maximumf", "minimumf", "maxnumf", "minnumf", "cmpf")
"""Floating-point operations that round nothing."""
MEMORY = ("tt.load", "tt.store", "tt.atomic_cas", "tt.atomic_rmw", "ttg.async_copy_global_to_local")
ROUNDS = ("tt.dot", "ttng.warp_group_dot")
VALUE = re.compile(r"%[\w#]+")


@dataclass
class _Region:
    """An operation whose body is being read."""

    name: str
    results: list[str]
    carried: list[str] = field(default_factory=list)
    """Names inside a loop for what one turn hands to the next."""
    leaving: list[str] = field(default_factory=list)
    """Of a `while`: what its condition hands to the body and to the results."""


def lane_decisions(code: str) -> set[str]:
    """Operations of a kernel (in Triton's dialects, before or after it is spread over threads) that take a branch, end
    a loop, or choose an address or a mask by a number whose copies may differ."""
    flows: list[tuple[str, str]] = []  # from one value to another
    differ: set[str] = set()
    decides: list[tuple[str, str]] = []  # a value, and the operation that goes by it
    blocks: dict[str, list[str]] = {}
    jumps: list[tuple[str, list[str]]] = []
    regions: list[_Region] = []
    for line in map(str.strip, code.splitlines()):
        if line.startswith("#"):
            continue
        if line.startswith("^"):
            label, arguments = line.partition("(")[0].rstrip(":"), VALUE.findall(line)
            if regions[-1].name == "scf.while":
                flows += zip(regions[-1].leaving, arguments, strict=True)
            elif regions[-1].name == "tt.func":
                blocks[label.partition(":")[0]] = arguments
            continue
        if line.startswith("}"):
            if not re.match(r"} (do|else) {", line):
                regions.pop()
            continue
        if not (found := re.match(r"(?:(%\w+)(?::(\d+))? = )?\"?([a-z_]+(?:\.[\w.]+)?)\"?(.*)", line)):
            continue
        name, rest = found[3], found[4]
        results = [found[1]] if found[1] else []
        if found[2]:
            results = [f"{found[1]}#{number}" for number in range(int(found[2]))]
        values = VALUE.findall(rest)
        opened = _Region(name, results)
        inner = regions[-1] if regions else opened
        if name in ("tt.func", "module"):
            pass
        elif inner.name in ("tt.reduce", "tt.scan"):
            kind = name.partition(".")[2]
            if name.startswith("math.") or (kind.endswith("f") and kind not in EXACT):
                differ.update(inner.results)
        elif name in ("tt.reduce", "tt.scan"):
            flows += [(value, result) for value in values for result in results]
        elif name == "scf.for":
            head, _, carried = rest.partition("iter_args")
            index, *bounds = VALUE.findall(head)
            decides += [(bound, name) for bound in bounds]
            flows += [(bound, index) for bound in bounds]
            pairs = VALUE.findall(carried)
            opened.carried = pairs[::2]
            flows += zip(pairs[1::2], pairs[::2], strict=True)
            flows += zip(pairs[::2], results, strict=True)
        elif name == "scf.while":
            opened.carried = values[::2]
            flows += zip(values[1::2], values[::2], strict=True)
        elif name == "scf.condition":
            decides.append((values[0], "scf.while"))
            inner.leaving = values[1:]
            flows += zip(values[1:], inner.results, strict=True)
        elif name == "scf.if":
            decides.append((values[0], name))
        elif name == "scf.yield":
            flows += zip(values, inner.results if inner.name == "scf.if" else inner.carried, strict=True)
        elif name in ("cf.br", "cf.cond_br"):
            if name == "cf.cond_br":
                decides.append((values[0], name))
            jumps += [(to, VALUE.findall(given)) for to, given in re.findall(r"(\^\w+)(?:\(([^)]*)\))?", rest)]
        elif name in MEMORY:
            stored = values[1:2] if name == "tt.store" else values[2:3] if name == "tt.load" else []
            written = values[1:] if name.startswith("tt.atomic") else stored
            where = [value for value in values if value not in written]
            decides += [(value, name) for value in where]
            flows += [(value, result) for value in where for result in results]
        else:
            flows += [(value, result) for value in values for result in results]
            differ.update(results if name in ROUNDS else ())
        if line.endswith("{"):
            regions.append(opened)
    flows += [pair for to, given in jumps for pair in zip(given, blocks[to], strict=True)]
    assert not regions
    assert decides
    while more := {result for value, result in flows if value in differ} - differ:
        differ |= more
    return {name for value, name in decides if value in differ}


def fused_exchanges(ptx: str) -> list[str]:
    """Instructions that fuse a lane's own product with a number it has from another lane.

    Lanes of a pair then hold fma(a, b, c·d) and fma(c, d, a·b), which may differ in the last bit; a plain addition has
    the same bits in both.
    """
    received: set[str] = set()
    fused = []
    for line in map(str.strip, ptx.splitlines()):
        registers = re.findall(r"%\w+", line)
        if line.startswith("shfl."):
            received.add(registers[0])
        elif received & set(registers[1:]):
            if re.match(r"(mov|cvt|shl|or)\.", line):  # two halves of a number put together
                received.add(registers[0])
            elif line.startswith("fma"):
                fused.append(line)
    return fused
