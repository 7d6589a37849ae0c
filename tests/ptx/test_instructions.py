"""Every instruction that the interpreter knows, against Python's integers, exact fractions and numpy.

A case is one PTX statement over the registers %a, %b, %c and %d; each of 256 threads runs it on numbers of its own. An
opcode, a modifier or an operand that the interpreter does not know is a fault, and so is a use that hardware forbids.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.native.cases import NEEDS_COMPILER
from tests.ptx.machine import Fault, machine

pytestmark = NEEDS_COMPILER
COUNT = 256
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
DTYPES = {kind + str(bits): np.dtype(f"{letter}{bits // 8}") for kind, letter in (("u", "u"), ("s", "i"), ("f", "f"))
          for bits in (8, 16, 32, 64) if kind + str(bits) != "f8"}  # fmt: skip


def run(text: str, *arrays: np.ndarray, threads: int = COUNT, blocks: int = 1, shared: int = 0) -> None:
    """Run the kernel k of a body in braces: parameters p0, p1, ... point to the arrays, which it changes in place."""
    parameters = ", ".join(f".param .u64 p{k}" for k in range(len(arrays)))
    module = machine().module(f"{HEAD}.visible .entry k({parameters})\n{text}")
    module.run("k", [blocks], [threads], *[torch.from_numpy(array.view(np.uint8)) for array in arrays], shared=shared)


def compute(statement: str, result: str, *inputs: tuple[str, np.ndarray]) -> np.ndarray:
    """Return %d, of type ``result``, of a statement that each thread runs on its own %a, %b and %c."""
    out = np.zeros(COUNT, DTYPES[result])
    body = ["{ .reg .b64 %p<8>, %t; .reg .b32 %i; .reg .pred %q, %r;", "mov.u32 %i, %tid.x;"]
    for k, (kind, array) in enumerate([*inputs, (result, out)]):
        name, size = "abcd"[k] if k < len(inputs) else "d", array.dtype.itemsize
        assert array.shape == (COUNT,)
        body.append(f".reg .b{max(16, 8 * size)} %{name}; ld.param.u64 %p{k}, [p{k}];")
        body.append(f"mul.wide.u32 %t, %i, {size}; add.s64 %p{k}, %p{k}, %t;")
        if k < len(inputs):
            body.append(f"ld.global.{kind} %{name}, [%p{k}];")
    body += [statement, f"st.global.{result} [%p{len(inputs)}], %d;", "ret; }"]
    run("\n".join(body), *[array for _, array in inputs], out)
    return out


def numbers(kind: str, seed: int) -> np.ndarray:
    """Return numbers of a type: its limits, zeros and ones first, then random ones of all sizes."""
    random = np.random.default_rng(seed)
    if kind[0] == "f":
        least = np.finfo(DTYPES[kind]).tiny
        first = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, least, least / 4, -least / 8, 0.5, 1.5, 2.5, -2.5]
        rest = random.standard_normal(COUNT) * 2.0 ** random.integers(-20, 20, COUNT)
        both = np.concatenate([random.permutation(first * 2), rest])[:COUNT]
        return both.astype(DTYPES[kind])
    limits = np.iinfo(DTYPES[kind])
    bits = limits.bits
    first = [0, 1, limits.max, limits.min, limits.max - 1, limits.min + 1, 2, limits.max // 2]
    rest = [int(random.integers(0, 1 << 63)) >> int(random.integers(0, 63)) for _ in range(COUNT)]
    signs = random.integers(0, 2, COUNT)
    rest = [wrapped(-x if sign else x, kind) for x, sign in zip(rest, signs, strict=True)]
    assert bits >= 8
    return np.array(
        [*(int(x) for x in random.permutation(np.array(first * 2, dtype=object))), *rest][:COUNT], DTYPES[kind]
    )


def wrapped(x: int, kind: str) -> int:
    """Return x modulo the size of an integer type, in its range."""
    bits = int(kind[1:])
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def unsigned(x: int, kind: str) -> int:
    return x & ((1 << int(kind[1:])) - 1)


def assert_same(got: np.ndarray, want: Sequence[Any]) -> None:
    """Bits are equal, of all that is not NaN."""
    expected = np.array(want, got.dtype)
    if got.dtype.kind == "f":
        sick = np.isnan(expected)
        assert np.array_equal(np.isnan(got), sick)
        bits = f"u{got.dtype.itemsize}"
        got, expected = got.view(bits)[~sick], expected.view(bits)[~sick]
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, f"{wrong.size} differ, first at {wrong[0]}: {got[wrong[0]]!r}, not {expected[wrong[0]]!r}"


# ---- integers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A statement with {t} for each type of `types`, what it does to Python's integers, and its other types."""

    statement: str
    types: str
    python: Callable[..., int]
    result: str = ""
    third: str = ""
    second: str = ""


def bits_of(t: str) -> str:
    return "b" + t[1:]


def divided(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, at: int, length: int, t: str) -> int:
    bits, at, length = int(t[1:]), at & 255, length & 255
    if length == 0:
        return 0
    sign = unsigned(a, t) >> min(at + length - 1, bits - 1) & 1 if t[0] == "s" else 0
    x = unsigned(a, t) >> at & ((1 << length) - 1) if at < bits else 0
    kept = max(0, min(length, bits - at))
    return wrapped(x | (-sign << kept), t)


def permuted(a: int, b: int, c: int) -> int:
    source = [(unsigned(a, "u32") | unsigned(b, "u32") << 32) >> 8 * k & 255 for k in range(8)]
    out = 0
    for k in range(4):
        which = c >> 4 * k & 15
        byte = source[which & 7]
        out |= (byte if which < 8 else 255 * (byte >> 7)) << 8 * k
    return out


def funnel(a: int, b: int, c: int, *, right: bool, wrap: bool) -> int:
    both, n = a | b << 32, c & 31 if wrap else min(c, 32)
    return both >> n if right else both << n >> 32


def table3(a: int, b: int, c: int, lut: int) -> int:
    return sum((lut >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1)) & 1) << k for k in range(32))


def dot4(a: int, b: int, c: int, kinds: str) -> int:
    parts = [[wrapped(x >> 8 * k, f"{kind}8") for k in range(4)] for x, kind in zip((a, b), kinds, strict=True)]
    return c + sum(x * y for x, y in zip(*parts, strict=True))


def found_bit(a: int, t: str) -> int:
    a = ~a if a < 0 else a
    return a.bit_length() - 1


def shift_of(a: int, t: str) -> int:
    at = found_bit(a, t)
    return -1 if at < 0 else int(t[1:]) - 1 - at


def inserted(a: int, b: int, at: int) -> int:
    """Return b with the lowest seven bits of a at a place."""
    return b & ~(127 << at) | (a & 127) << at


def above(x: int, t: str) -> int:
    """Return what does not fit a type: the carry of a sum of unsigned numbers, the upper half of a product."""
    return x >> int(t[1:])


ALL, WIDE, HALF = "s16 u16 s32 u32 s64 u64", "s32 u32 s64 u64", "s16 u16 s32 u32"
INTEGERS = {
    "add": Case("add.{t} %d, %a, %b;", ALL, lambda a, b, t: a + b),
    "sub": Case("sub.{t} %d, %a, %b;", ALL, lambda a, b, t: a - b),
    "mul.lo": Case("mul.lo.{t} %d, %a, %b;", ALL, lambda a, b, t: a * b),
    "mul.hi": Case("mul.hi.{t} %d, %a, %b;", WIDE, lambda a, b, t: a * b >> int(t[1:])),
    "mul.wide": Case("mul.wide.{t} %d, %a, %b;", HALF, lambda a, b, t: a * b, result="double"),
    "mad.lo": Case("mad.lo.{t} %d, %a, %b, %c;", ALL, lambda a, b, c, t: a * b + c, third="{t}"),
    "mad.hi": Case("mad.hi.{t} %d, %a, %b, %c;", WIDE, lambda a, b, c, t: (a * b >> int(t[1:])) + c, third="{t}"),
    "mad.wide": Case("mad.wide.{t} %d, %a, %b, %c;", HALF, lambda a, b, c, t: a * b + c, "double", "double"),
    "div": Case("div.{t} %d, %a, %b;", ALL, lambda a, b, t: divided(a, b)),
    "rem": Case("rem.{t} %d, %a, %b;", ALL, lambda a, b, t: a if b == 0 else a - b * divided(a, b)),
    "min": Case("min.{t} %d, %a, %b;", ALL, lambda a, b, t: min(a, b)),
    "max": Case("max.{t} %d, %a, %b;", ALL, lambda a, b, t: max(a, b)),
    "neg": Case("neg.{t} %d, %a;", "s16 s32 s64", lambda a, t: -a),
    "abs": Case("abs.{t} %d, %a;", "s16 s32 s64", lambda a, t: abs(a)),
    "and": Case("and.{b} %d, %a, %b;", ALL, lambda a, b, t: a & b),
    "or": Case("or.{b} %d, %a, %b;", ALL, lambda a, b, t: a | b),
    "xor": Case("xor.{b} %d, %a, %b;", ALL, lambda a, b, t: a ^ b),
    "not": Case("not.{b} %d, %a;", ALL, lambda a, t: ~a),
    "cnot": Case("cnot.{b} %d, %a;", ALL, lambda a, t: int(a == 0)),
    "shl": Case("shl.{b} %d, %a, %b;", ALL, lambda a, b, t: a << b if b < 64 else 0, second="u32"),
    "shr": Case("shr.{t} %d, %a, %b;", ALL, lambda a, b, t: a >> min(b, 64), second="u32"),
    "popc": Case("popc.{b} %d, %a;", "u32 u64", lambda a, t: a.bit_count(), "u32"),
    "clz": Case("clz.{b} %d, %a;", "u32 u64", lambda a, t: int(t[1:]) - a.bit_length(), "u32"),
    "brev": Case("brev.{b} %d, %a;", "u32 u64", lambda a, t: int(f"{a:0{t[1:]}b}"[::-1], 2)),
    "bfind": Case("bfind.{t} %d, %a;", WIDE, lambda a, t: found_bit(a, t), "u32"),
    "bfind.shiftamt": Case("bfind.shiftamt.{t} %d, %a;", WIDE, lambda a, t: shift_of(a, t), "u32"),
    "bfe": Case("bfe.{t} %d, %a, %b, %c;", WIDE, lambda a, b, c, t: field(a, b, c, t), third="u32", second="u32"),
    "bfi": Case("bfi.b32 %d, %a, %b, %c, 7;", "u32", lambda a, b, c, t: inserted(a, b, c & 255), third="u32"),
    "prmt": Case("prmt.b32 %d, %a, %b, %c;", "u32", lambda a, b, c, t: permuted(a, b, c), third="u32"),
    **{
        f"shf.{way}.{end}": Case(
            f"shf.{way}.{end}.b32 %d, %a, %b, %c;",
            "u32",
            lambda a, b, c, t, way=way, end=end: funnel(a, b, c, right=way == "r", wrap=end == "wrap"),
            third="u32",
        )
        for way in "lr"
        for end in ("wrap", "clamp")
    },
    "lop3 0x96": Case("lop3.b32 %d, %a, %b, %c, 0x96;", "u32", lambda a, b, c, t: table3(a, b, c, 0x96), third="u32"),
    "lop3 0xca": Case("lop3.b32 %d, %a, %b, %c, 0xca;", "u32", lambda a, b, c, t: table3(a, b, c, 0xCA), third="u32"),
    "dp4a.u32.u32": Case("dp4a.u32.u32 %d, %a, %b, %c;", "u32", lambda a, b, c, t: dot4(a, b, c, "uu"), third="u32"),
    "dp4a.s32.u32": Case("dp4a.s32.u32 %d, %a, %b, %c;", "u32", lambda a, b, c, t: dot4(a, b, c, "su"), third="u32"),
    "dp4a.s32.s32": Case("dp4a.s32.s32 %d, %a, %b, %c;", "s32", lambda a, b, c, t: dot4(a, b, c, "ss"), third="s32"),
    "selp": Case("setp.lt.{t} %q, %a, %b; selp.{b} %d, %a, %b, %q;", ALL, lambda a, b, t: min(a, b)),
    "mov": Case("mov.{b} %d, %a;", ALL, lambda a, t: a),
    "add of a constant": Case("add.{t} %d, %a, -7;", ALL, lambda a, t: a - 7),
    # Carries: the upper half shows what the lower one has left.
    "add.cc": Case(
        "add.cc.{t} %d, %a, %b; addc.{t} %d, %a, %b;",
        WIDE,
        lambda a, b, t: a + b + above(unsigned(a, t) + unsigned(b, t), t),
    ),
    "addc.cc": Case(
        "add.cc.{t} %d, %a, %b; addc.cc.{t} %d, %a, %a; addc.{t} %d, %b, 0;",
        WIDE,
        lambda a, b, t: b + above(2 * unsigned(a, t) + above(unsigned(a, t) + unsigned(b, t), t), t),
    ),
    "sub.cc": Case(
        "sub.cc.{t} %d, %a, %b; subc.{t} %d, %b, %a;",
        WIDE,
        lambda a, b, t: b - a - (unsigned(a, t) < unsigned(b, t)),
    ),
    "subc.cc": Case(
        "sub.cc.{t} %d, %a, %b; subc.cc.{t} %d, %b, %b; subc.{t} %d, 0, 0;",
        WIDE,
        lambda a, b, t: -(unsigned(a, t) < unsigned(b, t)),
    ),
    "mad.lo.cc": Case(
        "mad.lo.cc.{t} %d, %a, %b, %c; madc.hi.{t} %d, %a, %b, %c;",
        WIDE,
        lambda a, b, c, t: above(a * b, t) + c + above(unsigned(a * b, t) + unsigned(c, t), t),
        third="{t}",
    ),
}
ROWS = [(name, t) for name, case in INTEGERS.items() for t in case.types.split()]


@pytest.mark.parametrize(("name", "t"), ROWS)
def test_an_integer_instruction(name: str, t: str) -> None:
    case = INTEGERS[name]
    double = f"{t[0]}{2 * int(t[1:])}"
    other = {"": t, "{t}": t, "double": double}
    kinds = [t]
    if "%b" in case.statement:
        kinds.append(other.get(case.second, case.second))
    if "%c" in case.statement:
        kinds.append(other.get(case.third, case.third))
    result = other.get(case.result, case.result)
    inputs = [(kind, numbers(kind, seed)) for seed, kind in enumerate(kinds)]
    if case.second or name.startswith(("shf", "bfe", "bfi")):  # small numbers, of bits
        inputs[1:] = [(k, x % 80 if k == "u32" and name != "bfi" else x) for k, x in inputs[1:]]
    if name == "bfi":
        inputs[2] = ("u32", inputs[2][1] % 40)
    got = compute(case.statement.format(t=t, b=bits_of(t)), result, *inputs)
    want = [wrapped(int(case.python(*map(int, row), t)), result) for row in zip(*[x for _, x in inputs], strict=True)]
    assert_same(got, want)


COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("t", ALL.split())
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_of_integers(name: str, t: str) -> None:
    a, b = numbers(t, 1), np.where(np.arange(COUNT) % 3 == 0, numbers(t, 1), numbers(t, 2))
    got = compute(
        f"setp.{name}.{t} %q|%r, %a, %b; selp.u32 %d, 2, 0, %q; @%r add.u32 %d, %d, 1;", "u32", (t, a), (t, b)
    )
    assert_same(got, [2 if COMPARISONS[name](int(x), int(y)) else 1 for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize(
    ("word", "python"), [("and", lambda p, q: p and q), ("or", lambda p, q: p or q), ("xor", lambda p, q: p != q)]
)
@pytest.mark.parametrize("negated", [False, True])
def test_a_comparison_joined_with_a_predicate(word: str, python: Callable[[bool, bool], bool], negated: bool) -> None:
    a, b = numbers("s32", 3), numbers("s32", 4)
    sign = "!" if negated else ""
    text = f"setp.gt.s32 %q, %b, 0; setp.lt.{word}.s32 %r, %a, %b, {sign}%q; selp.u32 %d, 1, 0, %r;"
    got = compute(text, "u32", ("s32", a), ("s32", b))
    assert_same(got, [int(python(x < y, (y > 0) != negated)) for x, y in zip(a.tolist(), b.tolist(), strict=True)])


@pytest.mark.parametrize(("word", "python"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
def test_predicates_are_combined(word: str, python: Callable[[bool, bool], bool]) -> None:
    a, b = numbers("s32", 3), numbers("s32", 4)
    text = (
        f"setp.gt.s32 %q, %a, 0; setp.gt.s32 %r, %b, 0; not.pred %r, %r; {word}.pred %q, %q, %r; selp.u32 %d, 1, 0, %q;"
    )
    got = compute(text, "u32", ("s32", a), ("s32", b))
    assert_same(got, [int(python(x > 0, not y > 0)) for x, y in zip(a.tolist(), b.tolist(), strict=True)])


def test_registers_are_packed_and_unpacked() -> None:
    a, b = numbers("u32", 1), numbers("u32", 2)
    wide = compute("mov.b64 %d, {%a, %b};", "u64", ("u32", a), ("u32", b))
    assert_same(wide, [int(x) | int(y) << 32 for x, y in zip(a, b, strict=True)])
    assert_same(compute("mov.b64 {_, %d}, %a;", "u32", ("u64", wide)), b)
    assert_same(compute("mov.b64 {%d, _}, %a;", "u32", ("u64", wide)), a)


# ---- floats ----------------------------------------------------------------------------------------------------------


def rounded(x: Fraction, mode: str, kind: str = "f32") -> Any:
    """Return the number of a float type next to x: rn to nearest, ties to even; rz, rm, rp towards 0, down, up."""
    dtype = DTYPES[kind].type
    with np.errstate(over="ignore"):
        near = dtype(float(x))
    most = np.finfo(DTYPES[kind]).max
    near = min(max(near, -most), most)

    def value(f: Any) -> Fraction:
        return Fraction(float(f))

    low = high = near
    while value(low) > x:
        low = np.nextafter(low, dtype(-math.inf))
    while value(high) < x:
        high = np.nextafter(high, dtype(math.inf))
    while (
        value(up := np.nextafter(low, dtype(math.inf))) <= x
        if np.isfinite(np.nextafter(low, dtype(math.inf)))
        else False
    ):
        low = up
    while (
        value(down := np.nextafter(high, dtype(-math.inf))) >= x
        if np.isfinite(np.nextafter(high, dtype(-math.inf)))
        else False
    ):
        high = down
    if mode == "rm" or (mode == "rz" and x > 0):
        return low
    if mode == "rp" or mode == "rz":
        return high
    to_low, to_high = x - value(low), value(high) - x
    if to_low != to_high:
        return low if to_low < to_high else high
    bits = np.array([low]).view(f"u{DTYPES[kind].itemsize}")[0]
    return low if int(bits) % 2 == 0 else high


def finite(kind: str, seed: int) -> np.ndarray:
    """Return numbers whose sums, products and quotients are normal, and neither zero nor infinite."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(COUNT) * 2.0 ** random.integers(-12, 12, COUNT)
    return np.where(x == 0, 1, x).astype(DTYPES[kind])


EXACT = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "div": lambda a, b, c: a / b,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize(("kind", "mode"), [("f32", "rn"), ("f32", "rz"), ("f32", "rm"), ("f32", "rp"), ("f64", "rn")])
@pytest.mark.parametrize("name", EXACT)
def test_a_sum_product_or_quotient_is_rounded_as_asked(name: str, kind: str, mode: str) -> None:
    inputs = [(kind, finite(kind, seed)) for seed in range(3 if name == "fma" else 2)]
    got = compute(f"{name}.{mode}.{kind} %d, {', '.join(['%a', '%b', '%c'][: len(inputs)])};", kind, *inputs)
    rows = zip(*[[Fraction(float(x)) for x in array] for _, array in inputs], strict=True)
    assert_same(got, [rounded(EXACT[name](*row, *[Fraction(0)] * (3 - len(row))), mode, kind) for row in rows])


SPECIAL = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide, "sqrt.rn": np.sqrt, "neg": np.negative,
    "abs": np.abs, "rcp.rn": lambda a: a.dtype.type(1) / a, "min": np.fmin, "max": np.fmax,
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
ONE = ("sqrt.rn", "neg", "abs", "rcp.rn")


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", SPECIAL)
def test_zeros_infinities_denormals_and_nan(name: str, kind: str) -> None:
    inputs = [numbers(kind, seed) for seed in range(1 if name in ONE else 2)]
    got = compute(f"{name}.{kind} %d, {', '.join(['%a', '%b'][: len(inputs)])};", kind, *[(kind, x) for x in inputs])
    assert_same(got, special(name, inputs))


def special(name: str, inputs: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        want = SPECIAL[name](*inputs)
    if name in ("min", "max"):  # of zeros min is -0 and max 0
        zeros = (inputs[0] == 0) & (inputs[1] == 0)
        sign = (
            np.signbit(inputs[0]) | np.signbit(inputs[1])
            if name == "min"
            else np.signbit(inputs[0]) & np.signbit(inputs[1])
        )
        want = np.where(zeros, np.where(sign, -0.0, 0.0), want).astype(want.dtype)
    return want


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn", "min", "max", "neg", "abs"])
def test_ftz_flushes_denormals_coming_and_going(name: str) -> None:
    random = np.random.default_rng(5)
    inputs = [
        (random.standard_normal(COUNT) * 2.0 ** random.integers(-150, -120, COUNT)).astype(np.float32) for _ in range(2)
    ]
    inputs = inputs[: 1 if name in ONE else 2]
    op, _, mode = name.partition(".")
    words = f"{op}.{mode + '.' if mode else ''}ftz.f32"
    got = compute(f"{words} %d, {', '.join(['%a', '%b'][: len(inputs)])};", "f32", *[("f32", x) for x in inputs])
    want = flushed(special(name, [flushed(x) for x in inputs]))
    assert (flushed(inputs[0]) != inputs[0]).any()
    assert_same(got, want)


ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", [*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan"])
def test_a_comparison_of_floats(name: str, kind: str) -> None:
    a, b = numbers(kind, 1), np.where(np.arange(COUNT) % 3 == 0, numbers(kind, 1), numbers(kind, 2))
    got = compute(f"setp.{name}.{kind} %q, %a, %b; selp.u32 %d, 1, 0, %q;", "u32", (kind, a), (kind, b))
    sick = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        want = sick if name == "nan" else ~sick
    else:
        want = np.where(sick, name.endswith("u"), ORDERED[name.removesuffix("u")](a, b))
    assert_same(got, want.astype(np.uint32))


APPROXIMATIONS = {
    "ex2.approx": np.exp2, "lg2.approx": np.log2, "rcp.approx": lambda x: 1 / x, "sqrt.approx": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x), "sin.approx": np.sin, "cos.approx": np.cos, "tanh.approx": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("ulps", [0, 2])
@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_an_approximation_is_off_by_as_much_as_asked(name: str, ulps: int) -> None:
    random = np.random.default_rng(7)
    low, high = (0.01, 8) if name[:3] in ("lg2", "rsq", "sqr", "rcp") else (-3, 3)
    x = random.uniform(low, high, COUNT).astype(np.float32)
    with machine().approximations(ulps):
        got = compute(f"{name}.f32 %d, %a;", "f32", ("f32", x))
    exact = APPROXIMATIONS[name](x.astype(np.float64))
    apart = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert float(apart.max()) <= 1 + ulps
    assert float(apart.max()) > (1 if ulps else 0)


# ---- conversions -----------------------------------------------------------------------------------------------------

HOW = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", HOW)
def test_a_float_becomes_an_integer_within_its_limits(mode: str, kind: str, to: str) -> None:
    x = numbers(kind, 9)
    x[200:] *= 3e9
    x = np.where(np.isnan(x), 0, x).astype(x.dtype)
    got = compute(f"cvt.{mode}.{to}.{kind} %d, %a;", to, (kind, x))
    limits = np.iinfo(DTYPES[to])
    infinite = {math.inf: limits.max, -math.inf: limits.min}
    whole = HOW[mode](x).tolist()
    assert_same(got, [infinite[v] if math.isinf(v) else min(max(int(v), limits.min), limits.max) for v in whole])


def test_nan_becomes_zero_as_an_integer_of_32_bits() -> None:
    x = np.full(COUNT, np.nan, np.float32)
    assert (compute("cvt.rzi.s32.f32 %d, %a;", "s32", ("f32", x)) == 0).all()
    assert (compute("cvt.rni.u32.f32 %d, %a;", "u32", ("f32", x)) == 0).all()


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_an_integer_becomes_a_float(mode: str, kind: str) -> None:
    x = numbers(kind, 11)
    got = compute(f"cvt.{mode}.f32.{kind} %d, %a;", "f32", (kind, x))
    want = [rounded(Fraction(int(v)), mode) if v else np.float32(0) for v in x]
    assert_same(got, want)
    if mode == "rn":
        got = compute(f"cvt.rn.f64.{kind} %d, %a;", "f64", (kind, x))
        assert_same(got, [float(int(v)) for v in x])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_a_double_becomes_a_float(mode: str) -> None:
    x = finite("f64", 13)
    got = compute(f"cvt.{mode}.f32.f64 %d, %a;", "f32", ("f64", x))
    assert_same(got, [rounded(Fraction(float(v)), mode) for v in x])


def test_floats_become_wider_and_whole_and_are_clamped() -> None:
    x = numbers("f32", 15)
    assert_same(compute("cvt.f64.f32 %d, %a;", "f64", ("f32", x)), x.astype(np.float64))
    assert_same(compute("cvt.rmi.f32.f32 %d, %a;", "f32", ("f32", x)), np.floor(x))
    got = compute("cvt.sat.f32.f32 %d, %a;", "f32", ("f32", x))
    assert_same(got, np.where(x > 0, np.minimum(x, 1), 0).astype(np.float32))
    halves = np.arange(COUNT, dtype=np.uint16) * 255
    assert_same(compute("cvt.f32.f16 %d, %a;", "f32", ("u16", halves)), halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", ["s64", "u32", "s16"])
@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_an_integer_becomes_wider_or_narrower(to: str, kind: str) -> None:
    x, wide = numbers(kind, 17), max(32, int(to[1:]))
    register = f"{to[0]}{wide}"  # narrower results fill a register of 32 bits, with their sign
    assert_same(compute(f"cvt.{to}.{kind} %d, %a;", register, (kind, x)), [wrapped(int(v), to) for v in x])
    limits = np.iinfo(DTYPES[to])
    got = compute(f"cvt.sat.{to}.{kind} %d, %a;", register, (kind, x))
    assert_same(got, [min(max(int(v), limits.min), limits.max) for v in x])


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "count"), [(k, n) for k in ("u8", "u16", "u32", "f64") for n in (1, 2, 4) if (k, n) != ("f64", 4)]
)
def test_vectors_are_loaded_and_stored(kind: str, count: int) -> None:
    size = DTYPES[kind].itemsize
    given, out = numbers(kind, 1)[: 32 * count], np.zeros(32 * count, DTYPES[kind])
    names = [f"%x{k}" for k in range(count)]
    many = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    word = f"v{count}." if count > 1 else ""
    run(f"""{{ .reg .b64 %rd<4>; .reg .b32 %r; .reg .b{max(16, 8 * size)} %x<4>;
      mov.u32 %r, %tid.x; mul.wide.u32 %rd3, %r, {size * count};
      ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
      ld.global.nc.{word}{kind} {many}, [%rd1+0]; st.global.{word}{kind} [%rd2], {many}; ret; }}""",
        given, out, threads=32)  # fmt: skip
    assert_same(out, given)


def test_narrow_loads_fill_the_register() -> None:
    x = numbers("s8", 1)
    for load, want in (("s8", x.astype(np.int32)), ("u8", x.view(np.uint8).astype(np.int32))):
        out = np.zeros(COUNT, np.int32)
        run(f"""{{ .reg .b64 %rd<5>; .reg .b32 %r<3>;
          mov.u32 %r1, %tid.x; cvt.u64.u32 %rd3, %r1; mul.wide.u32 %rd4, %r1, 4;
          ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd4;
          ld.global.{load} %r2, [%rd1]; st.global.u32 [%rd2], %r2; ret; }}""", x, out)  # fmt: skip
        assert_same(out, want)


def each_thread(
    statements: str, out: np.ndarray, *arrays: np.ndarray, threads: int = COUNT, blocks: int = 1, shared: int = 0
) -> None:
    """Run statements over %i (the thread), %o (where its number in out is) and %p1, ... (where the arrays are)."""
    size = out.dtype.itemsize
    addresses = "".join(f"ld.param.u64 %p{k + 1}, [p{k + 1}];" for k in range(len(arrays)))
    text = f"""{{ .reg .b64 %o, %w<9>, %p<9>; .reg .b32 %i, %g, %x<9>; .reg .f32 %f<9>; .reg .pred %q<9>;
      .local .align 4 .b8 room[16]; .shared .align 16 .b8 few[1024];
      mov.u32 %i, %tid.x; mov.u32 %g, %ctaid.x; mad.lo.u32 %g, %g, {threads}, %i;
      ld.param.u64 %o, [p0]; mul.wide.u32 %w0, %g, {size}; add.s64 %o, %o, %w0; {addresses}
      {statements} ret; }}"""
    run(text, out, *arrays, threads=threads, blocks=blocks, shared=shared)


def test_local_memory_is_the_threads_own() -> None:
    out = np.zeros(COUNT, np.uint32)
    each_thread("st.local.u32 [room+4], %i; bar.sync 0; ld.local.u32 %x1, [room+4]; st.global.u32 [%o], %x1;", out)
    assert out.tolist() == list(range(COUNT))


def test_generic_addresses_reach_shared_and_local_memory() -> None:
    out = np.zeros(COUNT, np.uint32)
    each_thread(
        """mul.wide.u32 %w1, %i, 4; mov.u64 %w2, few; cvta.shared.u64 %w2, %w2; add.s64 %w1, %w1, %w2; st.u32 [%w1], %i;
        mov.u64 %w3, room; cvta.local.u64 %w3, %w3; ld.u32 %x1, [%w1]; st.u32 [%w3], %x1; ld.local.u32 %x2, [room];
        st.global.u32 [%o], %x2;""",
        out,
    )
    assert out.tolist() == list(range(COUNT))


def test_shared_memory_goes_through_barriers_and_begins_as_nan() -> None:
    out = np.zeros(2 * COUNT, np.uint32)
    each_thread(
        """mul.lo.u32 %x1, %i, 4; mov.u32 %x2, few; add.u32 %x1, %x1, %x2; mul.lo.u32 %x3, %g, 3;
        st.shared.u32 [%x1], %x3;
        bar.sync 0; sub.u32 %x4, 1020, %x1; ld.shared.u32 %x5, [%x4]; st.global.u32 [%o], %x5;""",
        out,
        blocks=2,
    )
    assert out.reshape(2, COUNT).tolist() == [[3 * (COUNT * b + COUNT - 1 - i) for i in range(COUNT)] for b in range(2)]
    each_thread("ld.shared.f32 %f1, [few+16]; st.global.f32 [%o], %f1;", out.view(np.float32))
    assert np.isnan(out.view(np.float32)[:COUNT]).all()


def test_parameters_may_be_structures() -> None:
    import ctypes

    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_uint32), ("b", ctypes.c_uint64), ("c", ctypes.c_float * 2)]

    out = torch.zeros(3, dtype=torch.float64)
    text = f"""{HEAD}.visible .entry k(.param .u64 out, .param .align 8 .b8 pair[24], .param .u8 last)
    {{ .reg .b64 %rd<3>; .reg .b32 %r<2>; .reg .f64 %d<4>; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [pair]; cvt.rn.f64.u32 %d1, %r1; st.global.f64 [%rd1], %d1;
    ld.param.u64 %rd2, [pair+8]; cvt.rn.f64.u64 %d2, %rd2; st.global.f64 [%rd1+8], %d2;
    ld.param.v2.f32 {{%f1, %f2}}, [pair+16]; add.f32 %f1, %f1, %f2; ld.param.u8 %r1, [last]; cvt.rn.f32.u32 %f2, %r1;
    add.f32 %f1, %f1, %f2; cvt.f64.f32 %d3, %f1; st.global.f64 [%rd1+16], %d3; ret; }}"""
    machine().module(text).run(
        "k", [1], [1], out, Pair(7, 1 << 40, (ctypes.c_float * 2)(0.5, 2.0)), ctypes.c_uint8(200)
    )
    assert out.tolist() == [7.0, 2.0**40, 202.5]


def test_variables_of_the_module_keep_their_values() -> None:
    text = f"""{HEAD}.global .align 4 .u32 counter = 5; .const .align 4 .b8 words[8] = {{1, 0, 0, 0, 2, 1}};
    .visible .entry k(.param .u64 out) {{ .reg .b64 %rd; .reg .b32 %r<4>; ld.param.u64 %rd, [out];
    atom.global.add.u32 %r1, [counter], 1; ld.const.u32 %r2, [words+4]; add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd], %r1; ret; }}"""
    module, out = machine().module(text), torch.zeros(1, dtype=torch.int32)
    for k in range(3):
        module.run("k", [1], [1], out)
        assert int(out) == 5 + k + 258


ATOMICS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add.u32": ("u32", operator.add),
    "add.u64": ("u64", operator.add),
    "min.u32": ("u32", min),
    "min.s32": ("s32", min),
    "max.s32": ("s32", max),
    "max.u64": ("u64", max),
    "and.b32": ("u32", operator.and_),
    "or.b32": ("u32", operator.or_),
    "xor.b32": ("u32", operator.xor),
    "exch.b32": ("u32", lambda old, x: x),
    "inc.u32": ("u32", lambda old, x: 0 if old >= x else old + 1),
    "dec.u32": ("u32", lambda old, x: x if old == 0 or old > x else old - 1),
}


@pytest.mark.parametrize("space", ["global", "shared", "global.relaxed.gpu", "acq_rel.gpu.global"])
@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_returns_what_was_there_before(name: str, space: str) -> None:
    kind, python = ATOMICS[name]
    size, x = DTYPES[kind].itemsize, numbers(kind, 3)
    memory, out = np.full(1, 77, DTYPES[kind]), np.zeros(COUNT, DTYPES[kind])
    bits = 8 * size
    begin = f"""setp.ne.u32 %q1, %i, 0; ld.global.b{bits} %v0, [%p1]; @!%q1 st.shared.b{bits} [few], %v0; bar.sync 0;
      mul.wide.u32 %w1, %i, {size}; add.s64 %w1, %w1, %p2; ld.global.b{bits} %v1, [%w1];"""
    place = "[few]" if space == "shared" else "[%p1]"
    statements = f".reg .b{bits} %v<4>; {begin} atom.{space}.{name} %v2, {place}, %v1; st.global.b{bits} [%o], %v2;"
    if space == "shared":
        statements += f"bar.sync 0; @!%q1 ld.shared.b{bits} %v0, [few]; @!%q1 st.global.b{bits} [%p1], %v0;"
    each_thread(statements, out, memory, x)
    state, before = 77, []
    for value in x:  # lanes take their turns in order
        before.append(state)
        state = wrapped(int(python(state, int(value))), kind)
    assert_same(out, before)
    assert int(memory[0]) == state


def test_compare_and_swap_and_reductions_without_a_result() -> None:
    lock, total, out = np.zeros(1, np.uint32), np.zeros(1, np.float32), np.zeros(COUNT, np.uint32)
    each_thread(
        """atom.global.cas.b32 %x1, [%p1], %i, 9999; st.global.u32 [%o], %x1;
        cvt.rn.f32.u32 %f1, %i; red.global.add.f32 [%p2], %f1;""",
        out,
        lock,
        total,
    )
    assert out.tolist() == [0] + [9999] * (COUNT - 1)
    assert float(total[0]) == sum(range(COUNT))


COPY = """mul.lo.u32 %x1, %i, 16; mov.u32 %x2, few; add.u32 %x1, %x1, %x2;
  mul.wide.u32 %w1, %i, 16; add.s64 %w1, %w1, %p1;
  cp.async.cg.shared.global [%x1], [%w1], 16; cp.async.commit_group;
  add.s64 %w2, %w1, 512; cp.async.ca.shared.global [%x1+512], [%w2], 16; cp.async.commit_group; {wait}
  ld.shared.u32 %x3, [%x1]; ld.shared.u32 %x4, [%x1+512]; xor.b32 %x3, %x3, %x4; st.global.u32 [%o], %x3;"""


@pytest.mark.parametrize(
    ("wait", "first", "second"),
    [
        ("", False, False),
        ("cp.async.wait_group 1;", True, False),
        ("cp.async.wait_group 0;", True, True),
        ("cp.async.wait_all;", True, True),
    ],
)
def test_an_asynchronous_copy_is_there_when_it_was_waited_for(wait: str, first: bool, second: bool) -> None:
    given, out = np.arange(32 * 8, dtype=np.uint32) * 1001, np.zeros(32, np.uint32)
    each_thread(COPY.format(wait=wait), out, given, threads=32)
    a, b = given.reshape(2, 32, 4)[..., 0]
    none = np.full(32, 0xFFFFFFFF, np.uint32)
    assert_same(out, (a if first else none) ^ (b if second else none))


# ---- warps, blocks, branches -----------------------------------------------------------------------------------------


def warp(statements: str, x: np.ndarray, threads: int = 32) -> np.ndarray:
    """Return what each thread leaves in %x1, with its number of x in %x0."""
    out = np.zeros(threads, np.uint32)
    begin = "mul.wide.u32 %w1, %i, 4; add.s64 %w1, %w1, %p1; ld.global.u32 %x0, [%w1]; mov.u32 %x1, 0;"
    each_thread(f"{begin} {statements} st.global.u32 [%o], %x1;", out, x[:threads], threads=threads)
    return out


FULL = "0xffffffff"
LANES = np.random.default_rng(21).integers(0, 5, 64).astype(np.uint32)
SHUFFLES = {
    "idx.b32 %x1, %x0, 5, 31": lambda i: 5,
    "idx.b32 %x1, %x0, %i, 31": lambda i: i,
    "up.b32 %x1, %x0, 3, 0": lambda i: i - 3 if i >= 3 else i,
    "down.b32 %x1, %x0, 7, 31": lambda i: i + 7 if i + 7 <= 31 else i,
    "bfly.b32 %x1, %x0, 16, 31": lambda i: i ^ 16,
    "down.b32 %x1, %x0, 1, 0x181f": lambda i: i + 1 if i % 8 != 7 else i,  # segments of eight
    "idx.b32 %x1, %x0, 9, 0x181f": lambda i: i // 8 * 8 + 1,
}


@pytest.mark.parametrize("text", SHUFFLES)
def test_a_shuffle(text: str) -> None:
    got = warp(f"shfl.sync.{text}, {FULL};", np.arange(32, dtype=np.uint32) * 3)
    assert got.tolist() == [3 * SHUFFLES[text](i) for i in range(32)]


def test_a_shuffle_says_whether_the_source_was_in_range() -> None:
    got = warp(f"shfl.sync.up.b32 %x2|%q1, %x0, 4, 0, {FULL}; selp.u32 %x1, 1, 0, %q1;", LANES)
    assert got.tolist() == [int(i >= 4) for i in range(32)]


VOTES = {
    "vote.sync.ballot.b32 %x1, %q1, {m};": lambda yes: sum(1 << i for i, y in enumerate(yes) if y),
    "vote.sync.any.pred %q2, %q1, {m}; selp.u32 %x1, 1, 0, %q2;": lambda yes: int(any(yes)),
    "vote.sync.all.pred %q2, %q1, {m}; selp.u32 %x1, 1, 0, %q2;": lambda yes: int(all(yes)),
    "vote.sync.uni.pred %q2, %q1, {m}; selp.u32 %x1, 1, 0, %q2;": lambda yes: int(all(yes) or not any(yes)),
    "vote.sync.ballot.b32 %x1, !%q1, {m};": lambda yes: sum(1 << i for i, y in enumerate(yes) if not y),
}


@pytest.mark.parametrize("text", VOTES)
@pytest.mark.parametrize("least", [0, 2, 9])
def test_a_vote(text: str, least: int) -> None:
    got = warp(f"setp.ge.u32 %q1, %x0, {least}; {text.format(m=FULL)}", LANES)
    assert (got == VOTES[text]([x >= least for x in LANES[:32].tolist()])).all()


def test_lanes_of_equal_values_find_each_other() -> None:
    got = warp(f"match.any.sync.b32 %x1, %x0, {FULL};", LANES)
    assert got.tolist() == [sum(1 << k for k in range(32) if LANES[k] == LANES[i]) for i in range(32)]
    for values, want in ((LANES, 0), (np.full(32, 7, np.uint32), 0xFFFFFFFF)):
        assert (warp(f"match.all.sync.b32 %x1|%q1, %x0, {FULL}; @!%q1 add.u32 %x1, %x1, 0;", values) == want).all()


REDUX = {
    "add.u32": sum,
    "min.u32": min,
    "max.u32": max,
    "and.b32": np.bitwise_and.reduce,
    "or.b32": np.bitwise_or.reduce,
    "xor.b32": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("name", REDUX)
def test_a_reduction_of_a_warp(name: str) -> None:
    values = numbers("u32", 5)[:32]
    assert (
        warp(f"redux.sync.{name} %x1, %x0, {FULL};", values) == wrapped(int(REDUX[name](values.tolist())), "u32")
    ).all()


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_halves_of_a_warp_go_separate_ways_and_meet(seed: int) -> None:
    text = f"""setp.lt.u32 %q1, %i, 16; @%q1 bra LOW;
      vote.sync.ballot.b32 %x1, %q1, 0xffff0000; shfl.sync.bfly.b32 %x2, %i, 1, 31, 0xffff0000; bra MEET;
      LOW: mov.u32 %x2, 100; bar.warp.sync 0xffff;
      MEET: bar.warp.sync {FULL}; shfl.sync.bfly.b32 %x1, %x2, 31, 31, {FULL};"""
    with machine().schedule(seed):
        got = warp(text, LANES)
    assert got.tolist() == [(31 - i) ^ 1 if i < 16 else 100 for i in range(32)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_lane_takes_its_own_turns_of_a_loop(seed: int) -> None:
    x = np.arange(1, 65, dtype=np.uint32)
    text = """LOOP: setp.eq.u32 %q1, %x0, 1; @%q1 bra DONE; and.b32 %x2, %x0, 1; setp.eq.u32 %q2, %x2, 0;
      @%q2 bra EVEN; mad.lo.u32 %x0, %x0, 3, 1; bra NEXT; EVEN: shr.u32 %x0, %x0, 1;
      NEXT: add.u32 %x1, %x1, 1; bra LOOP; DONE: add.u32 %x1, %x1, 0;"""

    def collatz(n: int) -> int:
        return 0 if n == 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)

    with machine().schedule(seed):
        assert warp(text, x, threads=64).tolist() == [collatz(n) for n in range(1, 65)]


def test_the_active_mask_is_of_those_that_are_here() -> None:
    text = "setp.lt.u32 %q1, %i, 12; @!%q1 bra OUT; activemask.b32 %x1; OUT: add.u32 %x1, %x1, 0;"
    assert warp(text, LANES).tolist() == [0xFFF] * 12 + [0] * 20


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("bar.red.popc.u32 %x1, 0, %q1;", lambda yes: sum(yes)),
        ("bar.red.or.pred %q2, 0, %q1; selp.u32 %x1, 1, 0, %q2;", lambda yes: int(any(yes))),
        ("bar.red.and.pred %q2, 0, !%q1; selp.u32 %x1, 1, 0, %q2;", lambda yes: int(not any(yes))),
    ],
)
@pytest.mark.parametrize("least", [2, 9])
def test_a_barrier_that_counts(text: str, want: Callable[[list[bool]], int], least: int) -> None:
    got = warp(f"setp.ge.u32 %q1, %x0, {least}; {text}", LANES, threads=64)
    assert (got == want([x >= least for x in LANES.tolist()])).all()


def test_special_registers() -> None:
    out = np.zeros(2 * 40, np.uint32)
    each_thread(
        """mov.u32 %x1, %laneid; mov.u32 %x2, %nctaid.x; mov.u32 %x3, %ntid.x;
        mov.u32 %x4, %lanemask_lt; popc.b32 %x4, %x4;
        sub.u32 %x4, %x4, %x1; mad.lo.u32 %x1, %x2, 100, %x1; mad.lo.u32 %x1, %x3, 1000, %x1; add.u32 %x1, %x1, %x4;
        st.global.u32 [%o], %x1;""",
        out,
        threads=40,
        blocks=2,
    )
    assert out.tolist() == [40_000 + 200 + i % 32 for i in range(40)] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------

FAULTS = {
    "st.global.u32 [%o+2], %i;": "misaligned",
    "ld.shared.u32 %x1, [few+1024];": "out of bounds of 4 bytes at 0x400 of shared",
    "ld.shared.v4.u32 {%x1, %x2, %x3, %x4}, [few+1016];": "misaligned|out of bounds",
    "st.local.u32 [room+16], %i;": "out of bounds of 4 bytes at 0x10 of local",
    "mov.u64 %w1, 0; ld.global.u32 %x1, [%w1+16];": "null pointer",
    "setp.eq.u32 %q1, %i, 3; @%q1 bra OUT; bar.sync 0; OUT: add.u32 %x1, %x1, 0;": "that .* do not reach|pass by",
    "setp.eq.u32 %q1, %i, 3; @%q1 bar.sync 0;": "a barrier that some lanes pass by",
    "setp.eq.u32 %q1, %i, 3; @%q1 bra OUT; bar.sync 0; OUT: bar.sync 0;": "different barriers",
    "bar.warp.sync 0xfffffff0;": "not in its own member mask",
    "setp.eq.u32 %q1, %i, 3; @%q1 ret; bar.warp.sync 0xffffffff;": "lanes that have ended",
    "setp.lt.u32 %q1, %i, 8; @!%q1 ret; shfl.sync.idx.b32 %x1, %i, 9, 31, 0xff;": "reads lane 9",
    "setp.lt.u32 %q1, %i, 9; selp.b32 %x2, 0xffff, 0xffffffff, %q1; bar.warp.sync %x2;": "different member masks",
    "LOOP: ld.global.u32 %x1, [%o]; setp.eq.u32 %q1, %x1, 0; @%q1 bra LOOP;": "loop without end",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_mistake_is_a_fault(text: str) -> None:
    with machine().patience(10_000), pytest.raises(Fault, match=FAULTS[text]):
        each_thread(text, np.zeros(32, np.uint32), threads=32)
    out = np.zeros(32, np.uint32)
    each_thread("st.global.u32 [%o], %i;", out, threads=32)
    assert out.tolist() == list(range(32)), "the next launch is as good as new"


#: Statements over shared memory, at %x1 for each thread, and the hazards that they have.
OWN = "mov.u32 %x2, few; mad.lo.u32 %x1, %i, 4, %x2;"
HALVES = "mov.u32 %x2, few; mad.lo.u32 %x1, %i, 2, %x2; st.shared.u16 [%x1], 1;"
HAZARDS = {
    f"{OWN} st.shared.u32 [%x1], %i; ld.shared.u32 %x3, [%x1];": [],
    f"{OWN} st.shared.u32 [%x1], %i; bar.sync 0; xor.b32 %x1, %x1, 128; ld.shared.u32 %x3, [%x1];": [],
    f"{OWN} st.shared.u32 [%x1], %i; xor.b32 %x1, %x1, 128; ld.shared.u32 %x3, [%x1];": ["between warps"],
    f"{OWN} st.shared.u32 [%x1], %i; xor.b32 %x1, %x1, 4; ld.shared.u32 %x3, [%x1];": ["within a warp"],
    f"{OWN} st.shared.u32 [%x1], %i; bar.warp.sync 0xffffffff; xor.b32 %x1, %x1, 4; ld.shared.u32 %x3, [%x1];": [],
    f"{OWN} st.shared.u32 [%x1], %i; bar.sync 0; ld.shared.u32 %x3, [few]; st.shared.u32 [%x1], %x3;": [
        "shared memory, between warps"
    ],
    "st.shared.u32 [few], %i;": ["two writes in shared memory"],
    f"{OWN} setp.lt.u32 %q1, %i, 9; @%q1 st.shared.u32 [%x1], %i; ld.shared.u32 %x3, [%x1];": ["that was not written"],
    # Two threads in one word, each in its half.
    f"{HALVES} ld.shared.u16 %x3, [%x1]; st.shared.u16 [%x1], 2;": [],
    f"{HALVES} xor.b32 %x1, %x1, 2; ld.shared.u16 %x3, [%x1];": ["within a warp"],
    "atom.shared.add.u32 %x3, [few], 1;": ["that was not written"],
    "atom.global.add.u32 %x3, [%p1], 1;": [],
    "st.global.u32 [%p1], %g;": ["two writes in global memory, between blocks", "between warps", "within a warp"],
    "atom.global.add.u32 %x3, [%p1], 1; ld.global.u32 %x3, [%p1];": ["a read after a write in global memory"],
    "st.global.u32 [%o], %i; ld.global.u32 %x3, [%o];": [],
    # Both warps of the second block have read behind the first block's reads, and are ordered by their barrier.
    "ld.global.u32 %x3, [%p1]; bar.sync 0; setp.eq.u32 %q1, %g, 96; @%q1 st.global.u32 [%p1], %i;": [
        "a write after a read in global memory, between blocks"
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", HAZARDS)
def test_accesses_without_a_barrier_between_are_hazards(text: str) -> None:
    with machine().races():
        each_thread(text, np.zeros(2 * 64, np.uint32), np.zeros(64, np.uint32), threads=64, blocks=2)
        found = [hazard.words for hazard in machine().hazards()]
    assert bool(found) == bool(HAZARDS[text]), found
    for words in HAZARDS[text]:
        assert any(re.search(words, one) for one in found), found


UNKNOWN = [
    "min.NaN.f32 %f1, %f2, %f3;",
    "add.sat.f32 %f1, %f2, %f3;",
    "add.rz.f64 %w1, %w2, %w3;",
    "sqrt.rz.f32 %f1, %f2;",
    "tanh.approx.f16 %x1, %x2;",
    "fma.rn.bf16x2 %x1, %x2, %x3, %x4;",
    "bar.sync 1;",
    "bar.sync 0, 32;",
    "bar.arrive 0, 64;",
    "mov.u32 %x1, %clock;",
    "atom.global.add.noftz.f16 %x1, [%o], %x2;",
    "atom.global.cas.b16 %x1, [%o], %x2, %x3;",
    "ld.global.b128 %w1, [%o];",
    "ld.shared::cluster.u32 %x1, [few];",
    "cp.async.bulk.wait_all;",
    "fence.proxy.async;",
    "mbarrier.init.shared.b64 [few], 32;",
    "vadd.s32.s32.s32 %x1, %x2, %x3;",
    "wgmma.fence.sync.aligned;",
    "trap;",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_not_known_is_a_fault_where_it_is_reached(text: str) -> None:
    with pytest.raises(Fault, match="not known, or not to be reached"):
        each_thread(text, np.zeros(32, np.uint32), threads=32)
    each_thread(f"bra OVER; {text} OVER: st.global.u32 [%o], %i;", np.zeros(32, np.uint32), threads=32)
    opcode = text.rstrip(";").split()[0]
    assert opcode in machine().unknown()


def test_a_fault_says_what_is_not_known() -> None:
    with pytest.raises(Fault, match=r"\.NaN is not known of min .*PTX line"):
        each_thread("min.NaN.f32 %f1, %f2, %f3;", np.zeros(32, np.uint32), threads=32)


def test_text_that_is_no_ptx_is_refused() -> None:
    with pytest.raises(ValueError, match="line 4"):
        machine().module(f"{HEAD}nonsense")


def test_a_launch_of_a_wrong_shape_is_refused() -> None:
    module = machine().module(f"{HEAD}.visible .entry k() .maxntid 64 {{ ret; }}")
    for grid, block in (([1], [65]), ([0], [32]), ([1], [0])):
        with pytest.raises(Fault, match=r"launch bounds|shape"):
            module.run("k", grid, block)
    with pytest.raises(Fault, match="no such kernel"):
        module.run("other", [1], [1])
