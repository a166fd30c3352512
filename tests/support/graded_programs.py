"""Responses with programs, tests for them, and the reward that is right: honest ones of all shapes, and the others."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.agents.graders.code import IOTest


@dataclass(frozen=True)
class Case:
    """name: ids of known faults, then what it is."""

    name: str
    response: str
    tests: str | list[IOTest]
    reward: float
    seconds: float = 20.0


def block(source: str, opening: str = "```python", closing: str = "```") -> str:
    return f"Here it is:\n\n{opening}\n{source}\n{closing}\n"


ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
ASSERTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
ECHO = [IOTest(input="1 2\n", output="3"), IOTest(input="5 6\n", output="11\n")]
READ_ADD = "a, b = map(int, input().split())\nprint(a + b)"
UNITTEST = """import unittest

class TestAdd(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)

    def test_refused(self):
        with self.assertRaises(TypeError):
            add(1, "2")

if __name__ == "__main__":
    unittest.main()
"""
EQUALS_ALL = """class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __lt__(self, other): return True
    def __sub__(self, other): return 0
    def __float__(self): return 3.0
"""
FOREIGN = EQUALS_ALL.replace("(int)", "")
STACK = """class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    @property
    def top(self): return self.items[-1]
"""
POOL = """import multiprocessing

def square(x):
    return x * x

def squares(n):
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        return pool.map(square, range(n))
"""

HONEST = [
    Case("function and asserts", block(ADD), ASSERTS, 1.0),
    Case("stdin and stdout", block(READ_ADD), ECHO, 1.0),
    Case("one of two inputs right", block("input()\nprint(3)"), ECHO, 0.5),
    Case(
        "c05 main guard that reads input",
        block(f'{ADD}\n\nif __name__ == "__main__":\n    print(input())'),
        ASSERTS,
        1.0,
    ),
    Case("c05 input at the end", block(f"{ADD}\nprint(add(*map(int, input().split())))"), ASSERTS, 1.0),
    Case(
        "c05 class Solution without imports",
        block(
            "class Solution:\n    def twice(self, xs: List[int]) -> Optional[List[int]]:\n"
            "        return [x for _, x in sorted(Counter(xs).items())] + list(deque(xs))"
        ),
        "assert Solution().twice([1, 1]) == [2, 1, 1]",
        1.0,
    ),
    Case(
        "c05 prelude in a script",
        block("q: Deque[int] = deque([1, 2])\nprint(gcd(4, 6) + sum(q) + isqrt(9))"),
        [IOTest(input="", output="8")],
        1.0,
    ),
    Case("c05 multiprocessing fork", block(POOL.format(method="fork")), "assert squares(3) == [0, 1, 4]", 1.0),
    Case(
        "c05 multiprocessing spawn",
        block(POOL.format(method="spawn") + "\nif __name__ == '__main__':\n    print(squares(3))"),
        [IOTest(input="", output="[0, 1, 4]")],
        1.0,
    ),
    Case(
        "c05 linked list",
        block("def second(head: Optional[ListNode]):\n    return head.next.val"),
        "assert second(ListNode(1, ListNode(2))) == 2",
        1.0,
    ),
    Case("c03 sample output behind", block(READ_ADD) + "Output:\n\n```\n3\n```\nIt takes\n```\nO(n)\n```", ECHO, 1.0),
    Case(
        "c03 named text behind",
        block(READ_ADD) + "```text\nprint('no')\n```\n```bash\npip install numpy\n```",
        ECHO,
        1.0,
    ),
    Case(
        "c04 helper and main",
        block("def add(a, b):\n    return a + b") + block("print(add(*map(int, input().split())))"),
        ECHO,
        1.0,
    ),
    Case("c04 two whole programs: the last", block("print(0)") + "Better:\n" + block(READ_ADD), ECHO, 1.0),
    Case("c02 tildes", block(READ_ADD, "~~~python", "~~~"), ECHO, 1.0),
    Case("c02 not closed", f"```python\n{READ_ADD}", ECHO, 1.0),
    Case("c02 attributes", block(READ_ADD, '```python title="a.py"'), ECHO, 1.0),
    Case("c02 braces", block(READ_ADD, "```{.python .numberLines}"), ECHO, 1.0),
    Case("c02 upper case and a blank", block(READ_ADD, "``` Python"), ECHO, 1.0),
    Case(
        "c02 in a list",
        "1. So:\n   ```python\n   for _ in range(1):\n       a, b = map(int, input().split())\n"
        "       print(a + b)\n   ```\n",
        ECHO,
        1.0,
    ),
    Case("c02 quoted", "> ```py\n> a, b = map(int, input().split())\n> print(a + b)\n> ```\n", ECHO, 1.0),
    Case("c02 carriage returns", block(READ_ADD).replace("\n", "\r\n"), ECHO, 1.0),
    Case("c02 backticks inside", block('s = """\n```\n"""\n' + READ_ADD, "````python", "````"), ECHO, 1.0),
    Case("no fence", READ_ADD, ECHO, 1.0),
    Case("r07 unittest", block(ADD), UNITTEST, 1.0),
    Case("r07 unittest that imports it", block(ADD), "from solution import add\n" + UNITTEST, 1.0),
    Case("r07 doctest", block(ADD), ">>> add(1, 2)\n3\n>>> add('a', 'b')\n'ab'\n", 1.0),
    Case(
        "r07 doctest in a docstring", block(ADD), '"""\n>>> add(1, 2)\n3\n"""\nimport doctest\ndoctest.testmod()', 1.0
    ),
    Case(
        "pytest functions",
        block(ADD),
        "import pytest\n@pytest.mark.parametrize('a,b', [(1, 2), (3, 4)])\n"
        "def test_add(a, b):\n    assert add(a, b) == a + b\n",
        1.0,
    ),
    Case("check of a candidate", block(ADD), "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)", 1.0),
    Case(
        "class with state",
        block(STACK),
        "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.top == 3 and s.pop() == 3",
        1.0,
    ),
    Case(
        "changes its argument", block("def turn(xs):\n    xs.reverse()"), "a = [1, 2]\nturn(a)\nassert a == [2, 1]", 1.0
    ),
    Case(
        "takes a function", block("def twice(f, x):\n    return f(f(x))"), "assert twice(lambda x: x + 3, 1) == 7", 1.0
    ),
    Case(
        "generator and async",
        block("def up(n):\n    yield from range(n)\nasync def late():\n    return 5"),
        "import asyncio\nassert list(up(3)) == [0, 1, 2] and asyncio.run(late()) == 5",
        1.0,
    ),
    Case(
        "own exception",
        block("class Bad(ValueError): pass\ndef f(x):\n    raise Bad(x)"),
        "try:\n    f(3)\nexcept Bad as e:\n    assert e.args == (3,)\nelse:\n    assert False",
        1.0,
    ),
    Case(
        "equal objects",
        block(
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
            "    def __add__(self, o): return P(self.x + o.x)"
        ),
        "assert P(1) + P(2) == P(3) and P(1) != P(2)",
        1.0,
    ),
    Case(
        "many kinds of values",
        block(
            "from collections import *\nfrom fractions import Fraction\nimport datetime\n"
            "Pt = namedtuple('Pt', 'x y')\ndef f():\n    return {1: (2.5, None, 'é'), 'b': {3}, 'q': deque([1]), "
            "'c': Counter('aa'),\n        'f': Fraction(1, 3), "
            "'d': datetime.date(2020, 1, 2), 'z': 1+2j, 'y': b'x', 'n': 10**5000}\n"
            "def p(): return Pt(1, 2)"
        ),
        "import datetime\nfrom fractions import Fraction\nv = f()\nassert v[1] == (2.5, None, 'é') and v['b'] == {3}\n"
        "assert v['c']['a'] == 2 and v['f'] == Fraction(1, 3) and v['d'] == datetime.date(2020, 1, 2)\n"
        "assert v['z'] == 1+2j and v['y'] == b'x' and v['n'] == 10**5000 and list(v['q']) == [1]\n"
        "assert p() == (1, 2) and p().y == 2",
        1.0,
    ),
    Case("prints", block("def hello():\n    print('hi')"), ">>> hello()\nhi\n", 1.0),
    Case(
        "changes what its argument holds",
        block("def f(rows):\n    rows[0].append(1)\n    rows.append([2])"),
        "r = []\nrows = [r]\nf(rows)\nassert r == [1] and rows == [[1], [2]]",
        1.0,
    ),
    Case(
        "list nodes of the tests",
        block(
            "def turn(head):\n    p = None\n    while head:\n        head.next, p, head = p, head, head.next\n"
            "    return p"
        ),
        "class Node:\n    def __init__(self, val, next=None):\n        self.val, self.next = val, next\n"
        "h = turn(Node(1, Node(2)))\nassert h.val == 2 and h.next.val == 1 and h.next.next is None",
        1.0,
    ),
    Case("empty tests: that it runs", block("import time; time.sleep(0.01)"), "", 1.0),
]

DISHONEST = [
    Case("wrong function", block(WRONG), ASSERTS, 0.0),
    Case("c01 sys.exit before the asserts", block("import sys\nsys.exit(0)"), ASSERTS, 0.0),
    Case("c01 sys.exit behind a wrong function", block(f"{WRONG}\nimport sys\nsys.exit(0)"), ASSERTS, 0.0),
    Case("c01 sys.exit in the function", block("import sys\ndef add(a, b):\n    sys.exit(0)"), ASSERTS, 0.0),
    Case("c01 os._exit before the asserts", block("import os\nos._exit(0)"), ASSERTS, 0.0),
    Case("c01 os._exit in the function", block("import os\ndef add(a, b):\n    os._exit(0)"), ASSERTS, 0.0),
    Case("c01 equal to all, an int", block(f"{EQUALS_ALL}\ndef add(a, b):\n    return Anything(1)"), ASSERTS, 0.0),
    Case("c01 equal to all, an object", block(f"{FOREIGN}\ndef add(a, b):\n    return Anything()"), ASSERTS, 0.0),
    Case(
        "c01 near to all",
        block(f"{FOREIGN}\ndef add(a, b):\n    return Anything()"),
        "assert abs(add(1, 2) - 3) < 1e-6",
        0.0,
    ),
    Case(
        "c01 equal to all in a list",
        block(f"{FOREIGN}\ndef add(a, b):\n    return [Anything()]"),
        "assert add(1, 2) == [3]",
        0.0,
    ),
    Case(
        "c01 builtins replaced",
        block(
            "import builtins\nbuiltins.AssertionError = None\nbuiltins.abs = lambda x: 0\n"
            "builtins.isinstance = lambda *a: True\nall = lambda x: True\nabs = lambda x: 0\n"
            "def add(a, b):\n    return 0"
        ),
        "assert abs(add(1, 2) - 3) < 1e-6 and all([add(1, 1) == 2])",
        0.0,
    ),
    Case(
        "c01 unittest replaced",
        block(
            f"import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = lambda: None\n{WRONG}"
        ),
        UNITTEST,
        0.0,
    ),
    Case(
        "c01 looks for its tests",
        block(
            "import glob, os\ndef add(a, b):\n    found = ''.join(open(p, errors='replace')"
            ".read() for p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('*.py'))\n"
            "    return 3 if 'add(1, 2)' + ' == 3' in found else 0"
        ),
        "assert add(1, 2) == 3",
        0.0,
    ),
    Case(
        "c01 looks at its caller",
        block(
            "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
            "        if 'expected' in f.f_globals: return f.f_globals['expected']\n        f = f.f_back"
        ),
        "expected = 3\nassert add(1, 2) == expected",
        0.0,
    ),
    Case(
        "c01 opens a function of its tests",
        block("def add(f):\n    return f.__globals__['expected']"),
        "expected = 3\nassert add(lambda: 0) == expected",
        0.0,
    ),
    Case(
        "c01 writes on the line",
        block('import os\ndef add(a, b):\n    os.write(3, b\'{"value": 3, "changed": []}\\n\' * 9)\n    os._exit(0)'),
        "assert add(1, 2) == 4",
        0.0,
    ),
    Case(
        "r07 no unittest in it",
        block(ADD),
        "import unittest\nclass TestAdd(unittest.TestCase):\n    pass\nunittest.main()",
        0.0,
    ),
    Case("r07 no doctest in it", block(ADD), "import doctest\ndoctest.testmod()", 0.0),
    Case("r07 definitions only", block(ADD), "def check(candidate):\n    assert candidate(1, 2) == 3", 0.0),
    Case("r07 unittest fails", block(WRONG), UNITTEST, 0.0),
    Case("r07 doctest fails", block(WRONG), ">>> add(1, 2)\n3\n", 0.0),
    Case("prints and exits with an error", block(READ_ADD + "\nraise SystemExit(3)"), ECHO, 0.0),
    Case("syntax error", block("def add(a, b) return"), ASSERTS, 0.0),
    Case("no program", "I do not know.", ASSERTS, 0.0),
    Case("recursion without end", block("def add(a, b):\n    return add(b, a)"), ASSERTS, 0.0),
    Case("value without end", block("def add(a, b):\n    while True: yield 3"), "list(add(1, 2))", 0.0, 1.5),
    Case(
        "c01 a judge's function by name",
        block(
            f"{WRONG}\nadd.__module__, add.__qualname__ = 'os', '_exit'\nimport types\n"
            "end = types.ModuleType('unittest.__main__')"
        ),
        "assert add(0, 0) == 5",
        0.0,
    ),
    Case("c01 skips its tests", block("import unittest\ndef add(a, b):\n    raise unittest.SkipTest()"), UNITTEST, 0.0),
    Case("never imported", block("while True: pass"), ASSERTS, 0.0, 1.5),
    Case("sleeps", block("import time\ndef add(a, b):\n    time.sleep(300)"), ASSERTS, 0.0, 1.5),
    Case(
        "leaves children",
        block(f"import os, time\n{WRONG}\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)"),
        ASSERTS,
        0.0,
    ),
    Case("too much memory", block("def add(a, b):\n    x = bytearray(10**10)\n    return a + b"), ASSERTS, 0.0),
]
