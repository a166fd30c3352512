"""Programs of all shapes get the reward that is right, and leave nothing behind."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf.agents.graders.code import CodeLimits, extract_code, grade_code, run_code
from openrlhf.agents.graders.program import isolation, sandbox
from support.attacking_programs import ATTACKS
from support.graded_programs import DISHONEST, HONEST
from support.leftovers import nothing_left

AMPLE = CodeLimits(seconds=60)  # a busy machine must not turn right into wrong
BRIEF = CodeLimits(seconds=1.5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Programs run below `tmp_path`, and no process or file of theirs may be left there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    deadline = time.monotonic() + 20
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    assert not list(tmp_path.iterdir())


def processes_of(folder):
    """The processes that have the folder in their environment or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment, place = (entry / "environ").read_bytes(), os.readlink(entry / "cwd")
        except OSError:
            continue
        if str(folder).encode() in environment or place.startswith(str(folder)):
            found.append((entry.name, (entry / "cmdline").read_bytes()))
    return found


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.name)
def test_honest_programs(case):
    if "multiprocessing" in case.name and isolation.isolation() == "landlock":
        pytest.skip("there is no memory that processes share under Landlock: nobody would remove it")
    reward, results = grade_code(case.response, case.tests, AMPLE)
    assert reward == case.reward, results


@pytest.mark.parametrize("case", DISHONEST, ids=lambda case: case.name)
def test_dishonest_programs(case):
    assert grade_code(case.response, case.tests, CodeLimits(seconds=case.seconds))[0] == case.reward


PROOF = pytest.mark.proof


@pytest.fixture(params=["bubblewrap", "landlock", pytest.param("none", marks=PROOF)])
def isolated(request, monkeypatch):
    """Every way to keep programs apart that this machine allows, down to none."""
    if request.param not in isolation.allowed_isolation():
        pytest.skip(f"this machine allows {isolation.allowed_isolation()} only")
    monkeypatch.setattr(sandbox, "isolation", lambda: request.param)
    return request.param


# Of the attacks those that depend on what keeps a program apart.
SEPARATED = {
    "forks faster than it can be killed", "daemon without a trace", "verdict into other processes", "fork bomb",
    "command lines and memory of others", "files", "kills whom it sees", "kills everybody", "limits others",
}  # fmt: skip
ESCAPES = {
    "setsid": """
import subprocess, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
print(1)
""",
    "twice forked": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
print(1)
""",
    "ignores signals": """
import contextlib, os, signal, time
if os.fork() == 0:
    os.setsid()
    for number in range(1, 32):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(300)
time.sleep(0.2)
print(1)
""",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_c06_what_leaves_the_session_ends(source, isolated):
    result = run_code(source, limits=AMPLE)
    assert result.stdout == "1\n"


def test_c06_sleeping_children_end_at_the_time_limit(isolated):
    source = ESCAPES["twice forked"] + "\ntime.sleep(300)"
    assert run_code(source, limits=BRIEF).exit_code is None


def test_c06_processes_are_limited(isolated):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run_code(bomb, limits=CodeLimits(seconds=20, processes=20))
    assert not result.ok
    several = "import subprocess\nps = [subprocess.Popen(['sleep', '300']) for _ in range(40)]\nps[0].wait()"
    assert not run_code(several, limits=CodeLimits(seconds=30, processes=20)).ok


READ_OTHERS = """
import glob, os
found = b""
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += open(path, "rb").read()
    except OSError:
        pass
print(b"a-key-of-ours" in found, "a-key-of-ours" in str(os.environ))
"""


def test_c06_our_environment_is_not_readable(isolated, monkeypatch):
    """Of a process that has the key in its environment from its start, as ours would have."""
    if isolated == "none":
        pytest.skip("nothing keeps it from them")
    monkeypatch.setenv("SOME_KEY", "a-key-of-ours")
    holder = subprocess.Popen(["sleep", "300"])
    try:
        result = run_code(READ_OTHERS, limits=AMPLE)
    finally:
        holder.kill()
        holder.wait()
    assert result.stdout.split() == ["False", "False"], result


def test_c06_files_outside_its_folder_are_not_changed(isolated, folder):
    if isolated == "none":
        pytest.skip("nothing keeps it from them")
    outside = folder.parent / "outside.txt"
    outside.write_text("ours")
    source = f"open('own.txt', 'w').write('x')\nopen({str(outside)!r}, 'w').write('theirs')"
    assert f"{str(outside)!r}\n" in run_code(source, limits=AMPLE).stderr  # no such file, or permission denied
    assert outside.read_text() == "ours"


CHANGES = """
import contextlib, os
path = {path!r}
for change in (
    lambda: os.chmod(path, 0), lambda: os.chown(path, 1, 1), lambda: os.utime(path, (1, 1)),
    lambda: os.truncate(path, 1), lambda: os.setxattr(path, "user.x", b"x"), lambda: os.link(path, "own"),
    lambda: os.rename(path, "own"), lambda: os.unlink(path), lambda: os.symlink("x", path + "-link"),
    lambda: os.mkdir(path + "-folder"),
):
    with contextlib.suppress(OSError):
        change()
"""


def test_c06_nothing_about_files_outside_is_changed(isolated, folder):
    """Also what Landlock leaves to the owner of a file."""
    outside = folder.parent / "outside.txt"
    outside.write_text("ours")
    before, around = outside.stat(), sorted(folder.parent.iterdir())
    run_code(CHANGES.format(path=str(outside)), limits=AMPLE)
    if isolated == "none":
        pytest.skip("nothing keeps it from them")
    after = outside.stat()
    assert outside.read_text() == "ours"
    for what in ("st_mode", "st_uid", "st_mtime_ns", "st_nlink"):
        assert getattr(before, what) == getattr(after, what)
    assert (os.listxattr(outside), sorted(folder.parent.iterdir())) == ([], around)


def test_files_of_ours_are_not_read(isolated, folder):
    if isolated == "none":
        pytest.skip("nothing keeps it from them")
    outside = folder.parent / "labels.jsonl"
    outside.write_text("the-answer")
    source = f"""
import os
for path in ({str(outside)!r}, {__file__!r}, "/etc/shadow", {os.path.expanduser("~/.bashrc")!r}, "/dev/mem"):
    try:
        print(len(open(path, "rb").read(10)))
    except OSError:
        print("no")
try:
    print(os.listdir({str(folder.parent)!r}).count("labels.jsonl"))
except OSError:
    print("no")
"""
    assert set(run_code(source, limits=AMPLE).stdout.split()) <= {"no", "0"}


NETWORK = """
import socket
for kind, family, address in (
    (socket.SOCK_STREAM, socket.AF_INET, ("127.0.0.1", {port})),
    (socket.SOCK_DGRAM, socket.AF_INET, ("127.0.0.1", {port})),
    (socket.SOCK_STREAM, socket.AF_UNIX, {path!r}),
):
    try:
        line = socket.socket(family, kind)
        line.connect(address)
        line.send(b"x")
        print("sent")
    except OSError:
        print("no")
"""


def test_nobody_is_reached_over_a_network(isolated, folder):
    """Not even a server of this machine."""
    path = f"/tmp/heard-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(server.getsockname())
        datagrams.setblocking(False)
        run_code(NETWORK.format(port=server.getsockname()[1], path=path), limits=AMPLE)
        for waiting in (server, local):
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.accept()
        with datagrams, pytest.raises(BlockingIOError):
            datagrams.recv(1)
    os.unlink(path)


@pytest.mark.parametrize("case", [c for c in ATTACKS if c.name in SEPARATED], ids=lambda case: case.name)
def test_attacks_under_every_isolation(case, isolated):
    if isolated == "none" and case.name == "files":
        pytest.skip("nothing keeps it from them")
    with nothing_left():
        assert grade_code(case.response, case.tests, CodeLimits(seconds=case.seconds))[0] == 0.0


def test_many_files_and_large_ones_end_the_run(folder):
    many = "import itertools\nfor i in itertools.count():\n    open(f'{i}', 'w').close()"
    assert "files written" in run_code(many, limits=AMPLE).stderr
    large = "for i in range(100):\n    open(f'{i}', 'wb').write(b'x' * 900_000)\nimport time; time.sleep(30)"
    assert "files written" in run_code(large, limits=CodeLimits(seconds=60, file_mb=1)).stderr


KILLER = """
import contextlib, os, signal
def add(a, b):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if b"graders.program.judge" in open(f"/proc/{pid}/cmdline", "rb").read():
                os.kill(int(pid), signal.SIGKILL)
    return 0
"""


def test_a_program_cannot_end_its_judges(isolated):
    assert grade_code(KILLER, "assert add(1, 2) == 3", AMPLE)[0] == 0.0


GRADER = """
import sys, tempfile
from openrlhf.agents.graders.code import CodeLimits, run_code
tempfile.tempdir = sys.argv[1]
print("ready", flush=True)
run_code(sys.argv[2], limits=CodeLimits(seconds=250))
"""


def test_c06_all_ends_when_the_grader_is_killed(folder):
    """As a reward process is at its time limit. Only the folder stays: nobody is left to remove it."""
    source = ESCAPES["twice forked"] + "\nopen('ready', 'w').close()\ntime.sleep(300)"
    place = folder / "graded"
    place.mkdir()
    grader = subprocess.Popen([sys.executable, "-c", GRADER, str(place), source], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list(place.glob("code-*/ready")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes_of(place)) >= 3
    grader.kill()
    grader.wait()
    while processes_of(place) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(place)
    shutil.rmtree(place)


def test_finding_fences_takes_linear_time():
    line = "-  " * 3000 + "x"
    assert extract_code(f"{line}\n```python\nprint(1)\n```\n{'> - ' * 3000}```\n{line}") == "print(1)\n"
