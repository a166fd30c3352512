"""Tool use: the model may call a calculator before it answers.

It writes <calc>12*(3+4)</calc>, gets <result>84</result> back and goes on; its final answer stands in
<answer>84</answer>. Right answers give 1.0. The feedback goes on in the model's own turn, so it needs no turn markers;
the stop string ends each call where the expression ends.
"""

import ast
import operator
import re

from openrlhf.agents.graders.text import numeric
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

CALL = re.compile(r"<calc>(.{1,200}?)</calc>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Mod: operator.mod,
}
STOP = ("</calc>", "</answer>")


def calculate(expression):
    """The value of an arithmetic expression, or why there is none. Evaluates numbers and + - * / % ( ) only."""
    try:
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {error}"


def _value(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers and + - * / % ( )")


class AgentInstance(AgentInstanceBase):
    """One question."""

    async def reset(self, states, **kwargs):
        self.calls = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        text = states["action_text"]
        sampling = states["sampling_params"].with_(stop=STOP)
        calls = CALL.findall(text)
        if calls and not ANSWER.search(text):
            self.calls += 1
            feedback = f"\n<result>{calculate(calls[-1])}</result>\n"
            return {"rewards": 0.0, "environment_feedback": feedback, "done": False, "sampling_params": sampling}
        answers = ANSWER.findall(text)
        right = bool(answers) and numeric(answers[-1], str(states["label"]))
        return {
            "rewards": float(right),
            "environment_feedback": "",
            "done": True,
            "extra_logs": {"tool_calls": self.calls, "answered": float(bool(answers))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
