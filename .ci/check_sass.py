# SPDX-License-Identifier: BSD-3-Clause
"""Checks the machine code of the CUDA kernels for faults that tests without a GPU cannot find.

    cuobjdump -sass -arch sm_90 *.o | c++filt | python .ci/check_sass.py

Each check is a function below. The exit status is 1 if any finds a fault.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from sass import Instruction, Kernel, read

FIRST_LOAD_OF_G = 120  # project must start loading the gradient by this instruction
# The number of addresses from which back_project reads the tables of its tile and its matrix. Each
# thread of begin_work copies one word of these, and also reads the tile's first word.
TABLES = {"back_project": 2, "back_project_bfloat16": 3}
# Counts without a fence: blocks take a ticket before they write anything, and the last block begins
# the next launch.
TICKETS = {"orthogonalize": 2, "reconstruct": 2}
NO_PRODUCTS = 0  # the rank of kernels that do all but the products
LOADED_ROWS = 4  # kLoadedRows in form_m.cuh
BATCH = {8: 8, 16: 8}  # kBatch in back_project.cu, by the rank; 4 at other ranks
BFLOAT16_BATCH = 8  # the same in back_project_bfloat16.cuh
WIDTH = {"float": 128, "u16": 64}  # bits of four elements


def next_event(kernel: Kernel, i: int, *names: str) -> Instruction | None:
    """The next instruction with one of these names, in address order."""
    return next((each for each in kernel.code[i + 1 :] if each.name in names), None)


def is_acquire(each: Instruction) -> bool:
    return each.loads and {"STRONG", "GPU"} <= set(each.modifiers)


def is_counting(each: Instruction) -> bool:
    return each.name in {"ATOMG", "ATOM", "RED"} and {"ADD", "64"} <= set(each.modifiers)


def is_fenced(kernel: Kernel, i: int) -> bool:
    """True if a fence precedes an atomic, with no other memory access in between."""
    for each in reversed(kernel.code[:i]):
        if each.name == "MEMBAR":
            return True
        if each.loads or each.stores or each.name in {"ST", "STS", "BAR", "EXIT"}:
            return False
    return False


def constant_loads(kernel: Kernel) -> Iterator[str]:
    """Kernels read what others in their chain write: the read-only path may return stale values."""
    for i in kernel.numbers(r".*\.CONSTANT\b"):
        yield f"{kernel.code[i]}: a load by the read-only path"


def early_accesses(kernel: Kernel) -> Iterator[str]:
    """Before it waits for orthogonalize, back_project may load its tables and M.

    Loads of M have an eviction policy. Early loads load no more than the loops do at a time.
    """
    waits = bool(kernel.numbers("ACQBULK"))
    if kernel.family in TABLES and not waits:
        yield "it does not wait for its predecessor"
    if not waits:
        return
    early = kernel.before("ACQBULK")
    for i in early:
        if kernel.code[i].stores:
            yield f"{kernel.code[i]}: before the wait for the predecessor"
    of_m = {i for i, each in enumerate(kernel.code) if each.loads and "EF" in each.modifiers}
    first, others = (
        Counter(kernel.code[i].opcode for i in numbers)
        for numbers in (of_m & set(early), of_m - set(early))
    )
    for opcode, count in (first - others).items():
        yield f"{count} more {opcode} before the wait than after it"
    loads = [i for i in early if kernel.code[i].loads and i not in of_m]
    bases = {kernel.base(i): kernel.code[i] for i in loads}
    allowed = TABLES.get(kernel.family, 0)
    if len(bases) > allowed:
        shown = "; ".join(map(str, bases.values()))
        yield f"loads before the wait from {len(bases)} places, not {allowed}: {shown}"


def stale_acquires(kernel: Kernel) -> Iterator[str]:
    """An acquire load is followed by an L1 invalidation. Spin loops load with acquire."""
    acquires = [i for i, each in enumerate(kernel.code) if is_acquire(each)]
    if kernel.family in TICKETS and not acquires:
        yield "it never waits for another block"
    for i in acquires:
        after = next((e for e in kernel.code[i + 1 :] if e.loads or e.name in EVENTS), None)
        if after is None or after.opcode != "CCTL.IVALL":
            yield f"{kernel.code[i]}: an acquire load without CCTL.IVALL after it"
    for i in kernel.numbers("NANOSLEEP"):
        again = next_event(kernel, i, "LDG", "LD")
        if again is None or not is_acquire(again):
            yield f"{again} after a pause: a wait without an acquire load"


EVENTS = {"CCTL", "BAR", "BRA", "EXIT"}


def unfenced_posts(kernel: Kernel) -> Iterator[str]:
    """A fence precedes each count that posts a result to other blocks, and follows each arrival.

    A count is an atomic. An arrival uses the value that it returns; a post does not.
    """
    counts = [i for i, each in enumerate(kernel.code) if is_counting(each)]
    bare = [i for i in counts if not is_fenced(kernel, i)]
    if len(bare) > TICKETS.get(kernel.family, 0):
        shown = "; ".join(str(kernel.code[i]) for i in bare)
        yield f"a count without a fence before it, among {shown}"
    for i in counts:
        if i in bare or " RZ," in kernel.code[i].operands:
            continue
        after = next_event(kernel, i, "MEMBAR", "LDG", "LD", "BAR")
        if after is None or after.name != "MEMBAR":
            yield f"{kernel.code[i]}: an arrival without a fence after it"


def vectors(kernel: Kernel) -> dict[str, int]:
    """The four-element accesses that the hot loop must have: opcode patterns and their counts."""
    if kernel.rank == NO_PRODUCTS:
        return {}
    if kernel.family == "project":
        gradient, memory = (WIDTH[storage] for storage in kernel.arguments[-2:])
        loads = Counter(width for width in (gradient, memory) for _ in range(LOADED_ROWS))
        stores = {rf"STG\.E\.{memory}": LOADED_ROWS}
        return stores | {rf"LDG\.E\.EF\.{width}": count for width, count in loads.items()}
    if kernel.family in TABLES:
        plain = kernel.family == "back_project"
        rows = BATCH.get(kernel.rank, 4) if plain else BFLOAT16_BATCH
        return {r"LDG\.E\.EF\.128": rows, r"LDG\.E\.EF\.64": rows}
    if kernel.family == "reconstruct":
        return {rf"STG\.E\.EF\.{WIDTH[kernel.arguments[1]]}": 1}
    return {}


def vectors_of_loops(kernel: Kernel) -> dict[str, int]:
    """The maximum number of accesses of each expected kind in one loop."""
    wanted = vectors(kernel)
    loops = kernel.loops() if wanted else []
    most = {}
    for pattern in wanted:
        found: Counter[range] = Counter()
        for i in kernel.numbers(rf"{pattern}\b"):
            found.update([loop for loop in loops if i in loop][:1])
        most[pattern] = max(found.values(), default=0)
    return most


def narrow_accesses(kernel: Kernel) -> Iterator[str]:
    """The hot loops access four elements of G and M at a time."""
    found = vectors_of_loops(kernel)
    for pattern, count in vectors(kernel).items():
        if found[pattern] < count:
            name = pattern.replace("\\", "")
            yield f"{found[pattern]} {name} in its loop, not {count}"


def local_accesses(kernel: Kernel) -> Iterator[str]:
    """Kernels keep everything in registers: no spills, no arrays indexed at run time."""
    if count := len(kernel.numbers(r"LDL\b", r"STL\b")):
        yield f"{count} accesses to local memory"


def early_triggers(kernel: Kernel) -> Iterator[str]:
    """orthogonalize lets back_project start only after its own wait for the Gram matrices.

    Otherwise waiting blocks would occupy the place of other kernels.
    """
    if kernel.family != "orthogonalize":
        return
    triggers = kernel.numbers("PREEXIT")
    acquire = next((i for i, each in enumerate(kernel.code) if is_acquire(each)), len(kernel.code))
    barrier = next((i for i in kernel.numbers("BAR") if i > acquire), len(kernel.code))
    if not triggers:
        yield "it never lets its successor start"
    for i in triggers:
        if i < barrier:
            yield f"PREEXIT at instruction {i}, before it has waited (at {acquire})"


def first_load(kernel: Kernel) -> int | None:
    """The number of project's first load of the gradient, or of reconstruct's first of Q."""
    if kernel.family == "project":
        return kernel.first(r"LDG\.E\.EF")
    return kernel.first(r"LDG\.E\.128$") if kernel.family == "reconstruct" else None


def long_prologues(kernel: Kernel) -> Iterator[str]:
    """project starts loading the gradient early."""
    if kernel.family != "project" or kernel.rank == NO_PRODUCTS:
        return
    first = first_load(kernel)
    if first is None or first > FIRST_LOAD_OF_G:
        yield f"its first load of G is instruction {first}, beyond {FIRST_LOAD_OF_G}"


CHECKS: list[Callable[[Kernel], Iterator[str]]] = [
    constant_loads,
    early_accesses,
    stale_acquires,
    unfenced_posts,
    narrow_accesses,
    local_accesses,
    early_triggers,
    long_prologues,
]


def extent(values: list[int]) -> str:
    """The range of the values, such as "4" or "4-8"."""
    if not values:
        return "-"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"


def show(kernels: list[Kernel]) -> None:
    """Prints a line for each family, and where the first loads are."""
    families: dict[str, list[Kernel]] = defaultdict(list)
    firsts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda each: (each.family, each.rank)):
        families[kernel.family].append(kernel)
        if (first := first_load(kernel)) is not None:
            others = ", ".join(kernel.arguments[1:])
            firsts[kernel.family, others].append(f"{kernel.rank}: {first}")
    headings = ("kernels", "instructions", "before wait", "vectors", "acquires", "counts", "local")
    print("machine code".ljust(20), *(heading.rjust(12) for heading in headings))
    for family, members in families.items():
        waiting = [each for each in members if each.numbers("ACQBULK")]
        early = [sum(k.code[i].loads for i in k.before("ACQBULK")) for k in waiting]
        cells = [
            str(len(members)),
            extent([len(each.code) for each in members]),
            extent(early),
            extent([n for each in members for n in vectors_of_loops(each).values()]),
            extent([sum(map(is_acquire, each.code)) for each in members]),
            extent([sum(map(is_counting, each.code)) for each in members]),
            extent([len(each.numbers(r"LDL\b", r"STL\b")) for each in members]),
        ]
        print(family.ljust(20), *(cell.rjust(12) for cell in cells))
    for (family, others), places in firsts.items():
        what = "G" if family == "project" else "Q"
        print(f"first load of {what}, {family}<rank, {others}>: {', '.join(places)}")


def main() -> None:
    kernels = read(sys.stdin)
    if not kernels:
        sys.exit("no machine code in the input")
    show(kernels)
    faults = 0
    for check in CHECKS:
        found = [f"{kernel.name}: {fault}" for kernel in kernels for fault in check(kernel)]
        for fault in found:
            print(f"{check.__name__}: {fault}")
        faults += len(found)
    if faults:
        sys.exit(f"{faults} faults in the machine code")


if __name__ == "__main__":
    main()
