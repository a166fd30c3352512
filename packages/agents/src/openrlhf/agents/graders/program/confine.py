"""What the supervisor takes from a program before it becomes one: Landlock rules and a filter of system calls.

Runs in the supervisor, standard library only. Linux; elsewhere nothing of this is called.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from typing import Any

PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES = 64  # more than there are
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
# Removing and making of anything (bits 4 to 12), and moving between folders (13).
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE  # rights that a rule for a file may hold
SCOPES = 0b11  # abstract sockets and signals
SCOPED = 6  # version of Landlock from which on those stay inside
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# machine: (its number in filters, names and numbers of calls)
CALLS = {
    "x86_64": (
        0xC000003E,
        "socket 41 shmget 29 semget 64 msgget 68 mq_open 240 ptrace 101 setpgid 109 setsid 112 process_vm_readv "
        "310 process_vm_writev 311 memfd_create 319 io_uring_setup 425 add_key 248 request_key 249 keyctl 250 "
        "setpriority 141 prlimit64 302 sched_setaffinity 203 sched_setscheduler 144 kill 62 tkill 200 tgkill 234 "
        "rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_send_signal 424 truncate 76 setxattr 188 lsetxattr 189 "
        "removexattr 197 lremovexattr 198 chmod 90 fchmod 91 fchmodat 268 fchmodat2 452 chown 92 fchown 93 lchown "
        "94 fchownat 260 utime 132 utimes 235 futimesat 261 utimensat 280",
    ),
    "aarch64": (
        0xC00000B7,
        "socket 198 shmget 194 semget 190 msgget 186 mq_open 180 ptrace 117 setpgid 154 setsid 157 "
        "process_vm_readv 270 process_vm_writev 271 memfd_create 279 io_uring_setup 425 add_key 217 request_key "
        "218 keyctl 219 setpriority 140 prlimit64 261 sched_setaffinity 122 sched_setscheduler 119 kill 129 tkill "
        "130 tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 pidfd_send_signal 424 truncate 45 setxattr 5 "
        "lsetxattr 6 removexattr 14 lremovexattr 15 fchmod 52 fchmodat 53 fchmodat2 452 fchownat 54 fchown 55 "
        "utimensat 88",
    ),
}
# Memory that no limit counts, other processes, and ways around a filter.
REFUSED = "ptrace process_vm_readv process_vm_writev memfd_create io_uring_setup add_key request_key keyctl"
# Where no namespaces keep a program apart: the network, what would outlive the run, what changes other processes, and
# files that Landlock leaves open to their owner.
REFUSED_OUTSIDE = (
    "socket shmget semget msgget mq_open setpriority rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal tkill "
    "truncate setxattr lsetxattr removexattr lremovexattr"
)
# Calls whose first argument is a process: allowed for the program's first one and for 0, the caller or its group.
OWN_OUTSIDE = "prlimit64 sched_setaffinity sched_setscheduler"
SIGNALS = "kill tgkill"  # such calls, too, where Landlock does not keep them inside
# Calls that succeed and do nothing there: the first two so that one signal reaches whatever the program forks, however
# fast it does; the others change files of their owner wherever they are, and programs seldom look what came of them.
IDLE_OUTSIDE = (
    "setsid setpgid chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
)
OTHER_ABI = 0x40000000  # x32, whose numbers are others
LOAD, JUMP_EQUAL, JUMP_LESS, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, FAIL, NOT_PERMITTED = 0x7FFF0000, 0x00050000, 1


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def call_filter(own: int = 0, *, signals: bool = True) -> bytes:
    """A filter as seccomp takes it, b"" for machines whose calls are not known here.

    own: the program's process where no namespaces keep it apart from others. signals: whether it may send them.
    """
    if os.uname().machine not in CALLS:
        return b""
    machine, table = CALLS[os.uname().machine]
    words = table.split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))

    def known(*names: str) -> list[int]:
        return [numbers[name] for name in " ".join(names).split() if name in numbers]

    refuse, allow = (RETURN, 0, 0, FAIL | NOT_PERMITTED), (RETURN, 0, 0, ALLOW)
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, machine), refuse]
    program += [(LOAD, 0, 0, 0), (JUMP_LESS, 0, 1, OTHER_ABI), refuse]
    for number in known(REFUSED, REFUSED_OUTSIDE if own else ""):
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    for number in known(IDLE_OUTSIDE) if own else ():
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL)]
    for number in known(OWN_OUTSIDE, "" if signals else SIGNALS) if own else ():
        program += [(JUMP_EQUAL, 0, 5, number), (LOAD, 0, 0, 16), (JUMP_EQUAL, 1, 0, own)]
        program += [(JUMP_EQUAL, 0, 1, 0), allow, refuse]
    return b"".join(struct.pack("=HBBI", *step) for step in [*program, allow])


def restrict_calls(*, signals: bool) -> bool:
    """Filters the calls of this process and all that it starts; whether the system does. Arguments of `call_filter`."""
    steps = ctypes.create_string_buffer(call_filter(os.getpid(), signals=signals))
    program = struct.pack("HP", len(steps) // 8, ctypes.addressof(steps))
    return len(steps) > 8 and libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def drop_privileges() -> None:
    """Root may read every process; its programs need nothing of the kind."""
    system = libc()
    for capability in range(CAPABILITIES):
        system.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def landlock_version() -> int:
    """-1 where there is none."""
    return libc().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def landlock(folder: str, readable: Iterable[str]) -> bool:
    """Lets this process, and all that it starts, see `readable` and change `folder` only; whether the system does.

    Other processes can be neither read nor, from version 6 on, signalled.
    """
    system, version = libc(), landlock_version()
    if version < 1:
        return False
    changes = CHANGES | (1 << 13 if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = (ctypes.c_uint64 * 3)(READ | changes, 0, SCOPES if version >= SCOPED else 0)
    size = 24 if version >= SCOPED else 8
    ruleset = system.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    own = [f"/proc/self/fd/{descriptor}" for descriptor in range(3)]  # also as /dev/stdin
    rules = dict.fromkeys(readable, READ) | dict.fromkeys((*DEVICES, *own), READ | changes)
    for place, rights in {**rules, f"/proc/{os.getpid()}": READ | WRITE_FILE, folder: READ | changes}.items():
        try:
            path = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = rights if os.path.isdir(place) else rights & OF_FILES & (READ | changes)
        rule = struct.pack("=Qi", rights, path)
        system.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(path)
    done = system.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done
