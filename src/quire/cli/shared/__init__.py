"""Code shared by several commands: flags from settings, tables, exit codes."""
