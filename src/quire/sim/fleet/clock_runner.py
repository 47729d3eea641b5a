"""A runner that computes nothing: every token is the same. Where nobody asks for values, only the clock matters."""

from quire.core.step import RowResult, StepPlan, StepResult

TOKEN = 0
"""Which no prompt of a trace has: answers are nobody's prefix."""
_ANSWERED = RowResult((TOKEN,))
_NOTHING = RowResult()


def answer_of(plan: StepPlan) -> StepResult:
    """What the core needs to go on."""
    return StepResult(
        plan.step, {item.sequence_id: _NOTHING if item.sampling is None else _ANSWERED for item in plan.items}
    )
