"""Help in groups: common options first, the others under headings by topic.

Plain text, for pipes and pagers.
"""

from typing import Any

from typer.core import TyperCommand

COMMON = "Options"
"""The heading of common options and of those without a group."""


class GroupedCommand(TyperCommand):
    """A command whose options have headings: an option's `rich_help_panel` names its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then each group under its heading, in the order in which they first appear."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], COMMON: []}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or COMMON
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
