"""The option dataclasses: what the command line reads out of them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

from openrlhf.core import config


def test_import_loads_no_ml_library() -> None:
    code = "import sys, openrlhf.core.config; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_option_has_a_help_text() -> None:
    for cls in (c for c in ast.parse(inspect.getsource(config)).body if isinstance(c, ast.ClassDef)):
        for node, following in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Name):
                if node.annotation.id.endswith("Config"):
                    continue
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{cls.name}: {ast.unparse(node.target)} has no docstring"


def test_defaults() -> None:
    algo = config.AlgoConfig()
    assert (algo.advantage.estimator, algo.advantage.gamma, algo.advantage.lambd) == ("gae", 1.0, 1.0)
    assert algo.advantage.is_correction_threshold == (0.5, 5.0)
    assert (algo.kl.init_coef, algo.kl.target, algo.kl.horizon, algo.kl.estimator) == (0.01, None, 10000, "k1")
    assert algo.dynamic_filtering_range == (0.0, 1.0)
    assert config.PolicyLossConfig().eps_clip == 0.2
    assert config.ValueLossConfig().value_clip == 0.5
    assert config.RewardShapingConfig().clip_range == (-10.0, 10.0)
