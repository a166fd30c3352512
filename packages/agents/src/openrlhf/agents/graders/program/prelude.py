"""Names that programming judges offer to a program without an import (`List`, `deque`, `gcd`, `TreeNode`).

They become builtins of the one process, and only those that a program uses and does not define.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterable
from typing import Any

# module: names in it
OFFERED = {
    "typing": "Any Callable DefaultDict Deque Dict Final FrozenSet Generic Iterable Iterator List Literal Mapping "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union Generator cast",
    "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
    "heapq": "heapify heappush heappop heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice permutations "
    "product repeat zip_longest pairwise starmap takewhile dropwhile",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi prod sqrt",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "operator": "itemgetter attrgetter",
    "dataclasses": "dataclass field",
    "abc": "ABC abstractmethod",
    "copy": "deepcopy",
    "fractions": "Fraction",
    "decimal": "Decimal",
}
MODULES = (
    "array bisect collections copy datetime decimal fractions functools heapq itertools json math operator os random "
    "re statistics string sys time typing"
)
# Modules that tests get in their own process where the program imports them under some name.
SHARED = {*MODULES.split(), "numpy", "pandas", "scipy", "sympy", "torch"}
HOMES = {name: module for module, names in OFFERED.items() for name in names.split()}
HOMES |= {name: "" for name in MODULES.split() if name not in HOMES} | {"ListNode": "", "TreeNode": ""}


class ListNode:
    """A node of a linked list, as LeetCode defines it."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """A node of a binary tree, as LeetCode defines it."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def is_offered(module: str, name: str) -> bool:
    """Whether a name of a module is one that judges offer."""
    return name in OFFERED.get(module, "").split()


def offer(names: Iterable[str]) -> dict[str, Any]:
    """Makes names builtins of this process. Returns them with their values."""
    own = {"ListNode": ListNode, "TreeNode": TreeNode}
    values = {}
    for name in names:
        home = HOMES[name]
        values[name] = own.get(name) or (
            getattr(importlib.import_module(home), name) if home else importlib.import_module(name)
        )
        setattr(builtins, name, values[name])
    return values
