"""The numbers that lanes of a kernel branch on, read from its compiled code.

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
MEMORY = {
    "tt.load": slice(2, 3),
    "tt.store": slice(1, 2),
    "tt.atomic_cas": slice(1, 3),
    "tt.atomic_rmw": slice(1, 2),
    "ttg.async_copy_global_to_local": slice(1, 2),
}
"""The operands that are neither address nor mask: values stored, or taken where nothing is loaded."""
ROUNDS = ("tt.dot", "ttng.warp_group_dot")
VALUE = re.compile(r"%[\w.$#-]+")


def lane_decisions(code: str) -> set[str]:
    """Operations of a kernel (in Triton's dialects, before or after it is spread over threads) that take a branch, end
    a loop, or choose an address or a mask by a number whose copies may differ."""
    flow = _Flow()
    for line in map(str.strip, code.splitlines()):
        flow.read(line)
    return flow.decided_by_lanes()


@dataclass
class _Region:
    """An operation whose body is being read."""

    name: str
    results: list[str]
    carried: list[str] = field(default_factory=list)
    """Names inside a loop for what one turn hands to the next."""
    leaving: list[str] = field(default_factory=list)
    """The values that the condition of a `while` passes to its body and results."""


@dataclass
class _Flow:
    """The dependences between the values of a kernel, read line by line."""

    edges: list[tuple[str, str]] = field(default_factory=list)
    """Edges from a value to the values computed from it."""
    differ: set[str] = field(default_factory=set)
    """Values whose copies may differ."""
    decides: list[tuple[str, str]] = field(default_factory=list)
    """A value, and the operation that goes by it."""
    blocks: dict[str, list[str]] = field(default_factory=dict)
    jumps: list[tuple[str, list[str]]] = field(default_factory=list)
    regions: list[_Region] = field(default_factory=list)

    def read(self, line: str) -> None:
        if line.startswith("#"):  # where it comes from
            return
        if line.startswith("^"):
            self._block(line)
        elif line.startswith("}"):
            if not re.match(r"} (do|else) {", line):
                self.regions.pop()
        elif found := re.match(r"(?:(%[\w.$-]+)(?::(\d+))? = )?\"?([a-z_]+(?:\.[\w.]+)?)\"?(.*)", line):
            results = [found[1]] if found[1] else []
            if found[2]:
                results = [f"{found[1]}#{number}" for number in range(int(found[2]))]
            opened = _Region(found[3], results)
            self._operation(opened, found[4])
            if line.endswith("{"):
                self.regions.append(opened)

    def decided_by_lanes(self) -> set[str]:
        assert not self.regions
        assert self.decides
        for to, given in self.jumps:
            self.edges += zip(given, self.blocks[to], strict=True)
        while more := {result for value, result in self.edges if value in self.differ} - self.differ:
            self.differ |= more
        return {name for value, name in self.decides if value in self.differ}

    def _block(self, line: str) -> None:
        """The head of a block, with names for what is handed to it."""
        arguments, inner = VALUE.findall(line), self.regions[-1]
        if inner.name == "scf.while":
            self.edges += zip(inner.leaving, arguments, strict=True)
        elif inner.name == "tt.func":
            self.blocks[re.split(r"[(:]", line)[0]] = arguments

    def _operation(self, opened: _Region, rest: str) -> None:
        name, results, values = opened.name, opened.results, VALUE.findall(rest)
        inner = self.regions[-1] if self.regions else opened
        if name in ("tt.func", "module"):
            return
        if inner.name in ("tt.reduce", "tt.scan"):
            kind = name.partition(".")[2]
            if name.startswith("math.") or (kind.endswith("f") and kind not in EXACT):
                self.differ.update(inner.results)
        elif name.startswith(("scf.", "cf.")):
            self._control(opened, inner, rest)
        elif name in MEMORY:
            where = values.copy()
            del where[MEMORY[name]]
            self.decides += [(value, name) for value in where]
            self._joined(where, results)
        else:
            self._joined(values, results)
            if name in ROUNDS:
                self.differ.update(results)

    def _control(self, opened: _Region, inner: _Region, rest: str) -> None:
        name, results, values = opened.name, opened.results, VALUE.findall(rest)
        if name == "scf.for":
            head, _, carried = rest.partition("iter_args")
            index, *bounds = VALUE.findall(head)
            self.decides += [(bound, name) for bound in bounds]
            self._joined(bounds, [index])
            self._carry(opened, VALUE.findall(carried))
            self.edges += zip(opened.carried, results, strict=True)
        elif name == "scf.while":
            self._carry(opened, values)
        elif name == "scf.condition":
            self.decides.append((values[0], inner.name))
            inner.leaving = values[1:]
            self.edges += zip(values[1:], inner.results, strict=True)
        elif name == "scf.if":
            self.decides.append((values[0], name))
        elif name == "scf.yield":
            self.edges += zip(values, inner.results if inner.name == "scf.if" else inner.carried, strict=True)
        else:
            assert name in ("cf.br", "cf.cond_br"), name
            if name == "cf.cond_br":
                self.decides.append((values[0], name))
            for to, given in re.findall(r"(\^\w+)(?:\(([^)]*)\))?", rest):
                self.jumps.append((to, VALUE.findall(given)))

    def _carry(self, loop: _Region, pairs: list[str]) -> None:
        """The variables of a loop, each with its initial value."""
        loop.carried = pairs[::2]
        self.edges += zip(pairs[1::2], pairs[::2], strict=True)

    def _joined(self, values: list[str], results: list[str]) -> None:
        self.edges += [(value, result) for value in values for result in results]


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
