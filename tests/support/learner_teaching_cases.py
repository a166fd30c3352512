"""What ranks do with a teacher: another architecture, more hidden numbers, more (unused) ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import Role
from openrlhf.learner.supervised_objectives import SftObjective
from openrlhf.learner.teaching import Lesson, with_layer
from support.learner_models import VOCAB, make_batch
from support.learner_step_cases import capture_gradients, make_spec, share

LESSONS = {
    "reverse": Lesson(kind="reverse", vocab=VOCAB),
    "forward-5": Lesson(kind="forward", vocab=VOCAB, top_k=5),
    "jsd-all": Lesson(kind="jsd", beta=0.3, vocab=VOCAB, top_k=VOCAB),
}
LAYOUTS = {"stage0": (0, 8, False), "stage3": (3, 2, False), "packed": (2, 2, True), "idle": (3, 3, False)}
"""ZeRO stage of student and teacher, samples of a micro-batch, packing."""
OBJECTIVE = SftObjective(nll_coef=0.5, distill_coef=0.7)


def teaching(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Metrics and gradients of a step with every lesson and layout."""
    results = {}
    for layout, (stage, micro, packed) in LAYOUTS.items():
        for name, lesson in LESSONS.items():
            spec = make_spec(folder, stage=stage, micro=micro)
            spec = replace(spec, ds=replace(spec.ds, packing_samples=packed))
            teacher = Learner(replace(spec, role=Role.REFERENCE, optim=None, model_path=str(folder / "teacher")))
            student = Learner(spec)
            own = lesson
            if not lesson.top_k:
                own = with_layer(lesson, teacher.output_layer(), student.module.distribution, student.device)
            student.lesson = own
            batch = share(make_batch(), [] if layout == "idle" else [0, 1, 2, 3, 4], rank, world)
            batch = batch.with_(teacher=teacher.tell(batch, lesson))
            gradients = capture_gradients(student)
            results[layout, name] = {"metrics": student.update(batch, OBJECTIVE), "gradients": gradients}
    return results


def own_teacher(rank: int, world: int, folder: Path) -> dict[str, float]:
    """The norm of the gradient of a model that is its own teacher."""
    norms = {}
    for name, lesson in LESSONS.items():
        spec = make_spec(folder, stage=0, model="untied")
        student = Learner(spec)
        own = lesson
        if not lesson.top_k:
            own = with_layer(lesson, student.output_layer(), student.module.distribution, student.device)
        batch = make_batch().with_(teacher=student.tell(make_batch(), lesson))
        student.lesson = own
        norms[name] = student.update(batch, replace(OBJECTIVE, nll_coef=0.0))["grad_norm"][0]
    return norms


CASES = {"teaching": teaching, "own_teacher": own_teacher}
