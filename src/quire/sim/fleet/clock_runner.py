"""A runner that computes nothing: every token is the same, for simulations where only the clock matters."""

from quire.core.step import RowResult, StepPlan, StepResult

TOKEN = 0
"""Not in any prompt of a trace, so that output is never a cached prefix."""
_ANSWERED = RowResult((TOKEN,))
_NOTHING = RowResult()


def answer_of(plan: StepPlan) -> StepResult:
    """The result of a step: one fixed token for each row that samples."""
    return StepResult(
        plan.step, {item.sequence_id: _NOTHING if item.sampling is None else _ANSWERED for item in plan.items}
    )
