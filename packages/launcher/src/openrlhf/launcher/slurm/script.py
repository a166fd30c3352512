"""The batch script of a run, written by submitit: resources, environment, one node runner per node, requeue."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from openrlhf.launcher.slurm.environment import is_secret, variables
from openrlhf.launcher.slurm.het import OWN, read_groups
from openrlhf.launcher.slurm.names import count_gpus, minutes
from openrlhf.launcher.slurm.node import TOKEN
from openrlhf.launcher.slurm.options import GPU_FORM, PASSED_ON, runtime
from openrlhf.launcher.slurm.requeue import REQUEUE_EXIT, VERDICT
from openrlhf.launcher.slurm.runs import python_of
from openrlhf.launcher.slurm.sbatch_arguments import sbatch_arguments

SECRET = f"""{TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {TOKEN}"""
REQUEUE = f"""code=$?
if [ "$code" -eq {REQUEUE_EXIT} ] || [ -e "${VERDICT}" ]; then
  rm -f "${VERDICT}"
  echo "requeue of job $SLURM_JOB_ID" >&2
  scontrol requeue "$SLURM_JOB_ID" && sleep 120
fi
exit "$code\""""
"""After srun: outside of any container, where `scontrol` is. The step's status stays the job's. srun ends with the
highest one, which may be a lost node's: then a file says what the head has decided."""


class Executor(SlurmExecutor):
    """submitit's executor; a script can also be made on a machine without Slurm.

    het, het_steps: the directives and srun's options of every further group of a heterogeneous job.
    """

    het: Sequence[Sequence[str]] = ()
    het_steps: Sequence[Sequence[str]] = ()

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self) -> str:
        """The text that `submit` hands to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """submitit's, with the further groups of a heterogeneous job, which it knows nothing of."""
        lines = super()._make_submission_file_text(command, uid).splitlines()
        end = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
        lines[end + 1 : end + 1] = [line for group in self.het for line in ["#SBATCH hetjob", *group]]
        if self.het:
            step = next(i for i, line in enumerate(lines) if line.startswith("srun "))
            lines[step] = self._step(lines[step], command)
        return "\n".join(lines)

    def _step(self, line: str, command: str) -> str:
        """srun's line with all groups. %j is another number in each of them, and the folder of logs is the first's."""
        groups = [[":", f"--het-group={i}", *words] for i, words in enumerate(self.het_steps, start=1)]
        words = [*shlex.split(line), *(word for group in groups for word in [*group, *shlex.split(command)])]
        return " ".join('"$SLURM_JOB_ID"'.join(part and shlex.quote(part) for part in w.split("%j")) for w in words)


def make_executor(options: argparse.Namespace) -> Executor:
    """An executor that submits as `options` say."""
    folder = Path(options.log_dir).absolute() / "%j"
    executor = Executor(folder, max_num_timeout=options.max_restarts, python=python_command(options))
    executor.update_parameters(
        job_name=options.job_name,
        nodes=options.nodes,
        ntasks_per_node=1,
        time=minutes(options.time),
        cpus_per_task=options.cpus_per_task,
        exclusive=True if options.exclusive else None,
        signal_delay_s=options.signal_delay,
        stderr_to_stdout=True,
        setup=setup_lines(options),
        teardown=REQUEUE.splitlines(),
        srun_args=[*srun_arguments(options), *(["--het-group=0"] if options.het else [])],
        additional_parameters=further_parameters(options),
    )
    found = read_groups(options)
    executor.het = [group_lines(options, group) for group in found]
    executor.het_steps = [srun_arguments(argparse.Namespace(**vars(options) | vars(group))) for group in found]
    return executor


def group_lines(options: argparse.Namespace, group: argparse.Namespace) -> list[str]:
    """The directives of a further group of a heterogeneous job, which has its time limit and warning from the job."""
    given = {name: getattr(group, name.replace("-", "_")) for name in OWN}
    values = {k: v for k, v in given.items() if v is not None} | {"nodes": group.nodes, "ntasks-per-node": 1}
    values |= {"time": minutes(options.time), "signal": f"USR2@{options.signal_delay}"}
    if group.cpus_per_task:
        values["cpus-per-task"] = group.cpus_per_task
    _ask_for_gpus(values, options.gpu_form)
    flags = ["exclusive"] * group.exclusive + ["requeue" if options.max_restarts > 0 else "no-requeue"]
    return [
        *(f"#SBATCH --{k}={shlex.quote(str(v))}" for k, v in sorted(values.items())),
        *(f"#SBATCH --{f}" for f in flags),
    ]


def submit_array(executor: Executor, functions: Sequence[Callable[[], int]]) -> list[Any]:
    """Submit one job per function, as an array where there are several; returns submitit's jobs."""
    with executor.batch():
        return [executor.submit(function) for function in functions]


def further_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """What submitit has no parameter for, or would pass on in another form; `True` is a bare flag."""
    given = {name: getattr(options, name.replace("-", "_")) for name in PASSED_ON}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _ask_for_gpus(values, options.gpu_form)
    values["wckey"] = ""  # submitit's own key is refused by sites that check them
    values["requeue" if options.max_restarts > 0 else "no-requeue"] = True
    return values | sbatch_arguments(options.sbatch_arg)


def _ask_for_gpus(values: dict[str, Any], form: str) -> None:
    """Put --gpus-per-node into the form that a site wants it in."""
    if form != GPU_FORM and (count := values.pop("gpus-per-node", None)):
        name, _, text = form.partition("=")
        values[name] = ",".join(filter(None, [values.get(name), text.replace("{}", str(count_gpus(count)))]))


def setup_lines(options: argparse.Namespace) -> list[str]:
    """Shell lines before srun. A failing line ends the job. Secret variables come with the job's environment."""
    shown = {name: value for name, value in variables(options).items() if not is_secret(name, value)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in shown.items()]
    own = [*(f"module load {shlex.quote(name)}" for name in options.module), *options.setup, *exports]
    verdict = f"export {VERDICT}={shlex.quote(str(Path(options.log_dir).absolute()))}/requeue.$SLURM_JOB_ID"
    return [
        "set -e",
        "export SLURM_EXPORT_ENV=ALL",
        *own,
        *SECRET.splitlines(),
        verdict,
        f'rm -f "${VERDICT}"',
        "set +e",
    ]


def srun_arguments(options: argparse.Namespace) -> list[str]:
    """One task per node; an end of one does not kill the others: the node runners end each other in order."""
    words = [f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--kill-on-bad-exit=0", "--wait=0"]
    if options.cpus_per_task:
        words.append(f"--cpus-per-task={options.cpus_per_task}")
    if runtime(options) == "pyxis":
        words += [f"--container-image={options.container}", f"--container-workdir={Path.cwd()}"]
        if options.container_mount:
            words.append(f"--container-mounts={','.join(options.container_mount)}")
    return [*words, *options.srun_arg]


def python_command(options: argparse.Namespace) -> str:
    """The interpreter of the node runners, as shell words."""
    python = python_of(options)
    return shlex.join([*container_words(options), python])


def container_words(options: argparse.Namespace) -> list[str]:
    """What stands before a command to run it in the container; Pyxis has it from srun."""
    if runtime(options) in ("none", "pyxis"):
        return []
    binds = [word for mount in options.container_mount for word in ("--bind", mount)]
    return [runtime(options), "exec", "--nv", "--pwd", str(Path.cwd()), *binds, options.container]
