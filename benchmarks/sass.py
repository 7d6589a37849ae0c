"""From how often each PTX instruction ran to what a GPU of sm_90 issues: ptxas' machine code, weighted by these counts.

PTX misleads where ptxas turns one instruction into many (div, sqrt, integer division, 64-bit arithmetic) or into none
(address arithmetic, moves, parameters). So ptxas assembles the PTX that was counted, with line information; nvdisasm
says which PTX line each machine instruction stems from; and each basic block of machine code is taken to run as often
as the PTX in it. Where ptxas copied a loop's body or a tail, the copies share the count of their PTX.

How often a block ran is the median over its instructions of which PTX makes exactly one (ANCHORS), and no less often
than its stores, shuffles and barriers; in a block without any, the median over all. `checked()` says how far shuffles
and special functions of a kernel come out from what was counted.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

#: Cycles that a warp's instruction occupies a pipe of its quarter of a multiprocessor: 32 lanes by the results a cycle
#: that the CUDA programming guide lists for 9.0, a quarter of them. Memory and shuffles share one unit among four
#: quarters, 128 bytes or one shuffle a cycle, and take four times their passes. What is not here only takes its issue.
PIPES: list[tuple[str, str, float]] = [
    (r"FFMA|FMUL|FADD|HFMA2|FSWZADD", "float", 1.0),
    (r"IMAD\.(WIDE|HI)", "float", 4.0),
    (r"IMAD|IDP", "float", 2.0),
    (r"MUFU|I2F|F2I|F2F|I2I|FRND|POPC|FLO|BREV|MATCH|REDUX|CREDUX", "special", 8.0),
    (r"DADD|DMUL|DFMA|DSETP", "double", 2.0),
    (r"LDG|STG|LD\b|ST\b|LDGSTS|ATOM\b|ATOMG|RED\b|LDL|STL|SHFL|LDS|STS|ATOMS", "memory", 4.0),
    (r"U[A-Z0-9]+|R2UR|S2UR|VOTEU", "uniform", 2.0),
    (r"VOTE|IADD3|LOP3|SHF|LEA|ISETP|FSETP|FSEL|SEL|FMNMX|IMNMX|VIMNMX|VIADD|PRMT|PLOP3|MOV|IABS|CS2R|P2R|R2P|FCHK|SGXT"
     r"|BMSK|FSET|LEPC|VABSDIFF", "integer", 2.0),
]  # fmt: skip

#: Kinds by which instructions are reported, after their machine opcode.
KINDS: list[tuple[str, str]] = [
    (r"LDG|STG|LD\b|ST\b|LDGSTS", "global memory"),
    (r"ATOM\b|ATOMG|RED\b", "atomics"),
    (r"LDS|STS|ATOMS", "shared memory"),
    (r"LDL|STL", "spills and local arrays"),
    (r"SHFL|VOTE|MATCH|REDUX|CREDUX", "warp"),
    (r"MUFU", "special functions"),
    (r"I2F|F2I|F2F|I2I|FRND|POPC|FLO|BREV", "conversions and bit counts"),
    (r"FFMA|FMUL|FADD|FSWZADD", "float arithmetic"),
    (r"DADD|DMUL|DFMA|DSETP", "double"),
    (r"BRA|BSSY|BSYNC|EXIT|CALL|RET|BREAK|WARPSYNC|BAR|NOP|YIELD|DEPBAR|NANOSLEEP|ERRBAR|MEMBAR", "control"),
    (r"FSETP|FSEL|FMNMX|FSET|FCHK|ISETP|SEL|PLOP3|IMNMX|VIMNMX", "compare and select"),
    (r"", "integer and moves"),
]

#: PTX of which ptxas makes exactly one machine instruction of a kind, if any: what is counted in the one is the other.
ANCHORS: list[tuple[str, str]] = [
    (r"(ld|st)\.(?!param|const|local)|cp\.async", r"LDG|STG|LD\b|ST\b|LDS|STS|LDGSTS"),
    (r"(atom|red)\.", r"ATOM|ATOMG|ATOMS|RED\b"),
    (r"shfl\.", r"SHFL"),
    (r"(bar|barrier)\.(?!warp)", r"BAR"),
    (r"ex2\.", r"MUFU\.EX2"),
    (r"lg2\.", r"MUFU\.LG2"),
    (r"(rcp|div)\..*f32$", r"MUFU\.RCP"),
    (r"r?sqrt\..*f32$", r"MUFU\.(RSQ|SQRT)"),
    (r"fma\..*f32$", r"FFMA"),
    (r"mul\..*f32$", r"FMUL"),
    (r"(add|sub)\..*f32$", r"FADD"),
]
#: Anchors that ptxas neither moves out of a loop nor runs on a guess: their block runs at least as often as they do. It
#: may run more often where a short branch became a guard.
STEADY = re.compile(r"(st|atom|red|shfl|bar|barrier)\.")
#: Anchors that a check counts, and what of the PTX has to match: guards do not spare them, and nothing is joined.
CHECKED = {
    "SHFL": r"shfl\.",
    r"MUFU\.EX2": r"ex2\.",
    r"MUFU\.(RSQ|SQRT)": r"r?sqrt\..*f32$",
    r"MUFU\.RCP": r"(rcp|div)\..*f32$",
}

#: Instructions that ptxas moves out of loops and joins: they say little about how often a block ran.
_MOVED = re.compile(r"(LDC|ULDC|MOV|UMOV|S2R|S2UR|CS2R|HFMA2|IMAD\.MOV|NOP|R2UR)\b")


class Machine(NamedTuple):
    """One machine instruction: its opcode with modifiers, and the PTX line that it stems from."""

    opcode: str
    line: int


@dataclass
class Block:
    """A basic block of machine code; `slow` is only reached for denormals, infinities and NaN."""

    instructions: list[Machine] = field(default_factory=list)
    slow: bool = False


@dataclass(frozen=True)
class Ran:
    """How often one PTX instruction ran: warps, lanes of these, and its sectors or passes of memory."""

    opcode: str
    line: int
    warps: int
    lanes: int
    traffic: int


def parse(listing: str) -> dict[str, list[Block]]:
    """The basic blocks of each kernel, by its mangled name, from `nvdisasm -gp -c`."""
    kernels: dict[str, list[Block]] = {}
    blocks: list[Block] = []
    line, slow, after_slow_call = 0, False, False
    for text in listing.splitlines():
        if found := re.match(r"\.text\.(\S+):", text):
            blocks = kernels.setdefault(found[1], [Block()])
            line, slow, after_slow_call = 0, False, False
        elif found := re.search(r'nv_debug_ptx_txt", line (\d+)', text):
            line = int(found[1])
        elif re.match(r"\S+:\s*$", text):
            slow = "slowpath" in text or (slow and text.startswith(".L_x"))
            after_slow_call = False
            blocks.append(Block(slow=slow))
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", text):
            opcode = found[1]
            blocks[-1].instructions.append(Machine(opcode, line))
            if re.match(r"CALL", opcode) and "slowpath" in found[2]:
                blocks[-1].slow = after_slow_call = True
                blocks.append(Block(slow=True))
            elif re.match(r"(BRA|BRX|EXIT|RET|CALL|BREAK|BSYNC)\b", opcode):
                blocks.append(Block(slow=slow or (after_slow_call and not opcode.startswith("BRA"))))
                after_slow_call = False
    return {name: [block for block in found if block.instructions] for name, found in kernels.items()}


def ptx_blocks(ptx: str) -> list[int]:
    """For each line of a PTX text, from line 1 on at index 1, the number of its basic block."""
    numbers, number = [0], 0
    for text in ptx.splitlines():
        label = re.match(r"\s*[$%\w]+:", text) is not None
        number += label
        numbers.append(number)
        number += re.match(r"\s*(@!?%\w+\s+)?(bra|ret|exit|brx)\b", text) is not None
    return numbers


def _anchor(opcode: str) -> str | None:
    return next((machine for ptx, machine in ANCHORS if re.match(ptx, opcode)), None)


def weights(blocks: list[Block], ran: Iterable[Ran], block_of: list[int]) -> list[float]:
    """How often each machine block of one kernel ran."""
    counts = {one.line: one for one in ran}
    copies: Counter[int] = Counter()
    anchored = {line: anchor for line, one in counts.items() if (anchor := _anchor(one.opcode)) is not None}
    for block in blocks:
        for opcode, line in block.instructions:
            if not block.slow and line in anchored and re.match(anchored[line], opcode):
                copies[line] += 1
    copied = defaultdict(list)  # by PTX block: how many copies ptxas made of its anchors
    for line, number in copies.items():
        copied[block_of[line]].append(number)
    factor = {number: statistics.median(found) for number, found in copied.items()}
    result = []
    for block in blocks:
        if block.slow:
            result.append(0.0)
            continue
        steady, sure, other = [0.0], [], []
        for opcode, line in block.instructions:
            times = counts[line].warps if line in counts else 0
            if line in anchored and re.match(anchored[line], opcode):
                sure.append(times / copies[line])
                if STEADY.match(counts[line].opcode):
                    steady.append(times / copies[line])
            elif not _MOVED.match(opcode):
                other.append(times / factor.get(block_of[line], 1.0))
        found = sure or other
        if not found:
            found = [counts[line].warps if line in counts else 0 for _, line in block.instructions]
        result.append(float(max(statistics.median(found), *steady)))
    return result


def issued(blocks: list[Block], ran: Iterable[Ran], block_of: list[int]) -> Counter[str]:
    """How often each machine opcode was issued to a warp."""
    found: Counter[str] = Counter()
    for block, times in zip(blocks, weights(blocks, ran, block_of), strict=True):
        for opcode, _ in block.instructions:
            found[opcode] += times  # type: ignore[assignment]
    return found


def checked(blocks: list[Block], ran: Iterable[Ran], block_of: list[int]) -> float:
    """The largest relative difference between CHECKED instructions as issued and as counted; 0 without any.

    An instruction whose guard was never true ran for no warp, but is issued: it is left out.
    """
    counts = {one.line: one for one in ran if one.warps}
    modelled: Counter[str] = Counter()
    for block, times in zip(blocks, weights(blocks, counts.values(), block_of), strict=True):
        for opcode, line in block.instructions:
            for machine, ptx in CHECKED.items():
                if re.match(machine, opcode) and line in counts and re.match(ptx, counts[line].opcode):
                    modelled[machine] += times  # type: ignore[assignment]
    worst = 0.0
    for machine, ptx in CHECKED.items():
        counted = sum(one.warps for one in counts.values() if re.match(ptx, one.opcode))
        if counted:
            worst = max(worst, abs(modelled[machine] - counted) / counted)
    return worst


def kinds(opcodes: Counter[str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for opcode, times in opcodes.items():
        found[next(kind for pattern, kind in KINDS if re.match(pattern, opcode))] += times
    return dict(found)


def pipes(opcodes: Counter[str], sectors: float, passes: float) -> dict[str, float]:
    """Cycles that each pipe of a quarter of a multiprocessor is taken, and those of issue: one an instruction.

    sectors: of global memory, four of which make a pass; an instruction takes at least one. passes: of shared memory.
    """
    found: dict[str, float] = defaultdict(float)
    least = {"global": 0.0, "shared": 0.0}
    for opcode, times in opcodes.items():
        found["issue"] += times
        if re.match(r"LDG|STG|LD\b|ST\b|LDGSTS|ATOM\b|ATOMG|RED\b", opcode):
            least["global"] += times
        elif re.match(r"LDS|STS|ATOMS", opcode):
            least["shared"] += times
        else:
            for pattern, pipe, cycles in PIPES:
                if re.match(rf"({pattern})(\.|$|\b)", opcode):
                    found[pipe] += cycles * times
                    break
    found["memory"] += 4.0 * (max(least["global"], sectors / 4.0) + max(least["shared"], passes))
    return dict(found)
